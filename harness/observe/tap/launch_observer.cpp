#include "launch_observer.h"

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "byte_ranges.h"
#include "device.h"
#include "gates.h"
#include "host_memory.h"
#include "host_operators.h"
#include "memory_reports.h"
#include "operations.h"
#include "thread_state.h"

namespace sidestream {
namespace {

std::atomic<c10::DeviceType> device_type{c10::DeviceType::CPU};
at::CallbackHandle callback = at::INVALID_CALLBACK_HANDLE;

using Arguments = c10::ArrayRef<c10::IValue>;

// The tensors of an operation that live on the device under test.
struct DeviceTensors {
  c10::DeviceIndex first = -1; // device of the first one
  bool strided = true; // that one
  bool wrapped = false; // some tensor wraps others (a Python subclass, vmap's): the operations on those are seen on their own
};

void look_at(const at::Tensor& tensor, DeviceTensors& found) {
  if (!tensor.defined() || tensor.device().type() != device_type.load(std::memory_order_relaxed)) {
    return;
  }
  found.wrapped = found.wrapped ||
      tensor.key_set().has_any(c10::DispatchKeySet(
          {c10::DispatchKey::Python, c10::DispatchKey::Batched, c10::DispatchKey::FuncTorchBatched,
           c10::DispatchKey::BatchedNestedTensor,
           c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize}));
  repetition().mark_used(tensor.device().index());
  if (found.first < 0) {
    found.first = tensor.device().index();
    found.strided = tensor.layout() == c10::kStrided && !tensor.is_quantized() && !tensor.is_nested();
  }
}

DeviceTensors tensors_in(Arguments arguments) {
  DeviceTensors found;
  c10::DeviceIndex named = -1;
  for (const auto& argument : arguments) {
    if (argument.isTensor()) {
      look_at(argument.toTensor(), found);
    } else if (argument.isList()) {
      for (const auto& element : argument.toListRef()) {
        if (!element.isTensor()) {
          break;
        }
        look_at(element.toTensor(), found);
      }
    } else if (argument.isDevice() && argument.toDevice().type() == device_type.load(std::memory_order_relaxed)) {
      named = argument.toDevice().index();
    }
  }
  if (found.first < 0 && named >= 0) {
    found.first = named; // a factory that writes its result right away, such as tril_indices
    repetition().mark_used(named);
  }
  return found;
}

const at::Tensor* tensor_at(Arguments arguments, int position) {
  if (position < 0 || static_cast<size_t>(position) >= arguments.size() || !arguments[position].isTensor()) {
    return nullptr;
  }
  const auto& tensor = arguments[position].toTensor();
  return tensor.defined() ? &tensor : nullptr;
}

bool on_device(const at::Tensor& tensor) {
  return tensor.device().type() == device_type.load(std::memory_order_relaxed);
}

struct Copy {
  c10::DeviceIndex device = -1; // whose current stream carries it out
  std::optional<c10::DeviceIndex> peer; // the other device of a copy between two
  const at::Tensor* host = nullptr; // the tensor of the host, if it is one with the host
  bool to_host = false;
  bool non_blocking = false;
  bool uses_host_memory = false; // when it runs, and not that of a temporary
  bool host_waits = false;
  bool host_may_wait = false;
};

bool is_pinned(const at::Tensor& tensor) {
  return tensor.has_storage() && tensor.numel() > 0 &&
      at::globalContext()
          .getAcceleratorHooksInterface(device_type.load(std::memory_order_relaxed))
          .isPinnedPtr(tensor.storage().data());
}

// What a copy does (aten/src/ATen/native/cuda/Copy.cu): between devices it runs on the source's current stream, after
// what is on the destination's, which then waits for it; with the host it runs on the device's current stream, and
// the host waits unless the copy is non_blocking. Into pageable memory it waits even then: cudaMemcpyAsync returns
// once such a copy is complete. From pageable memory the driver may wait for the stream before it stages what is larger than
// the 64 KiB that it takes along at once (CUDA Runtime API, "API synchronization behavior").
Copy look_at_copy(const Operation& operation, Arguments arguments) {
  const auto* const source = tensor_at(arguments, operation.copy_source);
  const auto* const destination = tensor_at(arguments, operation.copy_destination);
  Copy copy;
  if (source == nullptr || destination == nullptr) {
    return copy;
  }
  if (on_device(*source)) {
    copy.device = source->device().index();
  } else if (on_device(*destination)) {
    copy.device = destination->device().index();
  } else {
    return copy;
  }
  if (on_device(*source) && on_device(*destination)) {
    if (source->device() != destination->device()) {
      copy.peer = destination->device().index();
    }
    return copy;
  }
  copy.to_host = on_device(*source);
  copy.host = copy.to_host ? destination : source;
  if (!copy.host->is_cpu()) {
    copy.host = nullptr;
    return copy;
  }
  const auto position = static_cast<size_t>(operation.copy_non_blocking);
  copy.non_blocking = operation.copy_non_blocking >= 0 && position < arguments.size() && arguments[position].isBool() &&
      arguments[position].toBool();
  copy.uses_host_memory =
      copies_host_memory_itself(*copy.host, *source, *destination, copy.non_blocking) && is_pinned(*copy.host);
  copy.host_waits = !copy.non_blocking || (copy.to_host && copy.host->numel() > 0 && !copy.uses_host_memory);
  // The driver takes the bytes of a small copy along.
  constexpr size_t kTakenAlong = 64 * 1024;
  copy.host_may_wait =
      copy.non_blocking && !copy.to_host && copy.host->nbytes() > kTakenAlong && !copy.uses_host_memory;
  return copy;
}

// The bytes that an operation touches, either on the device or of the host, and the storages that they are part of.
struct Touched {
  bool of_host = false;
  std::vector<AccessedBytes> accesses;
  std::vector<TouchedStorage> storages;

