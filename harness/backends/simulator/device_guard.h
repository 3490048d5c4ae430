// The device guard through which PyTorch, its autograd engine above all, drives the simulated accelerator.
#pragma once

namespace sidestream {

void register_device_guard();

} // namespace sidestream
