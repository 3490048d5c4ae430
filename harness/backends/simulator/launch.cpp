#include "launch.h"

#include "allocator.h"
#include "byte_ranges.h"
#include "copies.h"
#include "device_hooks.h"
#include "output_metadata.h"
#include "python_frames.h"
#include "sparse.h"
#include "streams.h"
#include "tensor_memory.h"
#include "written_arguments.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/enum_tag.h>
#include <ATen/ops/copy.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <exception>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

namespace sidestream {
namespace {

// What an operator's schema says, looked up once an operator.
struct OperatorTraits : std::enable_shared_from_this<OperatorTraits> {
  const std::string* name;
  std::vector<bool> written; // one an argument, by the schema
  WrittenArguments written_by_call;
  int generator = -1;
  std::vector<int> returned; // for each return, the written argument that it is, or -1
  bool is_view = false; // returns views, writes nothing
  bool returns_numbers = false;
  bool has_dynamic_shapes = false; // for some arguments, the shapes of outputs depend on values
  bool is_random = false;
  bool has_out = false;
  bool has_cpu_kernel = false;
};

OperatorTraits make_traits(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  OperatorTraits traits;
  auto name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  traits.name = intern(name);
  bool writes = false;
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); i++) {
    const auto& argument = arguments[i];
    bool is_written = argument.alias_info() && argument.alias_info()->isWrite();
    writes = writes || is_written;
    traits.written.push_back(is_written);
    traits.has_out = traits.has_out || argument.is_out();
    if (argument.type()->str() == "Generator?" || argument.type()->str() == "Generator") {
      traits.generator = static_cast<int>(i);
    }
  }
  traits.written_by_call = written_arguments_of(schema);
  for (const auto& result : schema.returns()) {
    int source = -1;
    const auto* alias = result.alias_info();
    if (alias && alias->isWrite()) {
      for (size_t i = 0; i < arguments.size(); i++) {
        const auto* other = arguments[i].alias_info();
        if (other && other->isWrite() && *other == *alias) {
          source = static_cast<int>(i);
        }
      }
    } else if (alias && !writes) {
      traits.is_view = true;
    }
    traits.returned.push_back(source);
    auto type = result.type();
    bool is_tensors = type->isSubtypeOf(*c10::TensorType::get()) || type->isSubtypeOf(*c10::ListType::ofTensors()) ||
        type->isSubtypeOf(*c10::OptionalType::ofTensor());
    traits.returns_numbers = traits.returns_numbers || !is_tensors;
  }
  traits.has_dynamic_shapes = op.hasTag(at::Tag::dynamic_output_shape);
  for (auto key : {c10::DispatchKey::CPU, c10::DispatchKey::SparseCPU, c10::DispatchKey::SparseCsrCPU}) {
    traits.has_cpu_kernel = traits.has_cpu_kernel || op.hasComputedKernelForDispatchKey(key);
  }
  traits.is_random = op.hasTag(at::Tag::nondeterministic_seeded);
  return traits;
}

using TraitsPointer = std::shared_ptr<const OperatorTraits>;

auto& known_operators = *new std::unordered_map<const c10::FunctionSchema*, TraitsPointer>();
auto& known_operators_mutex = *new std::mutex();

TraitsPointer traits_of(const c10::OperatorHandle& op) {
  std::lock_guard<std::mutex> lock(known_operators_mutex);
  auto& entry = known_operators[&op.schema()];
  if (!entry) {
    entry = std::make_shared<const OperatorTraits>(make_traits(op));
  }
  return entry;
}

// Where a library of operators is destroyed, the next one may have its schemas at the same addresses.
struct OperatorWatch final : c10::OpRegistrationListener {
  void onOperatorRegistered(const c10::OperatorHandle&) override {}

  void onOperatorDeregistered(const c10::OperatorHandle& op) override {
    forget_metadata(op.schema());
    std::lock_guard<std::mutex> lock(known_operators_mutex);
    known_operators.erase(&op.schema());
  }
};