  void add_dense(const at::Tensor& tensor, bool write) {
    if (!tensor.defined() || !(of_host ? tensor.is_cpu() : on_device(tensor)) || !tensor.has_storage()) {
      return;
    }
    const auto& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
    const auto address = reinterpret_cast<uint64_t>(storage.data());
    if (address == 0) {
      return;
    }
    const auto device = of_host ? kHost.device : tensor.device().index();
    ByteRanges ranges;
    byte_ranges_of(tensor, ranges);
    for (const auto& range : ranges) {
      accesses.push_back(
          {Bytes{device, address + static_cast<uint64_t>(range.start), address + static_cast<uint64_t>(range.stop)}, write});
    }
    if (!ranges.empty()) {
      const bool integers = c10::isIntegralType(tensor.scalar_type(), /*includeBool=*/false);
      storages.push_back({Bytes{device, address, address + storage.nbytes()}, integers});
    }
  }

  void add(const at::Tensor& tensor, bool write) {
    if (!tensor.defined() || tensor.layout() == c10::kStrided) {
      add_dense(tensor, write);
      return;
    }
    for (const auto& part : parts_of(tensor)) {
      add_dense(part, write);
    }
  }

  void add(const c10::IValue& value, bool write) {
    if (value.isTensor()) {
      add(value.toTensor(), write);
    } else if (value.isList()) {
      for (const auto& element : value.toListRef()) {
        if (element.isTensor()) {
          add(element.toTensor(), write);
        }
      }
    }
  }
};

c10::Stream current_stream(c10::DeviceIndex device) {
  return device_guard()->getStream(c10::Device(device_type.load(std::memory_order_relaxed), device));
}

// Who is to blame for what happens on this thread now.
struct Cause {
  const std::string* node = nullptr;
  SourceLine line;

  static Cause now() {
    Cause cause;
    if (const auto node = torch::autograd::get_current_node()) {
      cause.node = interned(node->name());
      if (repetition().lines()) {
        cause.line = line_in_backward(node->thread_id(), node->sequence_nr());
      }
    } else if (repetition().lines()) {
      cause.line = current_line();
    }
    return cause;
  }
};

// What the host itself does to memory that copies have used.
struct HostAccess {
  const std::string* operation = nullptr;
  std::vector<AccessedBytes> accesses;

