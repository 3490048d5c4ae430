// Sees every launch on the device, in the threads of the autograd engine too, and enqueues holds before the launches
// that a plan names. It is a global RecordFunction callback and not a TorchDispatchMode, because an active mode makes
// the engine accumulate gradients out of place (torch::autograd::InputBuffer asks isTensorSubclassLike): the observer
// would change the observed.
#pragma once

#include <c10/core/DeviceType.h>

namespace sidestream {

void install_launch_observer(c10::DeviceType type);
void remove_launch_observer();

} // namespace sidestream
