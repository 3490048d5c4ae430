#include "operators.h"

#include "allocator.h"
#include "copies.h"
#include "device_hooks.h"
#include "launch.h"
#include "output_metadata.h"
#include "streams.h"
#include "tensor_memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/view_native.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>

namespace sidestream {
namespace {

c10::DeviceIndex device_of_options(const std::optional<at::Device>& device) {
  return checked_device(device.has_value() ? device->index() : c10::DeviceIndex(-1));
}

at::Tensor empty(
    c10::SymIntArrayRef sizes,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> memory_format) {
  DeviceScope scope(device_of_options(device));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(sizes),
      &Allocator::get(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(c10::get_default_dtype_as_scalartype()),
      memory_format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef sizes,
    c10::SymIntArrayRef strides,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  return empty_on_device(
      device_of_options(device),
      C10_AS_INTARRAYREF_SLOW(sizes),
      C10_AS_INTARRAYREF_SLOW(strides),
      dtype.value_or(c10::get_default_dtype_as_scalartype()));
}

// A tensor of zeros that has no memory; what does not know of such tensors gets one that has.
at::Tensor efficient_zero_tensor(
    c10::SymIntArrayRef sizes,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  at::native::ZeroTensorAllocator allocator(at::Device(c10::kPrivateUse1, device_of_options(device)));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(sizes),
      &allocator,
      c10::DispatchKeySet({c10::DispatchKey::PrivateUse1, c10::DispatchKey::ZeroTensor}),
      dtype.value_or(c10::get_default_dtype_as_scalartype()),
      std::nullopt);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef sizes) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(sizes));
}

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<c10::SymInt> offset) {
  std::optional<int64_t> storage_offset;
  if (offset.has_value()) {
    storage_offset = offset->guard_int(__FILE__, __LINE__);
  }
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), storage_offset);
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

void grow_storage(const at::Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset) {
  auto size_bytes =
      at::detail::computeStorageNbytes(sizes, strides, self.dtype().itemsize(), static_cast<size_t>(offset));
  if (size_bytes > self.storage().nbytes()) {
    resize_storage(self.storage(), size_bytes);
  }
}

const at::Tensor& resize_(
    const at::Tensor& self, c10::SymIntArrayRef symbolic_sizes, std::optional<at::MemoryFormat> memory_format) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(symbolic_sizes);
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != sizes) {
    auto strides = c10::contiguous_strides(sizes);
    grow_storage(self, sizes, strides, self.storage_offset());
    impl->set_sizes_contiguous(sizes);
  }
  if (memory_format.has_value()) {
    TORCH_CHECK(
        *memory_format != at::MemoryFormat::Preserve, "Unsupported memory format ", *memory_format, " for resize_");
    impl->empty_tensor_restride(*memory_format);
  }
  return self;
}

