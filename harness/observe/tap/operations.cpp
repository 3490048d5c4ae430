#include "operations.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/TensorOptions.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "host_operators.h"

namespace sidestream {
namespace {

using c10::DispatchKey;

// Operations that have kernels of their own on the device and yet enqueue nothing: they make or change metadata,
// allocate, or tell the allocator something. Views and queries are told by their schema, below.
bool enqueues_nothing(const std::string& name) {
  static const std::unordered_set<std::string> names = {
      "aten::record_stream",
      "aten::set_",
      "aten::detach_",
      "aten::_pin_memory",
      "aten::_efficientzerotensor",
      "aten::_lazy_clone",
      "aten::_coalesced_",
      "aten::sparse_resize_",
      "aten::sparse_resize_and_clear_",
      "aten::_sparse_coo_tensor_with_dims",
      "aten::_sparse_coo_tensor_with_dims_and_tensors",
      "aten::_nested_tensor_size",
      "aten::_nested_tensor_strides",
      "aten::_nested_tensor_storage_offsets",
  };
  constexpr std::array prefixes = {
      "aten::empty", "aten::_empty", "aten::new_empty", "aten::resize_", "aten::_resize", "aten::is_"};
  return names.count(name) != 0 || std::any_of(prefixes.begin(), prefixes.end(), [&name](const char* prefix) {
           return name.compare(0, std::strlen(prefix), prefix) == 0;
         });
}

// Operations whose CUDA kernels make the host wait for the current stream, to read a size or a value back: the shape
// of their result, or the result itself, depends on the data (torch.cuda.set_sync_debug_mode warns about the same
// ones).
bool makes_host_wait(const std::string& name) {
  static const std::unordered_set<std::string> names = {
      "aten::_local_scalar_dense",
      "aten::equal",
      "aten::nonzero",
      "aten::masked_select",
      "aten::_unique",
      "aten::_unique2",
      "aten::unique_dim",
      "aten::unique_consecutive",
      "aten::unique_dim_consecutive",
      "aten::bincount",
      "aten::_cslt_sparse_mm_search",
      "aten::_nested_tensor_from_mask_left_aligned",
  };
  return names.count(name) != 0;
}

// By its schema each of these only asks something; it takes a kernel to find the answer.
bool launches_though_a_query(const std::string& name) {
  return makes_host_wait(name) || name == "aten::_assert_async" || name == "aten::_validate_compressed_sparse_indices";
}

bool returns_view(const c10::FunctionSchema& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& returned) {
    return returned.alias_info() != nullptr && !returned.alias_info()->isWrite();
  });
}

bool holds_tensors(const c10::TypePtr& type) {
  switch (type->kind()) {
    case c10::TypeKind::TensorType:
      return true;
    case c10::TypeKind::ListType:
    case c10::TypeKind::OptionalType:
      return std::any_of(type->containedTypes().begin(), type->containedTypes().end(), holds_tensors);
    default:
      return false;
  }
}

// Neither makes nor writes a tensor: it asks something about one.
bool is_query(const c10::FunctionSchema& schema) {
  const auto& arguments = schema.arguments();
  const auto& returns = schema.returns();
  const auto is_written = [](const c10::Argument& argument) {
    return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
  };
  const auto is_tensor = [](const c10::Argument& returned) { return holds_tensors(returned.type()); };
  return std::none_of(arguments.begin(), arguments.end(), is_written) &&
      std::none_of(returns.begin(), returns.end(), is_tensor);
}

bool is_composite(const c10::OperatorHandle& handle) {
  return handle.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) ||
      handle.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
      handle.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional);
}

int position_of(const c10::FunctionSchema& schema, const char* argument) {
  const auto found = schema.argumentIndexWithName(argument);
  return found.has_value() ? *found : -1;
}

