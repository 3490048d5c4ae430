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
  bool host_waits = false;
  bool host_may_wait = false;
};

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
  if (!(on_device(*source) ? destination : source)->is_cpu()) {
    return copy;
  }
  const auto position = static_cast<size_t>(operation.copy_non_blocking);
  const bool non_blocking = operation.copy_non_blocking >= 0 && position < arguments.size() &&
      arguments[position].isBool() && arguments[position].toBool();
  copy.host_waits = !non_blocking;
  if (non_blocking && destination->is_cpu() && destination->has_storage() && destination->numel() > 0) {
    copy.host_waits = !at::globalContext()
                           .getAcceleratorHooksInterface(device_type.load(std::memory_order_relaxed))
                           .isPinnedPtr(destination->storage().data());
  }
  constexpr size_t kTakenAlong = 64 * 1024;
  if (non_blocking && source->is_cpu() && source->has_storage() && source->nbytes() > kTakenAlong) {
    copy.host_may_wait = !at::globalContext()
                              .getAcceleratorHooksInterface(device_type.load(std::memory_order_relaxed))
                              .isPinnedPtr(source->storage().data());
  }
  return copy;
}

// The bytes on the device that an operation touches, and the storages that they are part of.
struct Touched {
  std::vector<AccessedBytes> accesses;
  std::vector<TouchedStorage> storages;

  void add_dense(const at::Tensor& tensor, bool write) {
    if (!tensor.defined() || !on_device(tensor) || !tensor.has_storage()) {
      return;
    }
    const auto& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
    const auto address = reinterpret_cast<uint64_t>(storage.data());
    if (address == 0) {
      return;
    }
    const auto device = tensor.device().index();
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
  void trace(LaunchEntry launch, size_t return_count, bool integers) {
    launch_ = launch;
    launch.integers = integers;
    return_count_ = return_count;
    outer_ = std::exchange(this_thread().launch, launch);
  }

  void returned(Arguments stack) {
    if (launch_.entry < 0) {
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
    if (launch_.entry >= 0) {
      this_thread().launch = outer_;
      launch_ = {};
    }
  }

 private:
  LaunchEntry launch_{};
  LaunchEntry outer_{};
  size_t return_count_ = 0;
  bool stands_for_nested_ = false;
  std::optional<HostSync> sync_;
};

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

std::unique_ptr<at::ObserverContext> observe_start(const at::RecordFunction& range) {
  const auto* const operation = operation_of(range, device_type.load(std::memory_order_relaxed));
  auto& thread = this_thread();
  if (repetition().lines() && range.seqNr() >= 0 && thread.counted_depth == 0) {
    // Also for ranges that are no operation: the forward of a custom Function is one.
    remember_forward_line(range);
  }
  if (operation != nullptr && operation->base_name == "aten::record_stream") {
    observe_record_stream(range.inputs());
    return nullptr;
  }
  if (operation == nullptr || !(operation->launches || operation->launches_other_layouts)) {
    return nullptr;
  }
  auto arguments = range.inputs();
  if (arguments.size() > operation->argument_count) {
    arguments = arguments.slice(arguments.size() - operation->argument_count); // the caller's stack may hold more
  }
  const auto tensors = tensors_in(arguments);
  const bool launches = tensors.strided ? operation->launches : operation->launches_other_layouts;
  if (tensors.first < 0 || tensors.wrapped || !launches) {
    return nullptr;
  }
  Copy copy;
  auto device = tensors.first;
  bool host_waits = operation->waits;
  if (operation->is_copy()) {
    copy = look_at_copy(*operation, arguments);
    if (copy.device < 0) {
      return nullptr;
    }
    device = copy.device;
    // A sleep ends while the host waits, a gate must be opened before.
    host_waits = copy.host_waits || (copy.host_may_wait && gates().in_use());
  }
  if (repetition().serial()) {
    repetition().synchronize_used_devices();
  }
  const bool traced = !repetition().preparing();
  const bool counted = traced && thread.counted_depth == 0;
  if (!counted && !host_waits) {
    return nullptr;
  }
  const auto stream = current_stream(device);
  const auto key = key_of(stream);
  std::optional<StreamKey> peer;
  if (copy.peer.has_value()) {
    peer = key_of(current_stream(*copy.peer));
  }
  auto running = std::make_unique<Running>();
  if (counted) {
    const std::string* node_name = nullptr;
    SourceLine line;
    if (const auto node = torch::autograd::get_current_node()) {
      node_name = interned(node->name());
      if (repetition().lines()) {
        line = line_in_backward(node->thread_id(), node->sequence_nr());
      }
    } else if (repetition().lines()) {
      line = current_line();
    }
    if (peer.has_value()) {
      repetition().order_streams(*peer, key);
    }
    Touched touched;
    for (size_t i = 0; i < arguments.size(); ++i) {
      touched.add(arguments[i], operation->written.has(i, arguments));
    }
    const auto ticket = repetition().launch(
        key, operation->name, node_name, line, std::move(touched.accesses), touched.storages);
    const bool integers = std::any_of(
        touched.storages.begin(), touched.storages.end(), [](const TouchedStorage& storage) { return storage.integers; });
    running->trace(ticket.entry, operation->return_count, integers);
    if (ticket.hold >= 0) {
      const auto hold = static_cast<size_t>(ticket.hold);
      repetition().mark_frontier(stream, ticket.behind);
      repetition().launch_held(hold, enqueue_hold(hold, stream));
    }
    if (peer.has_value()) {
      repetition().order_streams(key, *peer);
    }
  }
  if (counted && operation->stands_for_nested) {
    running->stand_for_nested();
  }
  if (host_waits) {
    running->wait_for(key, traced && !copy.host_may_wait);
  }
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
  if (!report_memory_of_this_thread()) {
    repetition().note_unseen_memory();
  }
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