// Kernels without a generator argument draw from the process-wide CPU generator: it is lent to the launch, seeded with the
// number that was drawn at enqueue. To one launch at a time, and a thread that waits for it gives up the GIL.
class LentCpuGenerator {
 public:
  explicit LentCpuGenerator(uint64_t seed) : turn_(take_turn()), generator_(at::detail::getDefaultCPUGenerator()) {
    std::lock_guard<std::mutex> lock(generator_.mutex());
    state_ = generator_.get_state();
    generator_.set_current_seed(seed);
  }
  ~LentCpuGenerator() {
    std::lock_guard<std::mutex> lock(generator_.mutex());
    generator_.set_state(state_);
  }
  LentCpuGenerator(const LentCpuGenerator&) = delete;
  LentCpuGenerator& operator=(const LentCpuGenerator&) = delete;

 private:
  using Turn = std::unique_lock<std::recursive_mutex>; // a kernel may launch others
  static Turn take_turn() {
    static auto& mutex = *new std::recursive_mutex();
    Turn turn(mutex, std::try_to_lock);
    if (!turn) {
      WithoutGil without_gil;
      turn.lock();
    }
    return turn;
  }

  Turn turn_;
  at::Generator generator_;
  at::Tensor state_;
};

void copy_values(const at::Tensor& destination, const at::Tensor& source, const std::string& name) {
  if (source.numel() == 0) {
    return; // also where a kernel leaves out what nobody reads, such as the statistics of a batch normalization that used given ones
  }
  TORCH_CHECK(
      destination.sizes() == source.sizes(),
      name, " gave an output of shape ", source.sizes(), " where its meta kernel said ", destination.sizes(), ".");
  if (destination.strides() == source.strides() && destination.scalar_type() == source.scalar_type() &&
      destination.is_non_overlapping_and_dense() && !source.is_conj() && !source.is_neg()) {
    std::memcpy(destination.mutable_data_ptr(), source.const_data_ptr(), source.nbytes());
  } else {
    destination.copy_(source);
  }
}

// Runs an operator's CPU kernel on aliases of device memory.
struct CpuKernel final : Work {
  CpuKernel(const c10::OperatorHandle& op, const OperatorTraits& traits)
      : op(op), traits(traits), traits_owner(traits.shared_from_this()) {}

  c10::OperatorHandle op;
  const OperatorTraits& traits;
  TraitsPointer traits_owner;
  torch::jit::Stack arguments;
  std::vector<std::vector<at::Tensor>> outputs; // aliases of the fresh outputs, one entry a return
  std::vector<const c10::TensorImpl*> host_tensors; // arguments that live on the host
  std::optional<uint64_t> seed;
  bool on_sparse = false; // some arguments are sparse: their layouts decide which CPU kernel it is
  std::shared_ptr<torch::jit::Stack> results; // receives the returns themselves where these depend on values

  void stage() override {
    if (host_tensors.empty()) {
      return;
    }
    BackendsOnly guard;
    for (auto& argument : arguments) {
      argument = map_tensors(argument, [&](const at::Tensor& tensor) {
        for (const auto* host : host_tensors) {
          if (tensor.unsafeGetTensorImpl() == host && !host->is_wrapped_number()) {
            return tensor.clone();
          }
        }
        return tensor;
      });
    }
  }

  void run() override {
    BackendsOnly guard;
    std::optional<LentCpuGenerator> lent;
    if (seed.has_value()) {
      if (traits.generator >= 0) {
        arguments[static_cast<size_t>(traits.generator)] = at::detail::createCPUGenerator(*seed);
      } else {
        lent.emplace(*seed);
      }
    }
    if (on_sparse) {
      op.callBoxed(&arguments);
    } else {
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &arguments);
    }
    if (results) {
      *results = std::move(arguments);
      return;
    }
    for (size_t i = 0; i < outputs.size(); i++) {
      size_t k = 0;
      for_each_tensor(arguments[i], [&](const at::Tensor& result) {
        if (k < outputs[i].size() && outputs[i][k].defined() && result.defined()) {
          copy_values(outputs[i][k], result, *traits.name);
        }
        k++;
      });
    }
  }
};

