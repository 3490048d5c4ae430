// The Python module: the functions that every native instrument of the harness has (begin_repetition to set_ignored_prefixes),
// and what the device module torch.sim needs.
#include "allocator.h"
#include "autocast.h"
#include "caller.h"
#include "device_guard.h"
#include "device_hooks.h"
#include "host_accesses.h"
#include "host_order.h"
#include "operators.h"
#include "output_metadata.h"
#include "probabilistic_concurrency_testing.h"
#include "python_errors.h"
#include "python_frames.h"
#include "random_walk.h"
#include "recurrent_cells.h"
#include "scheduler.h"
#include "sparse.h"
#include "streams.h"
#include "submission_order.h"
#include "virtual_time.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace sidestream {

bool is_python_not_implemented(const std::exception& error) {
  PyObject* type = nullptr;
  if (const auto* torch_error = dynamic_cast<const python_error*>(&error)) {
    type = torch_error->type;
  } else if (const auto* pybind_error = dynamic_cast<const py::error_already_set*>(&error)) {
    type = pybind_error->type().ptr();
  } else {
    return false;
  }
  py::gil_scoped_acquire gil;
  return PyErr_GivenExceptionMatches(type, PyExc_NotImplementedError) != 0;
}

namespace {

py::object to_python(const std::string* text) {
  return text ? py::object(py::str(*text)) : py::object(py::none());
}

py::tuple accesses_of(const Trace& trace, const TraceEntry& entry) {
  py::tuple result(entry.count);
  for (uint32_t i = 0; i < entry.count; i++) {
    const auto& access = trace.accesses[entry.first + i];
    result[i] = py::make_tuple(access.block, access.start, access.stop, access.write);
  }
  return result;
}

py::tuple events_of(const Trace& trace, const TraceEntry& entry) {
  py::tuple result(entry.count);
  for (uint32_t i = 0; i < entry.count; i++) {
    result[i] = trace.events[entry.first + i];
  }
  return result;
}

py::tuple to_python(const Trace& trace, const TraceEntry& entry) {
  const int device = entry.device;
  switch (entry.kind) {
    case TraceEntry::kLaunch:
      return py::make_tuple(
          "launch", device, entry.stream, entry.number, to_python(entry.operation), to_python(entry.caller.node),
          to_python(entry.caller.file), entry.caller.line, accesses_of(trace, entry), entry.caller.origin.thread,
          entry.caller.origin.backward, entry.with_host);
    case TraceEntry::kRecord:
      return py::make_tuple("record", device, entry.stream, entry.number);
    case TraceEntry::kWait:
      return py::make_tuple("wait", device, entry.stream, entry.number);
    case TraceEntry::kSyncStream:
      return py::make_tuple("sync_stream", device, entry.stream);
    case TraceEntry::kSyncEvent:
      return py::make_tuple("sync_event", entry.number);
    case TraceEntry::kSyncDevice:
      return py::make_tuple("sync_device", device);
    case TraceEntry::kAllocate:
      return py::make_tuple(
          "allocate", entry.number, 0, entry.size_bytes, device, entry.stream, events_of(trace, entry));
    case TraceEntry::kHost:
      return py::make_tuple(
          "host", to_python(entry.operation), to_python(entry.caller.node), to_python(entry.caller.file), entry.caller.line,
          accesses_of(trace, entry));
    case TraceEntry::kFree:
      return py::make_tuple(
          "free", entry.number, 0, entry.size_bytes, device, entry.stream, events_of(trace, entry),
          to_python(entry.caller.file), entry.caller.line);
    case TraceEntry::kRecordStream:
      return py::make_tuple("record_stream", entry.number, 0, entry.size_bytes, device, entry.stream);
  }
  throw std::logic_error("A trace entry of an unknown kind.");
}

// Calls a function at the end of a scope.
struct Finally {
  explicit Finally(void (*function)()) : function_(function) {}
  ~Finally() { function_(); }
  Finally(const Finally&) = delete;
  Finally& operator=(const Finally&) = delete;

