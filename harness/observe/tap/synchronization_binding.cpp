// The Python side of the synchronizations: which were issued, and calls that Python makes around the device guard.
#include "synchronization_binding.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <c10/core/Device.h>

#include <array>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "issuer.h"
#include "synchronizations.h"
#include "thread_state.h"

namespace py = pybind11;
namespace sidestream {
namespace {

constexpr std::array<const char*, 6> kKinds = {
    "record", "wait", "synchronize_stream", "synchronize_event", "synchronize_device", "record_stream"};

SynchronizationKind kind_named(const std::string& name) {
  for (size_t i = 0; i < kKinds.size(); ++i) {
    if (name == kKinds[i]) {
      return static_cast<SynchronizationKind>(i);
    }
  }
  throw std::invalid_argument("there is no synchronization of the kind " + name);
}

using Name = std::tuple<std::string, int64_t, int64_t, std::string, int64_t, bool>;

// `target`: kind, device, stream, issuer and index of the one to get wrong, and whether the stream is named by its
// appearance; or None. `fault` says how.
void begin_synchronizations(const std::optional<Name>& target, const std::string& fault, bool lines) {
  std::optional<SynchronizationName> name;
  if (target.has_value()) {
    const auto& [kind, device, stream, issuer, index, by_appearance] = *target;
    name = {kind_named(kind), {static_cast<c10::DeviceIndex>(device), stream}, issuer, index, by_appearance};
  }
  if (fault != "leave out" && fault != "misdirect") {
    throw std::invalid_argument("there is no fault of the kind " + fault);
  }
  synchronizations().begin(name, fault == "misdirect" ? Fault::Misdirect : Fault::LeaveOut, lines);
}

py::list finish_synchronizations() {
  py::list made;
  for (const auto& each : synchronizations().finish()) {
    const auto text = [](const std::string* value) { return value == nullptr ? py::object(py::none()) : py::str(*value); };
    const auto file = each.line.known() ? py::object(py::str(file_name(each.line.file))) : py::object(py::none());
    made.append(py::make_tuple(
        kKinds[static_cast<size_t>(each.kind)], static_cast<int>(each.on.device), each.on.stream, text(each.issuer),
        each.index, text(each.node), file, each.line.line, each.origin.thread, each.origin.backward, each.recorded,
        each.entry, each.left_out, each.appearance));
  }
  return made;
}

// While a call that Python makes is carried out: whether or not it goes through the guard, it is seen here alone.
class Unseen {
 public:
  Unseen() : was_(this_thread().ignored) {
    this_thread().ignored = true;
  }
  ~Unseen() {
    this_thread().ignored = was_;
  }
  Unseen(const Unseen&) = delete;
  Unseen& operator=(const Unseen&) = delete;

 private:
  bool was_;
};

// Makes a call of torch.cuda.Stream, torch.cuda.Event, torch.cuda.synchronize or Tensor.record_stream, which go around
// the device guard, as if it had gone through it: it is traced where the tap traces, counted, and can be left out.
// `event` tells events apart; for record_stream it is the address of the memory.
py::object call_around_guard(
    const std::string& kind_name,
    int64_t device,
    int64_t stream,
    uintptr_t event,
    const py::function& original) {
  const auto kind = kind_named(kind_name);
  const StreamKey on{static_cast<c10::DeviceIndex>(device), stream};
  auto* const handle = reinterpret_cast<void*>(event);
  const bool traced = !repetition().preparing();
  const bool tap_traces = observed();
  py::object result = py::none();
  const auto unseen_call = [&] {
    const Unseen unseen;
    result = original();
  };
  const auto synchronize = [&](HostSync sync) {
    sync.begin();
    unseen_call();
    sync.end();
  };
  const auto call = [&] {
    if (!tap_traces) {
      return unseen_call();
    }
    switch (kind) {
      case SynchronizationKind::Record:
        unseen_call();
        repetition().mark_used(on.device);
        return repetition().recorded(handle, on, traced);
      case SynchronizationKind::Wait:
        repetition().mark_used(on.device);
        repetition().waited(handle, on, traced);
        return unseen_call();
      case SynchronizationKind::SynchronizeStream:
        return synchronize(HostSync::of_stream(on, traced));
      case SynchronizationKind::SynchronizeEvent:
        return synchronize(HostSync::of_event(handle, traced));
      case SynchronizationKind::SynchronizeDevice:
        return synchronize(HostSync::of_device(on.device, traced));
      case SynchronizationKind::RecordStream:
        unseen_call();
        return repetition().stream_recorded(on.device, handle, on);
    }
  };
  if (synchronizations().armed() && !this_thread().ignored) {
    void* const key = handle;
    synchronizations().issue(kind, on, user_issuer(), &key, call, nullptr);
  } else {
    call();
  }
  return result;
}

} // namespace

void bind_synchronizations(py::module_& module) {
  module.def(
      "install_synchronizations",
      [](const std::string& device_type, std::optional<uintptr_t> last_entry_function) {
        install_synchronization_guard(c10::Device(device_type).type());
        synchronizations().set_trace(
            last_entry_function.has_value() ? reinterpret_cast<TakeLastEntry>(*last_entry_function) : &take_last_entry);
      },
      py::arg("device_type"),
      py::arg("last_entry_function"));
  module.def("remove_synchronizations", &remove_synchronization_guard);
  module.def(
      "begin_synchronizations", &begin_synchronizations, py::arg("target"), py::arg("fault"), py::arg("lines"));
  module.def("prepare_synchronizations", [](bool on) { synchronizations().set_preparing(on); }, py::arg("on"));
  module.def("finish_synchronizations", &finish_synchronizations);
  module.def(
      "call_around_guard",
      &call_around_guard,
      py::arg("kind"),
      py::arg("device"),
      py::arg("stream"),
      py::arg("event"),
      py::arg("original"));
}

} // namespace sidestream