at::Tensor& set_storage_at(
    at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  TORCH_CHECK(
      source.device() == self.device(),
      "Attempted to set the storage of a tensor on device \"", self.device(), "\" to a storage on different device \"",
      source.device(), "\". This is no longer allowed; the devices must match.");
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  auto new_sizes = C10_AS_INTARRAYREF_SLOW(sizes);
  auto new_strides =
      strides.empty() ? c10::contiguous_strides(new_sizes) : c10::DimVector(C10_AS_INTARRAYREF_SLOW(strides));
  auto new_offset = offset.guard_int(__FILE__, __LINE__);
  grow_storage(self, new_sizes, new_strides, new_offset);
  impl->set_sizes_and_strides(new_sizes, new_strides, new_offset);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  auto items = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage_at(self, std::move(source), 0, c10::SymIntArrayRef({c10::SymInt(items)}), {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  if (self.unsafeGetTensorImpl() == source.unsafeGetTensorImpl()) {
    return self;
  }
  return set_storage_at(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
}

at::Tensor& set_empty(at::Tensor& self) {
  DeviceScope scope(self.device().index());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, Allocator::get().allocate(0), &Allocator::get(), true);
  return set_storage_at(self, std::move(storage), 0, c10::SymIntArrayRef({c10::SymInt(0)}), {});
}

bool is_set_to(const at::Tensor& self, const at::Tensor& other) {
  return at::native::is_set_to(self, other);
}

void record_stream(at::Tensor& self, at::Stream stream) {
  if (auto* block = Allocator::block_of(self.storage().data_ptr())) {
    Allocator::get().record_stream(*block, Scheduler::get().stream(stream));
  }
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& destination) {
  at::native::resize_output(destination, self.sizes());
  return copy_from(self, destination, false);
}

struct ReadScalar final : Work {
  at::Tensor source;
  std::shared_ptr<at::Scalar> value;

  void run() override {
    BackendsOnly guard;
    *value = source.item();
  }
};

at::Scalar local_scalar_dense(const at::Tensor& self) {
  static const auto* name = intern("aten::_local_scalar_dense");
  const auto device = self.device().index();
  auto& scheduler = Scheduler::get();
  auto& stream = scheduler.stream(device, current_stream(device));
  auto kernel = std::make_unique<ReadScalar>();
  auto value = std::make_shared<at::Scalar>();
  kernel->source = CpuAliases().of(self);
  kernel->value = value;
  std::vector<Access> accesses;
  append_accesses(accesses, self, false);
  scheduler.submit(stream, Launch{name, std::move(kernel), std::move(accesses)});
  scheduler.synchronize_stream(stream);
  return *value;
}

// Operators that do not enqueue a CPU kernel of their own name.
const std::set<std::string>& own_kernels() {
  static const auto& names = *new std::set<std::string>{
      "empty.memory_format", "empty_strided", "view", "as_strided", "_reshape_alias", "resize_", "set_",
      "set_.source_Tensor", "set_.source_Storage", "set_.source_Storage_storage_offset", "is_set_to", "record_stream",
      "_copy_from", "_copy_from_and_resize", "_local_scalar_dense", "_efficientzerotensor", "_fused_sdp_choice", "_to_sparse",
      "_to_sparse.sparse_dim"};
  return names;
}

// Whether an operator is one launch although torch could also compose it from others: where it is one on CUDA, or has a CPU
// kernel whose values are to be had exactly.
bool is_one_launch(const c10::OperatorHandle& op, const std::string& name) {
  using c10::DispatchKey;
  if (name == "convolution" || name == "convolution_backward") {
    return true; // composed for devices that torch knows, an error for others
  }
  if (op.hasKernelForDispatchKey(DispatchKey::CPU)) {
    return true;
  }
  return name.rfind("_foreach_", 0) == 0 && op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd);
}

} // namespace

void sleep(int64_t cycles) {
  Launch launch{intern("sleep"), nullptr, {}};
  launch.cycles = cycles;
  submit(current_device(), std::move(launch));
}

void register_operators() {
  watch_operators();
  // Leaked: the registrations last as long as the process.
  auto* any = new torch::Library(torch::Library::IMPL, "_", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  any->fallback(torch::CppFunction::makeFromBoxedFunction<&launch_operator>());

  // What lets an operator be called that has no autograd formula: torch 2.7 registers it for its own devices alone.
  constexpr auto autograd = c10::DispatchKey::AutogradPrivateUse1;
  if (!c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(autograd)) {
    auto* formulas = new torch::Library(torch::Library::IMPL, "_", autograd, __FILE__, __LINE__);
    formulas->fallback(torch::autograd::basicAutogradNotImplementedFallback());
  }

  auto* aten = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) {
      continue;
    }
    auto op = c10::Dispatcher::singleton().findSchema(name);
    auto short_name = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    if (op && own_kernels().count(short_name) == 0 && !op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1) &&
        is_one_launch(*op, short_name)) {
      aten->impl(short_name.c_str(), torch::CppFunction::makeFromBoxedFunction<&launch_operator>());
    }
  }
  // As for copy_: the kernel reads lazily conjugated and negated tensors itself. The general way to resolve them is a copy.
  for (auto key : {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative}) {
    auto* lazy = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    lazy->impl("_copy_from", torch::CppFunction::makeFallthrough());
  }

  aten->impl("empty.memory_format", &empty);
  aten->impl("empty_strided", &empty_strided);
  aten->impl("_efficientzerotensor", &efficient_zero_tensor);
  // Which attention kernel to launch: the one that the CPU takes. Without an answer PyTorch composes attention of many launches.
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&at::native::_fused_sdp_choice_cpp);
  aten->impl("_fused_sdp_choice", &at::native::_fused_sdp_choice_cpp);
  aten->impl("view", &view);
  aten->impl("as_strided", &as_strided);
  aten->impl("_reshape_alias", &reshape_alias);
  aten->impl("resize_", &resize_);
  aten->impl("set_", &set_empty);
  aten->impl("set_.source_Tensor", &set_tensor);
  aten->impl("set_.source_Storage", &set_storage);
  aten->impl("set_.source_Storage_storage_offset", &set_storage_at);
  aten->impl("is_set_to", &is_set_to);
  aten->impl("record_stream", &record_stream);
  aten->impl("_copy_from", &copy_from);
  aten->impl("_copy_from_and_resize", &copy_from_and_resize);
  aten->impl("_local_scalar_dense", &local_scalar_dense);
}

} // namespace sidestream