 private:
  void (*function_)();
};

void begin_repetition(
    const std::vector<std::tuple<int64_t, int64_t, int64_t>>& holds, bool serial, bool lines) {
  {
    py::gil_scoped_release release;
    Scheduler::get().begin_repetition(holds, serial);
    HostOrder::get().start();
    update_host_observer();
  }
  start_lines(lines);
}

py::tuple finish_repetition() {
  stop_lines();
  forget_body_thread();
  auto& scheduler = Scheduler::get();
  {
    py::gil_scoped_release release;
    Finally update(&update_host_observer); // also where a launch failed
    std::exception_ptr misfit;
    try {
      HostOrder::get().stop();
    } catch (...) {
      misfit = std::current_exception();
    }
    scheduler.finish_repetition();
    if (misfit) {
      std::rethrow_exception(misfit);
    }
  }
  py::list entries(scheduler.trace.entries.size());
  for (size_t i = 0; i < scheduler.trace.entries.size(); i++) {
    entries[i] = to_python(scheduler.trace, scheduler.trace.entries[i]);
  }
  static const char* const states[] = {"missing", "pending", "forced", "ran"};
  py::list outcomes(scheduler.holds.size());
  for (size_t i = 0; i < scheduler.holds.size(); i++) {
    const auto& hold = scheduler.holds[i];
    outcomes[i] = py::make_tuple(states[hold.state], to_python(hold.forced_by.file), hold.forced_by.line);
  }
  return py::make_tuple(entries, outcomes);
}

std::unique_ptr<Schedule> make_schedule(const std::string& kind, const py::dict& parameters) {
  auto number = [&](const char* name) { return parameters[name].cast<double>(); };
  auto integer = [&](const char* name) { return parameters[name].cast<int64_t>(); };
  if (kind == "submission") {
    return std::make_unique<SubmissionOrder>();
  }
  if (kind == "virtual-time") {
    return std::make_unique<VirtualTime>(VirtualCosts{
        number("launch_us"), number("operation_us"), number("operation_us_per_mib"), number("copy_us_per_mib"),
        number("query_us")});
  }
  if (kind == "pct") {
    return std::make_unique<ProbabilisticConcurrencyTesting>(
        static_cast<uint64_t>(integer("seed")), integer("depth"), integer("steps"));
  }
  if (kind == "random") {
    return std::make_unique<RandomWalk>(static_cast<uint64_t>(integer("seed")));
  }
  throw std::invalid_argument("There is no schedule of the kind '" + kind + "'.");
}

using HostSegments = std::vector<std::pair<std::string, int64_t>>;

// `hosts` says what becomes of the order of the host's threads: None nothing, "record", or the order to replay and its checksum.
void set_schedule(const std::string& kind, const py::dict& parameters, const py::object& hosts) {
  auto schedule = make_schedule(kind, parameters);
  auto& order = HostOrder::get();
  std::vector<HostOrder::Segment> segments;
  uint32_t checksum = 0;
  const bool records = py::isinstance<py::str>(hosts);
  if (!records && !hosts.is_none()) {
    auto [pairs, sum] = hosts.cast<std::pair<HostSegments, uint32_t>>();
    for (auto& [thread, calls] : pairs) {
      segments.push_back({thread, calls});
    }
    checksum = sum;
  }
  const bool nothing = hosts.is_none();
  py::gil_scoped_release release;
  std::exception_ptr misfit;
  try {
    order.stop();
  } catch (...) {
    misfit = std::current_exception();
  }
  Scheduler::get().set_schedule(std::move(schedule));
  if (nothing) {
    order.switch_off();
  } else if (records) {
    order.record_next();
  } else {
    order.replay_next(std::move(segments), checksum);
  }
  order.start();
  if (misfit) {
    std::rethrow_exception(misfit);
  }
}

// What the schedule says of the run since it was set or the repetition began. Meant to be read before anything else is enqueued.
py::dict schedule_report() {
  auto& scheduler = Scheduler::get();
  std::vector<std::pair<std::string, double>> numbers;
  {
    py::gil_scoped_release release;
    numbers = scheduler.schedule_report();
  }
  py::dict report;
  py::list executed(scheduler.executed.size());
  for (size_t i = 0; i < scheduler.executed.size(); i++) {
    const auto& launch = scheduler.executed[i];
    executed[i] = py::make_tuple(int(launch.device), launch.stream, launch.index, launch.completed_us);
  }
  report["executed"] = executed;
  for (const auto& [name, value] : numbers) {
    report[name.c_str()] = value;
  }
  auto [segments, checksum] = HostOrder::get().made();
  HostSegments hosts;
  for (const auto& segment : segments) {
    hosts.emplace_back(segment.thread, segment.calls);
  }
  report["hosts"] = py::make_tuple(hosts, checksum);
  return report;
}

// Under the names that torch.cuda.memory_stats has for them.
std::map<std::string, int64_t> memory_statistics(int device) {
  MemoryStatistics statistics;
  {
    py::gil_scoped_release release;
    statistics = Allocator::get().statistics(static_cast<c10::DeviceIndex>(device));
  }
  std::map<std::string, int64_t> named;
  auto name = [&](const std::string& prefix, const ByteCount& count) {
    named[prefix + ".all.current"] = count.current;
    named[prefix + ".all.peak"] = count.peak;
    named[prefix + ".all.allocated"] = count.allocated;
    named[prefix + ".all.freed"] = count.freed;
  };
  name("allocated_bytes", statistics.allocated);
  name("active_bytes", statistics.active);
  name("reserved_bytes", statistics.reserved);
  return named;
}

// The host reads a tensor's memory without an operator that would be seen.
void trace_host_read(const std::string& operation, py::handle tensor) {
  if (Scheduler::get().traces() && THPVariable_Check(tensor.ptr())) {
    trace_host_access(intern(operation), THPVariable_Unpack(tensor.ptr()), false);
  }
}

// Calls a hook that packs a tensor which the operation that is running on this thread saves for backward.
py::object call_packing(const py::function& pack, py::handle tensor) {
  const OutsideOperator outside;
  return pack(tensor);
}

bool is_taken() {
  return c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::kPrivateUse1)].load() != nullptr ||
      at::isPrivateUse1HooksRegistered();
}