  void enter() {
    if (!accesses.empty()) {
      const auto cause = Cause::now();
      repetition().host_accesses(operation, cause.node, cause.line, std::move(accesses));
    }
  }
};

HostAccess host_access(const std::string* operation, const at::Tensor& tensor, bool write) {
  Touched touched{/*of_host=*/true};
  touched.add(tensor, write);
  return {operation, repetition().used_by_copies(std::move(touched.accesses))};
}

HostAccess host_access(const Operation& operation, Arguments arguments) {
  Touched touched{/*of_host=*/true};
  for (size_t i = 0; i < arguments.size(); ++i) {
    touched.add(arguments[i], operation.written.has(i, arguments));
  }
  return {operation.name, repetition().used_by_copies(std::move(touched.accesses))};
}

} // namespace

// What has to be undone when the operation ends.
class Running final : public at::ObserverContext {
 public:
  Running() = default;
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;
  ~Running() override {
    end();
  }

  // From now on, what this thread does for the launch stays with it in the trace; and what the operation returns is written.
  void trace(LaunchEntry launch, const c10::Stream& stream, size_t return_count, bool integers) {
    launch_ = launch;
    launch_.integers = integers;
    stream_ = stream;
    return_count_ = return_count;
    outer_ = std::exchange(this_thread().launch, launch_);
    outer_running_ = std::exchange(this_thread().running, this);
  }

  void hold(const LaunchTicket& ticket) {
    if (ticket.hold >= 0) {
      const auto hold = static_cast<size_t>(ticket.hold);
      repetition().mark_frontier(*stream_, ticket.behind);
      repetition().launch_held(hold, enqueue_hold(hold, *stream_));
    }
  }

  // The operation saves this tensor: if that is an argument, its launch is yet to come.
  void postpone(const at::Tensor& saved) {
    if (on_device(saved) && saved.has_storage()) {
      const auto& storage = saved.unsafeGetTensorImpl()->unsafe_storage();
      const auto start = reinterpret_cast<uint64_t>(storage.data());
      is_postponed_ = repetition().postpone(launch_, Bytes{saved.device().index(), start, start + storage.nbytes()});
    }
  }

  void resume() {
    if (std::exchange(is_postponed_, false)) {
      const auto ticket = repetition().launch_postponed(launch_);
      launch_.entry = ticket.entry.entry;
      this_thread().launch = launch_;
      hold(ticket);
    }
  }

  void returned(Arguments stack) {
    if (launch_.entry < 0 || is_postponed_) {
      return;
    }
    Touched touched;
    for (const auto& value : stack.slice(stack.size() - std::min(stack.size(), return_count_))) {
      touched.add(value, true);
    }
    repetition().launch_returned(launch_, std::move(touched.accesses), touched.storages);
  }

  // From now on, what this thread launches is part of this operation.
  void stand_for_nested() {
    stands_for_nested_ = true;
    ++this_thread().counted_depth;
  }

  // From now on, what this thread does is part of what the host does to its own memory.
  void stand_for_host() {
    stands_for_host_ = true;
    ++this_thread().host_depth;
  }

  // Once the host has waited, it accesses memory of its own.
  void access_at_end(HostAccess access) {
    at_end_ = std::move(access);
  }

  void wait_for(StreamKey stream, bool traced) {
    sync_.emplace(HostSync::of_stream(stream, traced));
    sync_->begin();
  }

  void end() {
    if (stands_for_nested_) {
      stands_for_nested_ = false;
      --this_thread().counted_depth;
    }
    if (sync_.has_value()) {
      sync_->end();
      sync_.reset();
    }
    at_end_.enter();
    at_end_ = {};
    if (stands_for_host_) {
      stands_for_host_ = false;
      --this_thread().host_depth;
    }
    if (stream_.has_value()) {
      this_thread().launch = outer_;
      this_thread().running = outer_running_;
      stream_.reset();
      launch_ = {};
    }
  }