Operation decide(const c10::OperatorHandle& handle, c10::DeviceType type) {
  const auto& schema = handle.schema();
  Operation operation;
  operation.base_name = schema.name();
  const auto& overload = schema.overload_name();
  operation.name = interned(overload.empty() ? schema.name() : schema.name() + "." + overload);
  operation.argument_count = schema.arguments().size();
  operation.return_count = schema.returns().size();
  operation.written = written_arguments_of(schema);
  operation.waits = makes_host_wait(schema.name());
  operation.works_on_host = works_on_host_memory(handle);
  // What a foreign operation does inside is the author's code, which may use several streams.
  operation.stands_for_nested = operation.base_name.compare(0, 6, "aten::") == 0;

  if (operation.base_name == "aten::copy_") {
    operation.copy_destination = position_of(schema, "self");
    operation.copy_source = position_of(schema, "src");
  } else if (operation.base_name == "aten::_copy_from") {
    operation.copy_destination = position_of(schema, "dst");
    operation.copy_source = position_of(schema, "self");
  }
  if (operation.is_copy()) {
    operation.copy_non_blocking = position_of(schema, "non_blocking");
    // Registered for all backends alike, and launches nevertheless (aten/src/ATen/native/Copy.cpp).
    operation.launches = operation.launches_other_layouts = true;
    return operation;
  }

  // Foreign schemas are not to be trusted with this: those of c10d do not say what they write.
  const bool asks = operation.stands_for_nested && is_query(schema) && !launches_though_a_query(operation.base_name);
  if (asks || enqueues_nothing(operation.base_name) || returns_view(schema)) {
    operation.waits = false;
    return operation;
  }
  const auto backend = c10::toBackendComponent(c10::computeDispatchKey(std::nullopt, c10::kStrided, c10::Device(type)));
  const auto key = [backend](DispatchKey functionality) {
    return c10::toRuntimePerBackendFunctionalityKey(functionality, backend);
  };
  const auto has_kernel = [&](DispatchKey functionality) {
    // A backend with a fallback (the simulator, or one that computes on the CPU) has a kernel for all that is not
    // composite.
    return handle.hasKernelForDispatchKey(key(functionality)) ||
        (c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(key(functionality)) && !is_composite(handle));
  };
  operation.launches = has_kernel(DispatchKey::Dense);
  operation.launches_other_layouts = has_kernel(DispatchKey::Sparse) || has_kernel(DispatchKey::SparseCsr) ||
      has_kernel(DispatchKey::Quantized) || has_kernel(DispatchKey::NestedTensor);
  operation.waits = operation.waits && (operation.launches || operation.launches_other_layouts);
  return operation;
}

struct Known {
  c10::DeviceType type = c10::DeviceType::CPU;
  std::unordered_map<const char*, std::unique_ptr<Operation>> operations;
};

} // namespace

const Operation* operation_of(const at::RecordFunction& range, c10::DeviceType type) {
  // One a thread, so that no lock is taken; leaked, because the engine's threads end after everything else.
  static thread_local auto* const known = new Known;
  if (known->type != type) {
    known->operations.clear();
    known->type = type;
  }
  // The name is stored in the operator's schema, so its address identifies the operator. A range that is no operation
  // has its name on the stack or the heap; it is never remembered, and an address that was used again is told by the
  // name itself.
  const char* const name = range.name();
  const auto found = known->operations.find(name);
  if (found != known->operations.end() && found->second->base_name == name) {
    return found->second.get();
  }
  const auto operator_name = range.operator_name();
  if (!operator_name.has_value()) {
    return nullptr;
  }
  const auto handle = c10::Dispatcher::singleton().findSchema(*operator_name);
  if (!handle.has_value()) {
    return nullptr;
  }
  auto& slot = known->operations[name];
  slot = std::make_unique<Operation>(decide(*handle, type));
  return slot.get();
}

std::optional<Operation> decide_operation(const std::string& name, c10::DeviceType type) {
  const auto dot = name.find('.');
  const c10::OperatorName operator_name(name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1));
  const auto handle = c10::Dispatcher::singleton().findSchema(operator_name);
  return handle.has_value() ? std::optional(decide(*handle, type)) : std::nullopt;
}

const std::string* interned(const std::string& text) {
  static auto* const mutex = new std::mutex;
  static auto* const texts = new std::unordered_set<std::string>;
  const std::lock_guard lock(*mutex);
  return &*texts->insert(text).first;
}

} // namespace sidestream
