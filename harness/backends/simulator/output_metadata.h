// What an operator's outputs look like, from its meta kernel, cached by call signature: most meta kernels are Python and cost
// about 60 microseconds and the GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace sidestream {

struct TensorMetadata {
  bool defined = false;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t storage_offset = 0; // of a view
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  bool conjugate = false; // of a view
  bool negative = false; // of a view

  static TensorMetadata of(const at::Tensor& tensor);
};

struct OutputMetadata {
  // One entry a return: the tensors of a tensor or of a list of tensors. Empty for other returns.
  std::vector<std::vector<TensorMetadata>> returns;
  // Written arguments as they are afterwards (`out=` is resized): one entry an argument, empty for the others.
  std::vector<std::vector<TensorMetadata>> written;
};

using OutputMetadataPointer = std::shared_ptr<const OutputMetadata>;

// Runs the operator's meta kernel on the arguments, or finds the result in the cache. `is_view`: the outputs are views of
// arguments, so storage offsets count. Null where the operator has no meta kernel for such arguments. Never call it with the
// simulator's lock held: meta kernels take the GIL.
OutputMetadataPointer output_metadata(
    const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments, const std::vector<bool>& written, bool is_view);

size_t metadata_cache_size();

// Whether this thread is in a meta kernel that output_metadata runs.
bool runs_meta_kernel();

// Forgets what is cached for an operator.
void forget_metadata(const c10::FunctionSchema& schema);

// Dispatch as if nothing but backends existed: no autograd, no modes, no observers. A launch may run under the state of
// whoever forces it.
class BackendsOnly {
 public:
  BackendsOnly();
  ~BackendsOnly();

 private:
  struct Guards;
  std::unique_ptr<Guards> guards_;
};

// Replaces the tensors in a value, also in lists of tensors and of optional tensors.
template <typename Function>
c10::IValue map_tensors(const c10::IValue& value, Function&& function) {
  if (value.isTensor()) {
    return function(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> mapped;
    mapped.reserve(value.toTensorList().size());
    for (const auto& element : value.toListRef()) {
      mapped.push_back(function(element.toTensor()));
    }
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> mapped;
    for (const auto& element : value.toListRef()) {
      mapped.push_back(element.isNone() ? std::nullopt : std::optional<at::Tensor>(function(element.toTensor())));
    }
    return mapped;
  }
  return value;
}

template <typename Function>
void for_each_tensor(const c10::IValue& value, Function&& function) {
  if (value.isTensor()) {
    function(value.toTensor());
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    for (const auto& element : value.toListRef()) {
      if (element.isTensor()) {
        function(element.toTensor());
      }
    }
  }
}

} // namespace sidestream