void install() {
  if (is_taken()) {
    throw std::runtime_error("A PrivateUse1 backend is registered already.");
  }
  c10::SetAllocator(c10::kPrivateUse1, &Allocator::get());
  register_device_hooks();
  register_device_guard();
  register_recurrent_cells();
  register_operators();
  register_sparse_operators();
  register_autocast();
}

} // namespace
} // namespace sidestream

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace sidestream;
  using Release = py::call_guard<py::gil_scoped_release>;
  module.def("is_taken", &is_taken);
  module.def("install", &install);
  module.def("begin_repetition", &begin_repetition, py::arg("holds"), py::arg("serial"), py::arg("lines"));
  module.def("set_preparing", [](bool on) { Scheduler::get().set_preparing(on); }, py::arg("on"), Release());
  module.def("finish_repetition", &finish_repetition);
  module.def("last_entry_function", [] { return reinterpret_cast<uintptr_t>(&take_last_entry); });
  module.def("set_schedule", &set_schedule, py::arg("kind"), py::arg("parameters"), py::arg("hosts"));
  module.def("can_poison", [] { return true; });
  module.def("set_poisoning", [](bool on) { Allocator::get().set_poisoning(on); }, py::arg("on"), Release());
  module.def("schedule_report", &schedule_report);
  module.def("stop_lines", &stop_lines);
  module.def("set_ignored_prefixes", &set_ignored_prefixes, py::arg("prefixes"));
  module.def("device_count", [] { return int(kDevices); });
  module.def("current_device", [] { return int(current_device()); });
  module.def("exchange_device", [](int device) {
    return int(exchange_device(static_cast<c10::DeviceIndex>(device)));
  });
  module.def("sleep", &sidestream::sleep, py::arg("cycles"), Release());
  module.def("memory_statistics", &memory_statistics, py::arg("device"));
  module.def("reset_accumulated_memory_statistics", [](int device) {
    Allocator::get().reset_accumulated_statistics(static_cast<c10::DeviceIndex>(device));
  }, Release());
  module.def("reset_peak_memory_statistics", [](int device) {
    Allocator::get().reset_peak_statistics(static_cast<c10::DeviceIndex>(device));
  }, Release());
  module.def("memory_info", &memory_info);
  module.def("empty_cache", [] { Allocator::get().empty_cache(); }, Release());
  module.def("metadata_cache_size", &metadata_cache_size);
  module.def("observes_host", &observes_host);
  module.def("call_packing", &call_packing, py::arg("pack"), py::arg("tensor"));
  module.def("trace_host_read", &trace_host_read, py::arg("operation"), py::arg("tensor"));
  module.def("runs_meta_kernel", &runs_meta_kernel);
  module.def("manual_seed", [](int device, uint64_t seed) {
    auto& generator = default_generator(static_cast<c10::DeviceIndex>(device));
    std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_current_seed(seed);
  }, Release());
  module.def("initial_seed", [](int device) {
    return default_generator(static_cast<c10::DeviceIndex>(device)).current_seed();
  });
  module.def("get_rng_state", [](int device) {
    return py::bytes(generator_state(default_generator(static_cast<c10::DeviceIndex>(device))));
  });
  module.def("set_rng_state", [](int device, const std::string& state) {
    set_generator_state(default_generator(static_cast<c10::DeviceIndex>(device)), state);
  });
}