// The one device of a call, and the usual errors where there is none.
c10::DeviceIndex device_of_call(c10::ArrayRef<c10::IValue> arguments, const OperatorTraits& traits) {
  std::optional<c10::Device> device;
  std::optional<c10::Device> requested;
  std::optional<c10::Device> host;
  for (size_t i = 0; i < arguments.size(); i++) {
    const auto& argument = arguments[i];
    if (argument.isDevice()) {
      requested = argument.toDevice();
    }
    bool takes_host_tensors = argument.isOptionalTensorList(); // indices, which CUDA takes from the host as well
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      if (!tensor.defined()) {
        return;
      }
      if (tensor.is_privateuseone()) {
        TORCH_CHECK(
            !device || *device == tensor.device(),
            "Expected all tensors to be on the same device, but found at least two devices, ",
            *device, " and ", tensor.device(), "!");
        device = tensor.device();
      } else if (!tensor.is_cpu() || traits.written[i] || (tensor.dim() > 0 && !takes_host_tensors)) {
        host = tensor.device();
      }
    });
  }
  TORCH_CHECK(
      !host || !device,
      "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ", *host, "!");
  if (!device && requested && requested->type() == c10::kPrivateUse1) {
    device = requested;
  }
  return checked_device(device ? device->index() : c10::DeviceIndex(-1));
}

at::Tensor make_view(const at::Tensor& base, const TensorMetadata& metadata) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), c10::scalarTypeToTypeMeta(metadata.dtype));
  view.unsafeGetTensorImpl()->set_sizes_and_strides(metadata.sizes, metadata.strides, metadata.storage_offset);
  view._set_conj(metadata.conjugate);
  view._set_neg(metadata.negative);
  return view;
}

void return_views(
    const c10::OperatorHandle& op, const OperatorTraits& traits, c10::ArrayRef<c10::IValue> arguments, torch::jit::Stack& returns) {
  auto metadata = output_metadata(op, arguments, traits.written, true);
  TORCH_CHECK_NOT_IMPLEMENTED(
      metadata, *traits.name, " makes a view, and its meta kernel, which would say how it looks, does not exist.");
  at::Tensor base;
  for (const auto& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      if (!base.defined()) {
        base = tensor;
      }
    });
  }
  for (size_t i = 0; i < metadata->returns.size(); i++) {
    std::vector<at::Tensor> views;
    for (const auto& view : metadata->returns[i]) {
      views.push_back(make_view(base, view));
    }
    if (op.schema().returns()[i].type()->kind() == c10::TypeKind::ListType) {
      returns.emplace_back(std::move(views));
    } else {
      returns.emplace_back(std::move(views.at(0)));
    }
  }
}

// Gives an `out=` argument the shape that the operator wants it to have.
void resize_out(const at::Tensor& tensor, const TensorMetadata& metadata) {
  if (tensor.sizes() == metadata.sizes) {
    return;
  }
  if (tensor.numel() > 0) {
    TORCH_WARN(
        "An output with one or more elements was resized since it had shape ", tensor.sizes(), ", which does not match the ",
        "required output shape ", at::IntArrayRef(metadata.sizes), ".");
  }
  auto size_bytes = at::detail::computeStorageNbytes(
      metadata.sizes, metadata.strides, tensor.dtype().itemsize(), static_cast<size_t>(tensor.storage_offset()));
  if (size_bytes > tensor.storage().nbytes()) {
    resize_storage(tensor.storage(), size_bytes);
  }
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(metadata.sizes, metadata.strides);
}

bool has_sparse_tensors(c10::ArrayRef<c10::IValue> arguments) {
  bool found = false;
  for (const auto& argument : arguments) {
    for_each_tensor(argument, [&](const at::Tensor& tensor) {
      found = found || (tensor.defined() && tensor.layout() != c10::kStrided);
    });
  }
  return found;
}

std::unique_ptr<CpuKernel> make_kernel(
    const c10::OperatorHandle& op,
    const OperatorTraits& traits,
    c10::ArrayRef<c10::IValue> arguments,
    c10::DeviceIndex device,
    CpuAliases& aliases,
    std::vector<Access>& accesses) {
  auto kernel = std::make_unique<CpuKernel>(op, traits);
  kernel->on_sparse = has_sparse_tensors(arguments);
  kernel->arguments.reserve(std::max(arguments.size(), traits.returned.size()));
  for (size_t i = 0; i < arguments.size(); i++) {
    if (arguments[i].isDevice()) {
      kernel->arguments.emplace_back(c10::Device(c10::kCPU));
      continue;
    }
    const bool write = traits.written_by_call.has(i, arguments);
    kernel->arguments.push_back(map_tensors(arguments[i], [&](const at::Tensor& tensor) {
      if (!tensor.defined()) {
        return tensor;
      }
      if (!tensor.is_privateuseone()) {
        kernel->host_tensors.push_back(tensor.unsafeGetTensorImpl());
        return tensor;
      }
      append_accesses(accesses, tensor, write);
      auto alias = aliases.of(tensor);
      if (kernel->on_sparse && tensor.requires_grad()) {
        alias.set_requires_grad(true); // some of these kernels only then keep what their backward needs
      }
      return alias;
    }));
  }
  if (traits.is_random) {
    std::optional<at::Generator> generator;
    if (traits.generator >= 0 && arguments[static_cast<size_t>(traits.generator)].isGenerator()) {
      generator = arguments[static_cast<size_t>(traits.generator)].toGenerator();
    }
    kernel->seed = draw_seed(device, generator);
  }
  return kernel;
}

