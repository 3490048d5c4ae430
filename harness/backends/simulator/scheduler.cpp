#include "scheduler.h"

#include "allocator.h"
#include "host_order.h"
#include "pinned_memory.h"
#include "python_frames.h"
#include "streams.h"
#include "submission_order.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <utility>

namespace sidestream {
namespace {

// A host that polls an event or a stream this often is waiting for it. On a device it would see it complete in time.
constexpr int kPatience = 1000;

thread_local int kernels_of_this_thread = 0;

struct Fill final : Work {
  Fill(void* memory, int value, int64_t size_bytes) : memory(memory), value(value), size_bytes(size_bytes) {}
  void run() override { std::memset(memory, value, static_cast<size_t>(size_bytes)); }

  void* memory;
  int value;
  int64_t size_bytes;
};

[[noreturn]] void throw_with_launch(const Stream& stream, const Task& task, const std::string& what) {
  TORCH_CHECK(
      false, "Launch ", stream.id, ":", task.index, " on sim:", int(stream.device), " (", *task.operation, ") failed: ", what);
}

} // namespace

struct Scheduler::Changed {
  std::condition_variable condition;
};

Scheduler& Scheduler::get() {
  static auto& scheduler = *new Scheduler(); // leaked: autograd threads may outlive static destructors
  return scheduler;
}

Scheduler::Scheduler()
    : streams_(kDevices * kStreamsOfDevice), schedule_(new SubmissionOrder()), changed_(new Changed()) {
  for (size_t i = 0; i < streams_.size(); i++) {
    streams_[i].device = static_cast<c10::DeviceIndex>(i / kStreamsOfDevice);
    streams_[i].id = static_cast<int64_t>(i % kStreamsOfDevice);
  }
}

Stream& Scheduler::stream(c10::DeviceIndex device, int64_t id) {
  TORCH_CHECK(id >= 0 && id < kStreamsOfDevice, "The simulated accelerator has no stream ", id, ".");
  return streams_[checked_device(device) * kStreamsOfDevice + id];
}

bool Scheduler::runs_elsewhere(const Stream& stream) const {
  return stream.running && stream.runner != std::this_thread::get_id();
}

bool Scheduler::kernels_run_elsewhere() const {
  return running_ > kernels_of_this_thread;
}

bool Scheduler::schedules_launches() const {
  // Preparations are no part of what is scheduled, and what a kernel enqueues belongs to it.
  return !runs_at_once_ && (counting_ || !in_repetition_) && kernels_of_this_thread == 0;
}

void Scheduler::wait_for_change(Lock& lock) {
  auto seen = changes_;
  lock.unlock();
  {
    // The GIL is given up before the lock is taken and taken back after the lock is gone (invariant 6).
    WithoutGil without_gil;
    Lock waiting(mutex);
    changed_->condition.wait(waiting, [&] { return changes_ != seen; });
  }
  lock.lock();
}

void Scheduler::settle(Stream& stream) {
  while (!stream.running && !stream.tasks.empty()) {
    auto& front = stream.tasks.front();
    if (front.kind == Task::kLaunch) {
      return;
    }
    if (front.kind == Task::kRecord) {
      complete(*front.recording);
    } else {
      auto recording = front.recording;
      if (!settled(*recording)) {
        return;
      }
      // Settling the recording's stream can lead back here and have dropped this wait, and more, already.
      if (stream.tasks.empty() || stream.tasks.front().recording != recording) {
        continue;
      }
      schedule_->waited(stream, *recording);
    }
    stream.tasks.pop_front();
  }
}

void Scheduler::complete(Recording& recording) {
  recording.complete = true;
  schedule_->recorded(recording);
}

bool Scheduler::settled(Recording& recording) {
  if (!recording.complete) {
    settle(*recording.stream);
  }
  return recording.complete;
}

void Scheduler::enqueue(Stream& stream, Task task) {
  if (!stream.listed) {
    stream.listed = true;
    pending_.push_back(&stream);
  }
  stream.tasks.push_back(std::move(task));
}

void Scheduler::forget_pending() {
  for (auto* stream : pending_) {
    stream->listed = false;
  }
  pending_.clear();
}

void Scheduler::run(Lock& lock, Stream& stream, Task task, bool deferred) {
  if (!task.work) {
    return;
  }
  bool nested = stream.running; // a kernel that enqueues on its own stream
  auto outer_turn = stream.running_turn;
  stream.running = true;
  stream.runner = std::this_thread::get_id();
  stream.running_turn = task.turn;
  running_++;
  kernels_of_this_thread++;
  lock.unlock();
  std::exception_ptr error;
  try {
    task.work->run();
  } catch (const std::exception& exception) {
    error = std::current_exception();
    if (deferred) {
      auto* own = dynamic_cast<const c10::Error*>(&exception);
      try {
        throw_with_launch(stream, task, own ? own->what_without_backtrace() : exception.what());
      } catch (...) {
        error = std::current_exception();
      }
    }
  }
  task.work.reset();
  lock.lock();
  kernels_of_this_thread--;
  running_--;
  stream.running = nested;
  stream.running_turn = outer_turn;
  changes_++;
  changed_->condition.notify_all();
  if (error) {
    std::rethrow_exception(error);
  }
}

void Scheduler::submit(Stream& stream, Launch launch) {
  HostCall call("launch", *launch.operation);
  Caller caller;
  if (in_repetition_) { // also while preparing: the lines of forward launches are those of their backward launches
    caller = describe_launch();
  }
  Lock lock(mutex);
  bool staged = false;
  int hold = -1;
  bool deferred = false;
  while (true) {
    if (runs_elsewhere(stream) || ((serial_ || !runs_at_once_) && kernels_run_elsewhere())) {
      wait_for_change(lock);
      continue;
    }
    hold = -1;
    if (counting_) {
      for (int number : stream.holds) {
        if (holds[number].index == stream.launches) {
          hold = number;
        }
      }
    }
    settle(stream);
    deferred = hold >= 0 || !stream.tasks.empty() || schedules_launches();
    if (deferred && !staged && launch.work) {
      lock.unlock();
      launch.work->stage();
      staged = true;
      lock.lock();
      continue;
    }
    break;
  }
  Task task{Task::kLaunch, ++turns_, launch.operation, -1, std::move(launch.work), nullptr, hold};
  if (counting_) {
    task.index = stream.launches++;
    TraceEntry entry{TraceEntry::kLaunch};
    entry.device = stream.device;
    entry.stream = stream.id;
    entry.number = task.index;
    entry.operation = launch.operation;
    entry.caller = caller;
    entry.with_host = launch.with_host;
    trace.add_with_accesses(entry, launch.accesses);
    if (hold >= 0) {
      holds[hold].state = Hold::kPending;
    }
  }
  if (!deferred) {
    run(lock, stream, std::move(task), false);
    return;
  }
  task.issued_us = schedule_->host_us();
  if (!schedules_launches()) {
    enqueue(stream, std::move(task));
    return;
  }
  schedule_->enqueued(stream, task, launch);
  enqueue(stream, std::move(task));
  advance(lock);
}

RecordingPointer Scheduler::record(Stream& stream) {
  HostCall call("record");
  Lock lock(mutex);
  return record_locked(stream);
}

RecordingPointer Scheduler::record_locked(Stream& stream) {
  auto recording = std::make_shared<Recording>();
  recording->stream = &stream;
  recording->repetition = repetition_;
  recording->number = counting_ ? ++events_ : 0;
  recording->clock = clock_;
  recording->completed_us = schedule_->host_us();
  if (counting_) {
    TraceEntry entry{TraceEntry::kRecord};
    entry.device = stream.device;
    entry.stream = stream.id;
    entry.number = recording->number;
    trace.add(entry);
  }
  settle(stream);
  if (stream.tasks.empty() && !stream.running) {
    complete(*recording);
  } else {
    enqueue(stream, Task{Task::kRecord, ++turns_, nullptr, -1, nullptr, recording});
  }
  return recording;
}

void Scheduler::fill_locked(Stream& stream, void* memory, int value, int64_t size_bytes) {
  static const auto* const name = intern("fill of freed memory");
  settle(stream);
  auto fill = std::make_unique<Fill>(memory, value, size_bytes);
  if (stream.tasks.empty() && !stream.running) {
    fill->run(); // takes no lock and needs no GIL
  } else {
    enqueue(stream, Task{Task::kLaunch, ++turns_, name, -1, std::move(fill), nullptr});
  }
}

void Scheduler::wait(Stream& stream, const RecordingPointer& recording) {
  HostCall call("wait");
  Lock lock(mutex);
  // Recordings from before the repetition are complete, so a wait for one orders nothing.
  if (counting_ && recording->number > 0 && recording->repetition == repetition_) {
    TraceEntry entry{TraceEntry::kWait};
    entry.device = stream.device;
    entry.stream = stream.id;
    entry.number = recording->number;
    trace.add(entry);
  }
  if (settled(*recording) || recording->stream == &stream) {
    return;
  }
  enqueue(stream, Task{Task::kWait, ++turns_, nullptr, -1, nullptr, recording});
}

void Scheduler::force_front(Lock& lock, Stream& stream, const Caller* forced_by) {
  auto* current = &stream;
  while (true) {
    if (runs_elsewhere(*current)) {
      wait_for_change(lock);
      return;
    }
    settle(*current);
    if (current->tasks.empty()) {
      return;
    }
    auto& front = current->tasks.front();
    if (front.kind != Task::kWait) {
      break;
    }
    current = front.recording->stream;
  }
  run_front(lock, *current, forced_by);
}

void Scheduler::run_front(Lock& lock, Stream& stream, const Caller* forced_by) {
  Task task = std::move(stream.tasks.front());
  stream.tasks.pop_front();
  if (task.hold >= 0 && forced_by && in_repetition_) {
    holds[task.hold].state = Hold::kForced;
    holds[task.hold].forced_by = *forced_by;
  }
  schedule_->starts(stream, task);
  if (!runs_at_once_ && in_repetition_ && task.index >= 0) {
    executed.push_back({stream.device, stream.id, task.index, schedule_->completed_us(stream)});
  }
  run(lock, stream, std::move(task), true);
}

bool Scheduler::step(Lock& lock, bool host_waits) {
  if (kernels_run_elsewhere()) {
    wait_for_change(lock);
    return true;
  }
  auto* chosen = choose(host_waits);
  if (!chosen) {
    return false;
  }
  run_front(lock, *chosen, nullptr);
  return true;
}

void Scheduler::advance(Lock& lock) {
  while (schedules_launches() && step(lock, false)) {
  }
}

void Scheduler::step_towards(Lock& lock, Stream& stream, const Caller& forced_by) {
  if (runs_at_once_ || kernels_of_this_thread > 0) {
    force_front(lock, stream, &forced_by);
  } else {
    TORCH_INTERNAL_ASSERT(step(lock, true), "A host waits, and nothing can run (scheduler.h, invariant 5).");
  }
}

void Scheduler::force_stream(Lock& lock, Stream& stream, uint64_t last_turn, const Caller& forced_by) {
  while (true) {
    settle(stream);
    bool running = runs_elsewhere(stream) && stream.running_turn <= last_turn;
    if (!running && (stream.tasks.empty() || stream.tasks.front().turn > last_turn)) {
      return;
    }
    step_towards(lock, stream, forced_by);
  }
}

Caller Scheduler::describe_sync() {
  return in_repetition_ ? describe_line() : Caller();
}

void Scheduler::synchronize_stream(Stream& stream) {
  HostCall call("synchronize stream");
  Caller caller = describe_sync();
  Lock lock(mutex);
  if (counting_) {
    TraceEntry entry{TraceEntry::kSyncStream};
    entry.device = stream.device;
    entry.stream = stream.id;
    trace.add(entry);
  }
  force_stream(lock, stream, turns_, caller);
  advance(lock);
}

void Scheduler::synchronize_recording(const RecordingPointer& recording) {
  HostCall call("synchronize event");
  Caller caller = describe_sync();
  Lock lock(mutex);
  if (counting_ && recording->number > 0 && recording->repetition == repetition_) {
    TraceEntry entry{TraceEntry::kSyncEvent};
    entry.number = recording->number;
    trace.add(entry);
  }
  while (!settled(*recording)) {
    step_towards(lock, *recording->stream, caller);
  }
  advance(lock);
}

void Scheduler::synchronize_device(c10::DeviceIndex device) {
  HostCall call("synchronize device");
  Caller caller = describe_sync();
  device = checked_device(device);
  Lock lock(mutex);
  if (counting_) {
    TraceEntry entry{TraceEntry::kSyncDevice};
    entry.device = device;
    trace.add(entry);
  }
  auto last_turn = turns_;
  if (pending_.empty() && running_ == 0) {
    return;
  }
  while (true) {
    // The oldest first, so that the order is that of submission wherever waits do not ask for another.
    Stream* oldest = nullptr;
    uint64_t oldest_turn = last_turn + 1;
    for (auto& stream : streams_) {
      if (stream.device != device) {
        continue;
      }
      settle(stream);
      uint64_t turn = runs_elsewhere(stream) ? stream.running_turn
          : stream.tasks.empty()             ? last_turn + 1
                                             : stream.tasks.front().turn;
      if (turn < oldest_turn) {
        oldest_turn = turn;
        oldest = &stream;
      }
    }
    if (!oldest) {
      advance(lock);
      return;
    }
    step_towards(lock, *oldest, caller);
  }
}

void Scheduler::ask(Lock& lock) {
  if (schedules_launches()) {
    schedule_->asked();
  }
  advance(lock);
}

bool Scheduler::is_served(int queries) const {
  return queries > kPatience && !(schedules_launches() && schedule_->moves_when_asked());
}

bool Scheduler::query_stream(Stream& stream) {
  HostCall call("query stream");
  Caller caller = describe_sync();
  Lock lock(mutex);
  ask(lock);
  settle(stream);
  bool complete = stream.tasks.empty() && !stream.running;
  if (!complete && is_served(++stream.queries)) {
    force_stream(lock, stream, turns_, caller);
    complete = true;
  }
  if (complete) {
    stream.queries = 0;
    if (counting_) { // the host has seen it complete: that orders as waiting for it does
      TraceEntry entry{TraceEntry::kSyncStream};
      entry.device = stream.device;
      entry.stream = stream.id;
      trace.add(entry);
    }
  }
  return complete;
}

bool Scheduler::query_recording(const RecordingPointer& recording) {
  HostCall call("query event");
  Caller caller = describe_sync();
  Lock lock(mutex);
  ask(lock);
  if (!settled(*recording)) {
    if (!is_served(++recording->queries)) {
      return false;
    }
    while (!settled(*recording)) {
      step_towards(lock, *recording->stream, caller);
    }
  }
  if (counting_ && recording->number > 0 && recording->repetition == repetition_) {
    TraceEntry entry{TraceEntry::kSyncEvent};
    entry.number = recording->number;
    trace.add(entry);
  }
  return true;
}

bool Scheduler::has_pending_work() const {
  return running_ > 0 || std::any_of(pending_.begin(), pending_.end(), [](Stream* s) { return !s->tasks.empty(); });
}

void Scheduler::begin_repetition(
    const std::vector<std::tuple<int64_t, int64_t, int64_t>>& wanted, bool serial) {
  Lock lock(mutex);
  TORCH_CHECK(!in_repetition_, "A repetition is running already; call finish_repetition first.");
  std::vector<Hold> checked;
  for (const auto& [device, id, index] : wanted) {
    TORCH_CHECK(device >= -1 && index >= 0, "A hold needs a device and an index from 0, not ", device, " and ", index, ".");
    if (device >= 0) { // else the stream that is meant does not exist
      stream(static_cast<c10::DeviceIndex>(device), id);
    }
    checked.push_back(Hold{static_cast<c10::DeviceIndex>(device), id, index});
  }
  TORCH_CHECK(
      runs_at_once_ || (checked.empty() && !serial),
      "Holds, and running one launch after another, need the schedule that runs launches in submission order.");
  complete_pending(lock);
  restart_schedule();
  for (auto& stream : streams_) {
    stream.launches = 0;
    stream.queries = 0;
    stream.holds.clear();
  }
  holds = std::move(checked);
  for (size_t number = 0; number < holds.size(); number++) {
    if (holds[number].device >= 0) {
      stream(holds[number].device, holds[number].stream).holds.push_back(static_cast<int>(number));
    }
  }
  trace.clear();
  Allocator::get().poison_freed();
  PinnedAllocator::get().poison_freed();
  repetition_++;
  events_ = 0;
  serial_ = serial;
  in_repetition_ = true;
  counting_ = true;
}

void Scheduler::set_preparing(bool preparing) {
  Lock lock(mutex);
  TORCH_CHECK(in_repetition_, "Only a repetition has inputs to prepare; call begin_repetition first.");
  counting_ = !preparing;
}

void Scheduler::complete_pending(Lock& lock) {
  while (has_pending_work()) {
    if (auto* chosen = choose(true)) {
      run_front(lock, *chosen, nullptr);
    } else {
      wait_for_change(lock);
    }
  }
  forget_pending();
}

void Scheduler::set_schedule(std::unique_ptr<Schedule> schedule) {
  Lock lock(mutex);
  TORCH_CHECK(!in_repetition_, "A repetition is running; call finish_repetition before setting another schedule.");
  complete_pending(lock);
  schedule_ = std::move(schedule);
  runs_at_once_ = schedule_->runs_at_once();
  restart_schedule();
}

void Scheduler::restart_schedule() {
  schedule_->restart();
  starts_++;
  clock_ = schedule_->has_clock() ? starts_ : 0;
  executed.clear();
}

std::vector<std::pair<std::string, double>> Scheduler::schedule_report() {
  Lock lock(mutex);
  return schedule_->report();
}

// Among the fronts that are launches, and not held or held no more, the schedule's choice; null if there is none, or another
// thread runs a kernel and only one may run.
Stream* Scheduler::choose(bool host_waits) {
  if (!runs_at_once_ && kernels_run_elsewhere()) {
    return nullptr;
  }
  ready_.clear();
  for (auto* stream : pending_) {
    settle(*stream);
    if (stream->running || stream->tasks.empty() || stream->tasks.front().kind != Task::kLaunch) {
      continue;
    }
    int hold = stream->tasks.front().hold;
    if (hold < 0 || !in_repetition_ || holds[hold].released) {
      ready_.push_back(stream);
    }
  }
  return ready_.empty() ? nullptr : schedule_->next(ready_, host_waits);
}

void Scheduler::finish_repetition() {
  Lock lock(mutex);
  TORCH_CHECK(in_repetition_, "No repetition is running; call begin_repetition first.");
  counting_ = false;
  serial_ = false;
  std::exception_ptr error;
  auto run_what_is_runnable = [&] {
    while (auto* chosen = choose(true)) {
      try {
        run_front(lock, *chosen, nullptr);
      } catch (...) {
        if (!error) {
          error = std::current_exception();
        }
      }
    }
  };
  for (auto& hold : holds) {
    hold.released = true;
    run_what_is_runnable();
  }
  run_what_is_runnable();
  while (has_pending_work()) { // another thread runs what the rest waits for
    wait_for_change(lock);
    run_what_is_runnable();
  }
  forget_pending();
  in_repetition_ = false;
  if (error) {
    std::rethrow_exception(error);
  }
}

} // namespace sidestream
