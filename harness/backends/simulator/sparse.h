// Sparse tensors on the simulated device: the same sparse tensors as everywhere, over dense parts in device memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace sidestream {

// A sparse tensor like the given one over other parts (see byte_ranges.h), which decide where it lives.
at::Tensor with_parts(const at::Tensor& like, const std::vector<at::Tensor>& parts);

// Makes a sparse tensor look like another, over other parts.
void assign_parts(const at::Tensor& tensor, const at::Tensor& like, const std::vector<at::Tensor>& parts);

void register_sparse_operators();

} // namespace sidestream
