// A decorator around the registered device guard of a device type: sees every event that is recorded, every wait and
// every host synchronization that the autograd engine, a torch.Stream or a torch.Event issues, since they all go
// through that guard (c10/core/impl/VirtualGuardImpl.h). What goes around it is invisible: torch.cuda.Event,
// torch.cuda.synchronize, libraries, and events that were made before, since an event keeps the guard it was made with.
#pragma once

#include <c10/core/Device.h>

namespace sidestream {

// Throws c10::Error if the device type has no guard, std::runtime_error if another tap sits on it.
void install_guard_tap(c10::DeviceType type);
void remove_guard_tap();

} // namespace sidestream
