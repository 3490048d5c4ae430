// Which operators make the host itself work on the memory of their CPU tensors.
//
// Of the operators that call each other, the outermost one that does is the one to count: a composite one does nothing itself, and
// may enqueue copies, which say for themselves what they access.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace sidestream {

bool works_on_host_memory(const c10::OperatorHandle& op);

// Whether a copy between the host and a device goes from or to the host tensor's own memory when it runs, provided that this is
// pinned. Else PyTorch goes through a contiguous temporary in pageable memory, which the host fills before the copy or empties after
// it: see copy_kernel_cuda in aten/src/ATen/native/cuda/Copy.cu.
bool copies_host_memory_itself(
    const at::Tensor& host, const at::Tensor& source, const at::Tensor& destination, bool non_blocking);

} // namespace sidestream