 private:
  LaunchEntry launch_{};
  LaunchEntry outer_{};
  Running* outer_running_ = nullptr;
  std::optional<c10::Stream> stream_; // of the launch; none where there is none
  bool is_postponed_ = false;
  size_t return_count_ = 0;
  bool stands_for_nested_ = false;
  bool stands_for_host_ = false;
  HostAccess at_end_;
  std::optional<HostSync> sync_;
};

namespace {

void remember_forward_line(const at::RecordFunction& range) {
  const auto node = torch::autograd::get_current_node();
  const auto line = node == nullptr ? current_line() : line_in_backward(node->thread_id(), node->sequence_nr());
  if (line.known()) {
    note_forward_line(at::RecordFunction::currentThreadId(), static_cast<uint64_t>(range.seqNr()), line);
  }
}

// record_stream of the user, which goes to the allocator directly on some devices.
void observe_record_stream(Arguments arguments) {
  if (arguments.size() < 2 || !arguments[arguments.size() - 2].isTensor()) {
    return;
  }
  const auto& tensor = arguments[arguments.size() - 2].toTensor();
  if (tensor.defined() && on_device(tensor) && tensor.has_storage()) {
    const auto& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
    repetition().stream_recorded(tensor.device().index(), storage.data(), key_of(arguments.back().toStream()));
  }
}

Running& made(std::unique_ptr<Running>& running) {
  if (running == nullptr) {
    running = std::make_unique<Running>();
  }
  return *running;
}

// Whether the host does this itself, or has to say nothing more about it: of operations inside each other, the outermost counts.
void observe_host(const Operation& operation, Arguments arguments, std::unique_ptr<Running>& running) {
  if (operation.works_on_host && repetition().knows_host_memory() && this_thread().host_depth == 0 &&
      !repetition().preparing()) {
    host_access(operation, arguments).enter();
    made(running).stand_for_host();
  }
}

// Where a copy does not use the memory of the host's tensor when it runs, the host does: before it, or after it has waited.
void observe_host_side(const Copy& copy, const Operation& operation, std::unique_ptr<Running>& running) {
  if (copy.host == nullptr || copy.uses_host_memory || !repetition().knows_host_memory()) {
    return;
  }
  auto access = host_access(operation.name, *copy.host, copy.to_host);
  made(running).stand_for_host(); // whatever it does on the way is said herewith
  if (copy.to_host) {
    running->access_at_end(std::move(access));
  } else {
    access.enter();
  }
}

void observe_launch(const Operation& operation, Arguments arguments, std::unique_ptr<Running>& running) {
  if (!(operation.launches || operation.launches_other_layouts)) {
    return observe_host(operation, arguments, running);
  }
  const auto tensors = tensors_in(arguments);
  const bool launches = tensors.strided ? operation.launches : operation.launches_other_layouts;
  if (tensors.first < 0 || tensors.wrapped || !launches) {
    return observe_host(operation, arguments, running);
  }
  Copy copy;
  auto device = tensors.first;
  bool host_waits = operation.waits;
  if (operation.is_copy()) {
    copy = look_at_copy(operation, arguments);
    if (copy.device < 0) {
      return;
    }
    device = copy.device;
    // A sleep ends while the host waits, a gate must be opened before.
    host_waits = copy.host_waits || (copy.host_may_wait && gates().in_use());
  }
  if (repetition().serial()) {
    repetition().synchronize_used_devices();
  }
  const bool traced = !repetition().preparing();
  const bool counted = traced && this_thread().counted_depth == 0;
  if (!counted && !host_waits) {
    return;
  }
  const auto stream = current_stream(device);
  const auto key = key_of(stream);
  std::optional<StreamKey> peer;
  if (copy.peer.has_value()) {
    peer = key_of(current_stream(*copy.peer));
  }
  made(running);
  if (counted) {
    if (operation.is_copy()) {
      observe_host_side(copy, operation, running);
    } else {
      observe_host(operation, arguments, running);
    }
    const auto cause = Cause::now();
    if (peer.has_value()) {
      repetition().order_streams(*peer, key);
    }
    Touched touched;
    for (size_t i = 0; i < arguments.size(); ++i) {
      touched.add(arguments[i], operation.written.has(i, arguments));
    }
    if (copy.uses_host_memory) {
      Touched host{/*of_host=*/true};
      host.add(*copy.host, copy.to_host);
      touched.accesses.insert(touched.accesses.end(), host.accesses.begin(), host.accesses.end());
      repetition().copy_uses(copy.host->storage(), copy.non_blocking ? std::optional(key) : std::nullopt);
    }
    const auto ticket = repetition().launch(
        key, operation.name, cause.node, cause.line, copy.host != nullptr, std::move(touched.accesses),
        touched.storages);
    const bool integers = std::any_of(
        touched.storages.begin(), touched.storages.end(), [](const TouchedStorage& storage) { return storage.integers; });
    running->trace(ticket.entry, stream, operation.return_count, integers);
    running->hold(ticket);
    if (peer.has_value()) {
      repetition().order_streams(key, *peer);
    }
  }
  if (counted && operation.stands_for_nested) {
    running->stand_for_nested();
  }
  if (host_waits) {
    running->wait_for(key, traced && !copy.host_may_wait);
  }
}

std::unique_ptr<at::ObserverContext> observe_start(const at::RecordFunction& range) {
  const auto* const operation = operation_of(range, device_type.load(std::memory_order_relaxed));
  if (repetition().lines() && range.seqNr() >= 0 && this_thread().counted_depth == 0) {
    // Also for ranges that are no operation: the forward of a custom Function is one.
    remember_forward_line(range);
  }
  if (operation != nullptr && operation->base_name == "aten::record_stream") {
    observe_record_stream(range.inputs());
    return nullptr;
  }
  if (operation == nullptr) {
    return nullptr;
  }
  auto arguments = range.inputs();
  if (arguments.size() > operation->argument_count) {
    arguments = arguments.slice(arguments.size() - operation->argument_count); // the caller's stack may hold more
  }
  std::unique_ptr<Running> running;
  observe_launch(*operation, arguments, running);
  return running;
}

// The dispatcher would swallow an exception with a warning.
template <typename Function>
void noting_errors(const at::RecordFunction& range, Function function) {
  const auto failed = [&range](const char* what) {
    repetition().note_error(std::string("observing ") + range.name() + " failed: " + what);
  };
  try {
    function();
  } catch (const c10::Error& error) {
    failed(error.what_without_backtrace());
  } catch (const std::exception& error) {
    failed(error.what());
  }
}

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& range) {
  if (!observed()) {
    return nullptr;
  }
  report_memory_of_this_thread();
  std::unique_ptr<at::ObserverContext> context;
  noting_errors(range, [&] { context = observe_start(range); });
  return context;
}

void on_end(const at::RecordFunction& range, at::ObserverContext* context) {
  if (context != nullptr) {
    auto* const running = static_cast<Running*>(context);
    noting_errors(range, [&] { running->returned(range.outputs()); });
    running->end();
    if (repetition().serial()) {
      // At its end as well: what is freed before the next operation is filled on its owning stream at once.
      noting_errors(range, [] { repetition().synchronize_used_devices(); });
    }
  }
}

} // namespace

void observe_host_read(const std::string& operation, const at::Tensor& tensor) {
  if (!repetition().preparing()) {
    host_access(interned(operation), tensor, false).enter();
  }
}

Packing::Packing(const at::Tensor& saved) : operation_(this_thread()) {
  if (operation_.running != nullptr) {
    operation_.running->postpone(saved);
  }
  this_thread() = {};
  this_thread().ignored = operation_.ignored;
}

Packing::~Packing() {
  this_thread() = operation_;
  if (operation_.running != nullptr && succeeded_) {
    operation_.running->resume();
  }
}

void install_launch_observer(c10::DeviceType type) {
  device_type = type;
  callback = at::addGlobalCallback(at::RecordFunctionCallback(on_start, on_end)
                                       .scopes({at::RecordScope::FUNCTION})
                                       .needsInputs(true)
                                       .needsOutputs(true));
}

void remove_launch_observer() {
  if (callback != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(callback);
    callback = at::INVALID_CALLBACK_HANDLE;
  }
}

} // namespace sidestream