// Runs the launch to its end before it returns, because what the operator returns depends on values.
void launch_for_values(
    const c10::OperatorHandle& op,
    const OperatorTraits& traits,
    c10::ArrayRef<c10::IValue> arguments,
    c10::DeviceIndex device,
    torch::jit::Stack& returns) {
  CpuAliases aliases;
  std::vector<Access> accesses;
  auto kernel = make_kernel(op, traits, arguments, device, aliases, accesses);
  if (traits.has_out) { // the kernel resizes them, which device memory must not do while it is an alias
    for (size_t i = 0; i < traits.written.size(); i++) {
      if (traits.written[i] && arguments[i].isTensor()) {
        const auto& out = arguments[i].toTensor();
        if (out.layout() == c10::kStrided) {
          kernel->arguments[i] = at::detail::empty_cpu({0}, out.scalar_type());
        }
      }
    }
  }
  auto results = std::make_shared<torch::jit::Stack>();
  kernel->results = results;
  aliases.forget();
  auto& scheduler = Scheduler::get();
  auto& stream = scheduler.stream(device, current_stream(device));
  scheduler.submit(stream, Launch{traits.name, std::move(kernel), std::move(accesses)});
  scheduler.synchronize_stream(stream);
  const WithinOperatorOfDevice within;
  auto dense_to_device = [&](const at::Tensor& result) {
    auto output = empty_on_device(device, result.sizes(), result.strides(), result.scalar_type());
    output.copy_(result, /*non_blocking=*/true);
    return output;
  };
  auto parts_to_device = [&](const at::Tensor& result) {
    std::vector<at::Tensor> parts;
    for (const auto& part : parts_of(result)) {
      parts.push_back(dense_to_device(part));
    }
    return parts;
  };
  auto to_device = [&](const at::Tensor& result) {
    if (!result.defined()) {
      return result;
    }
    return result.layout() == c10::kStrided ? dense_to_device(result) : with_parts(result, parts_to_device(result));
  };
  for (size_t i = 0; i < traits.returned.size(); i++) {
    if (traits.returned[i] < 0) {
      returns.push_back(map_tensors((*results)[i], to_device));
      continue;
    }
    returns.push_back(arguments[static_cast<size_t>(traits.returned[i])]);
    if (!returns.back().isTensor()) {
      continue;
    }
    const auto& written = returns.back().toTensor();
    const auto& result = (*results)[i].toTensor();
    if (written.layout() != c10::kStrided) {
      assign_parts(written, result, parts_to_device(result));
    } else if (traits.has_out) {
      resize_out(written, TensorMetadata::of(result));
      written.copy_(result, /*non_blocking=*/true);
    }
  }
}

// For an operator that gives nothing but what it writes to arguments whose shapes stay as they are.
OutputMetadataPointer metadata_of_writes_alone(const OperatorTraits& traits, c10::ArrayRef<c10::IValue> arguments) {
  bool fresh = traits.has_out || traits.returns_numbers;
  for (auto source : traits.returned) {
    fresh = fresh || source < 0;
  }
  for (size_t i = 0; i < arguments.size(); i++) {
    if (traits.written[i]) {
      for_each_tensor(arguments[i], [&](const at::Tensor& tensor) {
        fresh = fresh || (tensor.defined() && tensor.layout() != c10::kStrided);
      });
    }
  }
  if (fresh) {
    return nullptr;
  }
  auto metadata = std::make_shared<OutputMetadata>();
  metadata->returns.resize(traits.returned.size());
  metadata->written.resize(traits.written.size());
  return metadata;
}

