#include "sparse.h"

#include "launch.h"
#include "output_metadata.h"

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/ops/_sparse_compressed_tensor_unsafe.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <torch/library.h>

#include <set>
#include <string>

namespace sidestream {
namespace {

using c10::DispatchKey;

at::SparseTensorImpl& coordinates(const at::Tensor& tensor) {
  return *static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
}

at::SparseCsrTensorImpl& compressed(const at::Tensor& tensor) {
  return *static_cast<at::SparseCsrTensorImpl*>(tensor.unsafeGetTensorImpl());
}

// Kernels that are registered for one backend, but only rearrange sparse tensors or call other operators on their parts, which
// then run on the parts' device.
template <DispatchKey key>
void borrow(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  op.redispatchBoxed(c10::DispatchKeySet(key), stack);
}

const std::set<std::string>& borrowed() {
  static const auto& names = *new std::set<std::string>{
      "_coalesced_", "_dimI", "_dimV", "_indices", "_nnz", "_sparse_coo_tensor_with_dims",
      "_sparse_coo_tensor_with_dims_and_tensors", "_values", "clone", "copy_", "copy_sparse_to_sparse_", "dense_dim",
      "empty.memory_format", "empty_like", "indices", "is_coalesced", "sparse_dim", "sparse_resize_",
      "sparse_resize_and_clear_", "values", "zero_", "resize_as_sparse_", "_to_dense"};
  return names;
}

const std::set<std::string>& borrowed_compressed() {
  static const auto& names = *new std::set<std::string>{
      "ccol_indices", "clone", "col_indices", "copy_", "crow_indices", "dense_dim", "empty.memory_format", "empty_like",
      "resize_as_sparse_", "row_indices", "sparse_dim", "values", "_nnz"};
  return names;
}

template <DispatchKey of_cpu, DispatchKey of_device>
void register_layout(const std::set<std::string>& borrowed_names) {
  // Leaked: the registrations last as long as the process.
  auto* any = new torch::Library(torch::Library::IMPL, "_", of_device, __FILE__, __LINE__);
  any->fallback(torch::CppFunction::makeFromBoxedFunction<&launch_operator>());
  auto* aten = new torch::Library(torch::Library::IMPL, "aten", of_device, __FILE__, __LINE__);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || name.name.rfind("aten::", 0) != 0 || !op->hasKernelForDispatchKey(of_cpu) ||
        op->hasKernelForDispatchKey(of_device)) {
      continue;
    }
    auto short_name = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    if (borrowed_names.count(short_name) > 0) {
      aten->impl(short_name.c_str(), torch::CppFunction::makeFromBoxedFunction<&borrow<of_cpu>>());
    } else {
      aten->impl(short_name.c_str(), torch::CppFunction::makeFromBoxedFunction<&launch_operator>());
    }
  }
}

} // namespace

at::Tensor with_parts(const at::Tensor& like, const std::vector<at::Tensor>& parts) {
  if (like.layout() == c10::kSparse) {
    return at::_sparse_coo_tensor_unsafe(
        parts.at(0), parts.at(1), like.sizes(), parts.at(1).options().layout(c10::kSparse), coordinates(like).coalesced());
  }
  return at::_sparse_compressed_tensor_unsafe(
      parts.at(0), parts.at(1), parts.at(2), like.sizes(), parts.at(2).options().layout(like.layout()));
}

void assign_parts(const at::Tensor& tensor, const at::Tensor& like, const std::vector<at::Tensor>& parts) {
  if (tensor.layout() == c10::kSparse) {
    auto& impl = coordinates(tensor);
    impl.raw_resize_(coordinates(like).sparse_dim(), coordinates(like).dense_dim(), like.sizes());
    impl.set_indices_and_values_unsafe(parts.at(0), parts.at(1));
    impl.set_coalesced(coordinates(like).coalesced());
  } else {
    compressed(tensor).set_member_tensors(parts.at(0), parts.at(1), parts.at(2), like.sizes());
  }
}

void register_sparse_operators() {
  register_layout<DispatchKey::SparseCPU, DispatchKey::SparsePrivateUse1>(borrowed());
  register_layout<DispatchKey::SparseCsrCPU, DispatchKey::SparseCsrPrivateUse1>(borrowed_compressed());
  auto* dense = new torch::Library(torch::Library::IMPL, "aten", DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const char* name : {"_to_sparse", "_to_sparse.sparse_dim"}) {
    dense->impl(name, torch::CppFunction::makeFromBoxedFunction<&borrow<DispatchKey::CPU>>());
  }
}

} // namespace sidestream
