// The scheduler: the queues of the streams, and what must hold of them whatever the order. Which launch runs when is asked of a
// schedule (schedule.h).
//
// A stream is a queue of tasks: launches, recordings and waits. Nothing runs by itself; tasks run on the thread of whoever
// enqueues them or waits for them.
//
// Invariants
//  1. A stream's launches run one at a time and in the order in which they were enqueued.
//  2. Under a schedule that runs launches at once, a launch that is not held runs inside `submit` if its stream has nothing
//     pending. Otherwise it is queued. Under other schedules every launch is queued, but those that prepare inputs.
//  3. Under a schedule that runs launches at once, a queued launch runs only when a host synchronization needs it
//     (`synchronize_*`), or in `finish_repetition`. Then only what the synchronization needs is run: the launch's own stream up
//     to it, and through incomplete waits, the streams that recorded what is waited for, up to the recording. Under other
//     schedules, the schedule chooses step after step among all launches that may run, after each launch that the host enqueues
//     and until what a host synchronization waits for is complete; one kernel runs at a time.
//  4. Recordings and waits cost nothing: at the front of an idle stream's queue a recording is complete, and a wait for a
//     complete recording is gone (`settle`). So the front is a launch, or a wait for an incomplete recording.
//  5. A wait binds to the recording that the event had when the wait was enqueued, which is older than the wait. Following
//     waits from a front therefore only leads to older tasks: there are no cycles, and two threads that force streams at the
//     same time cannot block each other.
//  6. `mutex` guards everything here, the trace and the allocator. It is never held while a kernel runs (the stream is marked
//     `running` instead), nor while the GIL is taken or given up. A thread that waits for a running stream gives up the GIL.
#pragma once

#include "caller.h"
#include "schedule.h"
#include "trace.h"

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

namespace sidestream {

struct Stream;

// One recording of an event. An event that is recorded again gets a new one.
struct Recording {
  Stream* stream;
  int64_t number; // in the trace, from 1; 0 outside a repetition
  uint64_t repetition;
  bool complete = false;
  int queries = 0; // that found it incomplete
  uint64_t clock; // of a schedule, or 0 for this host's own
  double completed_us = 0; // on that clock; while incomplete, the time at which it was enqueued
};
using RecordingPointer = std::shared_ptr<Recording>;

// What a launch does when it runs.
struct Work {
  virtual ~Work() = default;
  virtual void run() = 0;
  // Called once, before the launch is queued rather than run at once: copies what the host may change after enqueueing.
  virtual void stage() {}
};

struct Hold {
  enum State : uint8_t { kMissing, kPending, kForced, kRan };
  c10::DeviceIndex device;
  int64_t stream;
  int64_t index;
  State state = kMissing;
  bool released = false;
  Caller forced_by = {};
};

struct Launch {
  const std::string* operation;
  std::unique_ptr<Work> work; // may be null
  std::vector<Access> accesses;
  int64_t copied_bytes = 0; // between host and device, or between devices
  int64_t cycles = 0; // of a sleep
  bool with_host = false; // whether it copies from or to memory of the host
};

struct Task {
  enum Kind : uint8_t { kLaunch, kRecord, kWait };
  Kind kind;
  uint64_t turn; // in submission order
  const std::string* operation = nullptr;
  int64_t index = -1;
  std::unique_ptr<Work> work;
  RecordingPointer recording;
  int hold = -1; // number of the hold that keeps it
  double issued_us = 0; // when it was enqueued, and how long it takes, on the schedule's clock
  double duration_us = 0;
};

// A queued launch that has run, in the order in which they ran.
struct Executed {
  c10::DeviceIndex device;
  int64_t stream;
  int64_t index;
  double completed_us; // on the schedule's clock
};

struct Stream {
  c10::DeviceIndex device;
  int64_t id;
  std::deque<Task> tasks;
  bool running = false;
  std::thread::id runner;
  uint64_t running_turn = 0;
  int64_t launches = 0; // in this repetition
  int queries = 0; // that found work pending
  bool listed = false; // in the scheduler's list of streams with tasks
  std::vector<int> holds; // numbers of this repetition's holds on it
};

using Lock = std::unique_lock<std::mutex>;

class Scheduler {
 public:
  static Scheduler& get();

