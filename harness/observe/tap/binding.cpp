// The Python side of the tap: the functions that every native instrument of Sidestream offers, and the tap's own.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <c10/core/Device.h>
#include <torch/csrc/autograd/python_variable.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "device.h"
#include "gates.h"
#include "guard_tap.h"
#include "launch_observer.h"
#include "memory_reports.h"
#include "operations.h"
#include "repetition.h"
#include "synchronization_binding.h"
#include "thread_state.h"

namespace py = pybind11;
namespace sidestream {
namespace {

bool is_installed = false;

void install_tap(const std::string& device_type) {
  if (is_installed) {
    throw std::runtime_error("a tap is installed already");
  }
  const auto type = c10::Device(device_type).type();
  install_guard_tap(type);
  if (type == c10::DeviceType::CUDA || type == c10::DeviceType::HIP) {
    find_sleep_kernel();
    find_fill();
  }
  install_launch_observer(type);
  is_installed = true;
}

void require_installed() {
  if (!is_installed) {
    throw std::runtime_error("no tap is installed");
  }
}

void remove_tap() {
  if (!is_installed) {
    return;
  }
  remove_launch_observer();
  gates().stop_using();
  destroy_hold_events();
  remove_guard_tap();
  set_sleep_fallback(nullptr);
  is_installed = false;
}

void begin_repetition(
    const std::vector<std::tuple<int64_t, int64_t, int64_t>>& holds,
    bool serial,
    bool lines) {
  require_installed();
  if (!holds.empty() && !can_hold()) {
    throw std::runtime_error("nothing holds a stream of this device: it has no sleep kernel");
  }
  std::vector<std::pair<StreamKey, int64_t>> plan;
  for (const auto& [device, stream, index] : holds) {
    plan.emplace_back(StreamKey{static_cast<c10::DeviceIndex>(device), stream}, index);
  }
  reuse_hold_events();
  repetition().begin(plan, serial, lines);
  begin_memory_reports();
}

py::object text(const std::string* value) {
  return value == nullptr ? py::object(py::none()) : py::object(py::str(*value));
}

py::object file_of(const SourceLine& line) {
  return line.known() ? py::object(py::str(file_name(line.file))) : py::object(py::none());
}

py::tuple accesses_of(const Entry& entry) {
  py::tuple accesses(entry.accesses.size());
  for (size_t i = 0; i < entry.accesses.size(); ++i) {
    const auto& [bytes, write] = entry.accesses[i];
    accesses[i] = py::make_tuple(bytes.block, bytes.start, bytes.stop, write);
  }
  return accesses;
}

py::tuple as_tuple(const Entry& entry) {
  const int device = entry.on.device;
  switch (entry.kind) {
    case EntryKind::Launch:
      return py::make_tuple(
          "launch", device, entry.on.stream, entry.number, text(entry.operation), text(entry.node),
          file_of(entry.line), entry.line.line, accesses_of(entry), entry.origin.thread, entry.origin.backward,
          entry.with_host);
    case EntryKind::Record:
      return py::make_tuple("record", device, entry.on.stream, entry.number);
    case EntryKind::Wait:
      return py::make_tuple("wait", device, entry.on.stream, entry.number);
    case EntryKind::SyncStream:
      return py::make_tuple("sync_stream", device, entry.on.stream);
    case EntryKind::SyncEvent:
      return py::make_tuple("sync_event", entry.number);
    case EntryKind::SyncDevice:
      return py::make_tuple("sync_device", device);
    case EntryKind::Host:
      return py::make_tuple(
          "host", text(entry.operation), text(entry.node), file_of(entry.line), entry.line.line, accesses_of(entry));
    case EntryKind::Allocate:
      return py::make_tuple(
          "allocate", entry.bytes.block, entry.bytes.start, entry.bytes.stop, device, entry.on.stream,
          py::tuple(py::cast(entry.recordings)));
    case EntryKind::Free:
      return py::make_tuple(
          "free", entry.bytes.block, entry.bytes.start, entry.bytes.stop, device, entry.on.stream,
          py::tuple(py::cast(entry.recordings)), file_of(entry.line), entry.line.line);
    case EntryKind::RecordStream:
      return py::make_tuple(
          "record_stream", entry.bytes.block, entry.bytes.start, entry.bytes.stop, device, entry.on.stream);
    case EntryKind::Postponed: // never after the end of a repetition
      break;
  }
  throw std::logic_error("unknown kind of trace entry");
}

// Whether the operation of that name (aten::add.Tensor) counts as a launch for strided tensors of a device type.
bool is_launch(const std::string& operation, const std::string& device_type) {
  const auto decided = decide_operation(operation, c10::Device(device_type).type());
  if (!decided.has_value()) {
    throw std::invalid_argument("there is no operation " + operation);
  }
  return decided->launches;
}

const char* state_name(HoldState state) {
  switch (state) {
    case HoldState::Missing:
      return "missing";
    case HoldState::Pending:
      return "pending";
    case HoldState::Forced:
      return "forced";
    case HoldState::Expired:
      return "expired";
    case HoldState::Undecided: // never after the end of a repetition
    case HoldState::Ran:
      return "ran";
  }
  throw std::logic_error("unknown state of a hold");
}

py::tuple finish_repetition() {
  require_installed();
  if (!repetition().running()) {
    throw std::runtime_error("no repetition is running");
  }
  end_memory_reports();
  {
    const py::gil_scoped_release without_gil;
    repetition().finish();
  }
  py::list entries;
  for (const auto& entry : repetition().entries()) {
    entries.append(as_tuple(entry));
  }
  py::list outcomes;
  for (const auto& outcome : repetition().outcomes()) {
    outcomes.append(py::make_tuple(state_name(outcome.state), file_of(outcome.line), outcome.line.line));
  }
  return py::make_tuple(entries, outcomes);
}

// Keeps a Python callable for C++ threads: destroyed with the GIL, with which it is to be called as well.
std::shared_ptr<py::function> kept(py::function callable) {
  return {new py::function(std::move(callable)), [](py::function* held) {
            const py::gil_scoped_acquire gil;
            delete held;
          }};
}

std::function<void(int64_t)> sleep_by(py::function callable) {
  return [shared = kept(std::move(callable))](int64_t cycles) {
    const py::gil_scoped_acquire gil;
    (*shared)(cycles);
  };
}

// Without a `wait` the driver's own is used.
void use_gates(double limit_ms, std::optional<py::function> wait) {
  require_installed();
  Gates::Wait enqueue;
  if (wait.has_value()) {
    enqueue = [shared = kept(std::move(*wait))](const c10::Stream& stream, uint64_t address, uint32_t value) {
      const py::gil_scoped_acquire gil;
      (*shared)(static_cast<int>(stream.device_index()), stream.id(), address, value);
    };
  }
  const std::chrono::duration<double, std::milli> limit(limit_ms);
  gates().use(std::chrono::duration_cast<Gates::Clock::duration>(limit), std::move(enqueue));
}

// The host reads a tensor's memory without an operator that would be seen.
void trace_host_read(const std::string& operation, py::handle tensor) {
  if (observed() && repetition().knows_host_memory() && THPVariable_Check(tensor.ptr())) {
    observe_host_read(operation, THPVariable_Unpack(tensor.ptr()));
  }
}

// Calls a hook that packs a tensor which the operation that is running on this thread saves for backward.
py::object call_packing(const py::function& pack, py::handle tensor) {
  if (!observed() || !THPVariable_Check(tensor.ptr())) {
    return pack(tensor);
  }
  Packing packing(THPVariable_Unpack(tensor.ptr()));
  py::object packed = pack(tensor);
  packing.succeeded();
  return packed;
}

} // namespace
} // namespace sidestream

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace sidestream;
  module.doc() = "Observes and holds the launches of a real accelerator.";
  module.def("install", &install_tap, py::arg("device_type"));
  module.def("remove", &remove_tap);
  module.def("begin_repetition", &begin_repetition, py::arg("holds"), py::arg("serial"), py::arg("lines"));
  module.def("set_preparing", [](bool on) { repetition().set_preparing(on); }, py::arg("on"));
  module.def("finish_repetition", &finish_repetition);
  module.def("entry_marks", [] {
    std::vector<int64_t> marks;
    for (const auto& entry : repetition().entries()) {
      marks.push_back(entry.mark);
    }
    return marks;
  });
  module.def(
      "set_ignored_prefixes",
      [](std::vector<std::string> prefixes) { set_ignored_prefixes(std::move(prefixes)); },
      py::arg("prefixes"));
  module.def("set_hold_cycles", &set_hold_cycles, py::arg("cycles"));
  module.def("can_sleep", &can_sleep);
  module.def("use_gates", &use_gates, py::arg("limit_ms"), py::arg("wait") = py::none());
  module.def("use_sleeps", [] { gates().stop_using(); });
  module.def("can_poison", &can_poison);
  module.def(
      "set_poisoning",
      [](bool on) {
        if (on && !can_poison()) {
          throw std::runtime_error("nothing fills freed memory of this device");
        }
        set_poisoning(on);
      },
      py::arg("on"));
  module.def(
      "fill",
      [](int64_t device, uint64_t address, uint64_t size_bytes) {
        const c10::Device of(device_guard()->type(), static_cast<c10::DeviceIndex>(device));
        fill_with_poison(reinterpret_cast<void*>(address), size_bytes, device_guard()->getStream(of), 0);
      },
      py::arg("device"),
      py::arg("address"),
      py::arg("size_bytes"));
  module.def("set_sleep_fallback", [](py::function callable) { set_sleep_fallback(sleep_by(std::move(callable))); });
  module.def("is_launch", &is_launch, py::arg("operation"), py::arg("device_type"));
  module.def("trace_host_read", &trace_host_read, py::arg("operation"), py::arg("tensor"));
  module.def("call_packing", &call_packing, py::arg("pack"), py::arg("tensor"));
  module.def("ignore_this_thread", [](bool on) { this_thread().ignored = on; }, py::arg("on"));
  bind_synchronizations(module);
}
