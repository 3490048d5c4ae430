// Autocast on the simulated device: the operators and policies of CUDA's, see ATen/autocast_mode.h in PyTorch.
#pragma once

namespace sidestream {

void register_autocast();

} // namespace sidestream
