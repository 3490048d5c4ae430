// Copies from, to and between simulated devices.
#pragma once

#include <ATen/core/Tensor.h>

namespace sidestream {

// The kernel of `_copy_from`, which is what `copy_` calls where one of the two tensors is on a simulated device.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& destination, bool non_blocking);

} // namespace sidestream
