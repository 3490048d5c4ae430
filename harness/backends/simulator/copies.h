// Copies from, to and between simulated devices, ordered as CUDA's (aten/src/ATen/native/cuda/Copy.cu in PyTorch).
//
// A copy runs on the current stream of the source's device; from the host, of the destination's. Between devices it is ordered
// with the current streams of both. A blocking copy from or to the host waits for its stream. A non-blocking one reads or writes
// pinned memory when it runs, and the pinned allocator is told; from pageable memory it is staged when it is enqueued (where
// CUDA's driver may wait for the stream first, as it was seen to do from 64 KiB on: no program can rely on that), and to
// pageable memory it returns only when it is done.
#pragma once

#include <ATen/core/Tensor.h>

namespace sidestream {

// The kernel of `_copy_from`, which is what `copy_` calls where one of the two tensors is on a simulated device.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& destination, bool non_blocking);

// While it exists, what this thread copies is how the simulator computes an operator, and no copy with the host that a program
// asked for.
class WithinOperatorOfDevice {
 public:
  WithinOperatorOfDevice();
  ~WithinOperatorOfDevice();
  WithinOperatorOfDevice(const WithinOperatorOfDevice&) = delete;
  WithinOperatorOfDevice& operator=(const WithinOperatorOfDevice&) = delete;

 private:
  bool was_within_;
};

} // namespace sidestream
