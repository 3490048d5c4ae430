// Tensors as memory: CPU tensors over device memory for kernels to work on, and the byte ranges that a tensor covers.
#pragma once

#include "trace.h"

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace sidestream {

// Makes CPU tensors over the memory of device tensors. They own nothing and keep nothing alive: a kernel on a real device does not
// keep its inputs alive either. Within one launch the same tensor gives the same alias, and views of one storage share a storage,
// so that kernels recognize them. Whoever submits the launch forgets the aliases first: from then on they are the launch's.
class CpuAliases {
 public:
  at::Tensor of(const at::Tensor& tensor);
  void forget() {
    tensors_.clear();
    storages_.clear();
  }

 private:
  std::vector<std::pair<const c10::TensorImpl*, at::Tensor>> tensors_;
  std::vector<std::pair<const c10::StorageImpl*, c10::Storage>> storages_;
};

// Appends the bytes that a strided tensor, or each part of a sparse one, covers as maximal contiguous runs; beyond 4096 runs, the
// range from the first to the last byte. Nothing for tensors without elements or without memory of the simulator's, which is
// device memory and pinned host memory.
void append_accesses(std::vector<Access>& accesses, const at::Tensor& tensor, bool write);

} // namespace sidestream
