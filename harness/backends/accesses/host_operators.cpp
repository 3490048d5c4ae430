#include "host_operators.h"

#include <c10/core/DispatchKey.h>

#include <set>
#include <string>

namespace sidestream {
namespace {

// Composite operators that work on memory themselves, at least at times. Of the operators in PyTorch's OpInfo database, all others
// call an operator with a CPU kernel to do so.
bool works_though_composite(const std::string& name) {
  static const auto& names = *new std::set<std::string>{
      "aten::_convolution", "aten::_grid_sampler_2d_cpu_fallback", "aten::_grid_sampler_2d_cpu_fallback_backward",
      "aten::_nnpack_spatial_convolution", "aten::_pack_padded_sequence", "aten::conj_physical_",
      "aten::convolution_backward", "aten::copy_", "aten::max_pool1d", "aten::mkldnn_convolution"};
  return names.count(name) > 0;
}

// Operators with CPU kernels that change what a tensor refers to, not what is there.
bool leaves_memory_alone(const std::string& name) {
  static const auto& names = *new std::set<std::string>{"aten::is_set_to", "aten::resize_", "aten::set_"};
  return names.count(name) > 0;
}

} // namespace

bool works_on_host_memory(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  bool writes = false;
  for (const auto& argument : schema.arguments()) {
    writes = writes || (argument.alias_info() && argument.alias_info()->isWrite());
  }
  bool is_view = false;
  for (const auto& returned : schema.returns()) {
    is_view = is_view || (returned.alias_info() && !writes);
  }
  return !is_view && !leaves_memory_alone(schema.name()) &&
      (op.hasKernelForDispatchKey(c10::DispatchKey::CPU) || works_though_composite(schema.name()));
}

bool copies_host_memory_itself(
    const at::Tensor& host, const at::Tensor& source, const at::Tensor& destination, bool non_blocking) {
  const bool same_dtype = source.scalar_type() == destination.scalar_type();
  if (same_dtype && source.sizes() == destination.sizes() && source.strides() == destination.strides() &&
      source.is_non_overlapping_and_dense()) {
    return true;
  }
  return (non_blocking || same_dtype) && host.numel() == destination.numel() && host.is_contiguous();
}

} // namespace sidestream