  Stream& stream(c10::DeviceIndex device, int64_t id);
  Stream& stream(const c10::Stream& stream) { return this->stream(stream.device_index(), stream.id()); }

  void submit(Stream& stream, Launch launch);
  RecordingPointer record(Stream& stream);
  void wait(Stream& stream, const RecordingPointer& recording);

  void synchronize_stream(Stream& stream);
  void synchronize_recording(const RecordingPointer& recording);
  void synchronize_device(c10::DeviceIndex device);
  // Whether all is complete. A host that asks again and again is served like one that waits.
  bool query_stream(Stream& stream);
  bool query_recording(const RecordingPointer& recording);

  void begin_repetition(const std::vector<std::tuple<int64_t, int64_t, int64_t>>& holds, bool serial);
  void set_preparing(bool preparing);
  // Leaves the trace and the outcomes of the holds for the caller to read until the next repetition begins. Throws the error of
  // the first deferred launch that failed, after everything has run.
  void finish_repetition();
  bool in_repetition() const { return in_repetition_; }

  // From here on this schedule decides; what is pending completes first, under the last one. Not in a repetition.
  void set_schedule(std::unique_ptr<Schedule> schedule);
  // What the schedule reports of the run so far.
  std::vector<std::pair<std::string, double>> schedule_report();

  // For the allocator and for callers that hold the lock.
  std::mutex mutex;
  bool traces() const { return counting_; }
  RecordingPointer record_locked(Stream& stream);
  // Enqueues on a stream that these bytes are filled: no launch of the program's, so neither counted, traced nor held.
  void fill_locked(Stream& stream, void* memory, int value, int64_t size_bytes);
  // Completes what has become complete, and says whether the recording is.
  bool settled(Recording& recording);
  bool has_pending_work() const;
  uint64_t repetition() const { return repetition_; }

  Trace trace;
  std::vector<Hold> holds;
  std::vector<Executed> executed; // in this repetition, unless the schedule runs launches at once

 private:
  Scheduler();

  void wait_for_change(Lock& lock);
  bool runs_elsewhere(const Stream& stream) const;
  bool kernels_run_elsewhere() const;
  // Whether the schedule decides when a launch that is enqueued now runs.
  bool schedules_launches() const;
  void settle(Stream& stream);
  void enqueue(Stream& stream, Task task);
  void forget_pending();
  // Runs one launch that the stream's front needs, or waits for a thread that is running one.
  void force_front(Lock& lock, Stream& stream, const Caller* forced_by);
  void force_stream(Lock& lock, Stream& stream, uint64_t last_turn, const Caller& forced_by);
  // Lets the schedule make one step; says whether it was one, and not that the host goes on.
  bool step(Lock& lock, bool host_waits);
  // The steps that the schedule makes before the host goes on.
  void advance(Lock& lock);
  void ask(Lock& lock);
  // Whether a host that has asked so often for something incomplete is served like one that waits for it.
  bool is_served(int queries) const;
  // One step of a host that waits for what the front of the stream needs.
  void step_towards(Lock& lock, Stream& stream, const Caller& forced_by);
  void run_front(Lock& lock, Stream& stream, const Caller* forced_by);
  void run(Lock& lock, Stream& stream, Task task, bool deferred);
  void complete_pending(Lock& lock);
  void restart_schedule();
  void complete(Recording& recording);
  Stream* choose(bool host_waits);
  Caller describe_sync();

  std::vector<Stream> streams_; // never resized
  std::vector<Stream*> pending_; // the streams that may have tasks
  std::vector<Stream*> ready_; // scratch of `choose`
  std::unique_ptr<Schedule> schedule_;
  bool runs_at_once_ = true; // what the schedule says
  uint64_t starts_ = 0; // of schedules
  uint64_t clock_ = 0; // for recordings
  std::atomic<bool> counting_{false}; // in a repetition and not preparing
  std::atomic<bool> in_repetition_{false};
  bool serial_ = false;
  int running_ = 0;
  uint64_t repetition_ = 0;
  uint64_t turns_ = 0;
  int64_t events_ = 0;
  uint64_t changes_ = 0; // counts launches that ended
  struct Changed;
  std::unique_ptr<Changed> changed_;
};

} // namespace sidestream