OutputMetadataPointer metadata_of_launch(
    const c10::OperatorHandle& op, const OperatorTraits& traits, c10::ArrayRef<c10::IValue> arguments) {
  try {
    return output_metadata(op, arguments, traits.written, false);
  } catch (const std::exception&) {
    if (!traits.has_dynamic_shapes) {
      throw;
    }
    return nullptr; // some meta kernels complain about values that they cannot read; the CPU kernel sees a real mistake as well
  }
}

void warn_once_about(const OperatorTraits& traits, bool on_sparse) {
  static auto& mutex = *new std::mutex();
  static auto& warned = *new std::unordered_map<const std::string*, bool>();
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (!warned.emplace(traits.name, true).second) {
      return;
    }
  }
  TORCH_WARN(
      *traits.name, on_sparse ? " on sparse tensors" : "",
      " has no meta kernel, so the simulated accelerator synchronizes the stream to learn the shapes of its outputs.");
}

} // namespace

at::Tensor empty_on_device(c10::DeviceIndex device, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  DeviceScope scope(device);
  return at::detail::empty_strided_generic(
      sizes, strides, &Allocator::get(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

void submit(c10::DeviceIndex device, Launch launch) {
  auto& scheduler = Scheduler::get();
  scheduler.submit(scheduler.stream(device, current_stream(device)), std::move(launch));
}

void watch_operators() {
  // Leaked: libraries may be destroyed as late as the process.
  new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<OperatorWatch>()));
}

void launch_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto traits_owner = traits_of(op);
  const auto& traits = *traits_owner;
  TORCH_CHECK_NOT_IMPLEMENTED(
      traits.has_cpu_kernel || traits.is_view,
      *traits.name,
      " has no CPU kernel, so the simulated accelerator, which runs nothing but CPU kernels, cannot run it: register one for it "
      "(torch.library), or call what does the same with PyTorch's own operators.");
  const auto count = traits.written.size();
  auto arguments = torch::jit::last(*stack, count);
  torch::jit::Stack returns;
  const auto device = device_of_call(arguments, traits);
  DeviceScope scope(device);
  OutputMetadataPointer metadata;
  if (traits.is_view) {
    return_views(op, traits, arguments, returns);
  } else {
    const bool on_sparse = has_sparse_tensors(arguments);
    if (!traits.returns_numbers) {
      metadata = on_sparse ? nullptr : metadata_of_launch(op, traits, arguments);
      if (!metadata) {
        metadata = metadata_of_writes_alone(traits, arguments);
      }
      if (!metadata && !traits.has_dynamic_shapes) {
        warn_once_about(traits, on_sparse);
      }
    }
    if (!metadata) {
      launch_for_values(op, traits, arguments, device, returns);
    }
  }
  if (metadata) {
    if (traits.has_out) {
      for (size_t i = 0; i < count; i++) {
        size_t k = 0;
        if (traits.written[i]) {
          for_each_tensor(arguments[i], [&](const at::Tensor& tensor) { resize_out(tensor, metadata->written[i][k++]); });
        }
      }
    }
    CpuAliases aliases;
    std::vector<Access> accesses;
    auto kernel = make_kernel(op, traits, arguments, device, aliases, accesses);
    for (size_t i = 0; i < traits.returned.size(); i++) {
      kernel->outputs.emplace_back();
      if (traits.returned[i] >= 0) {
        returns.push_back(arguments[static_cast<size_t>(traits.returned[i])]);
        continue;
      }
      std::vector<at::Tensor> fresh;
      for (const auto& output : metadata->returns[i]) {
        fresh.emplace_back();
        kernel->outputs.back().emplace_back();
        if (output.defined) {
          fresh.back() = empty_on_device(device, output.sizes, output.strides, output.dtype);
          append_accesses(accesses, fresh.back(), true);
          kernel->outputs.back().back() = aliases.of(fresh.back());
        }
      }
      if (op.schema().returns()[i].type()->kind() == c10::TypeKind::ListType) {
        returns.emplace_back(std::move(fresh));
      } else if (fresh.empty()) {
        returns.emplace_back(at::Tensor()); // a meta kernel in Python says None where there is no tensor
      } else {
        returns.emplace_back(std::move(fresh[0]));
      }
    }
    aliases.forget();
    submit(device, Launch{traits.name, std::move(kernel), std::move(accesses)});
  }
  torch::jit::drop(*stack, count);
  for (auto& value : returns) {
    stack->push_back(std::move(value));
  }
}

} // namespace sidestream
