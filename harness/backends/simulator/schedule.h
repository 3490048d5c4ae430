// A schedule decides which of the launches that could run next does, and whether the host goes on enqueueing meanwhile. The
// queues and what must hold of them are the scheduler's (scheduler.h), which asks.
//
// All functions are called with the simulator's lock held, so a schedule needs no lock of its own.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace sidestream {

struct Launch;
struct Recording;
struct Stream;
struct Task;

class Schedule {
 public:
  virtual ~Schedule() = default;

  // Whether a launch that nothing keeps waiting runs inside the call that enqueues it. Under the other schedules every launch is
  // queued, and `next` says when it runs.
  virtual bool runs_at_once() const { return false; }

  // Forgets everything but the parameters: the next decision is the first.
  virtual void restart() {}

  // Who makes the next step: one of `ready`, the streams (at least one) whose front is a launch that may run; or null, which
  // means that the host goes on. A host that waits cannot go on, and null is no answer.
  virtual Stream* next(const std::vector<Stream*>& ready, bool host_waits) = 0;

  // The host has enqueued a launch.
  virtual void enqueued(Stream&, Task&, const Launch&) {}
  // A queued launch is about to run.
  virtual void starts(Stream&, const Task&) {}
  // A stream has come to a recording, or past a wait for one.
  virtual void recorded(Recording& recording);
  virtual void waited(Stream&, const Recording&) {}
  // The host asks whether something is complete.
  virtual void asked() {}
  // Whether a host that asks often enough sees everything become complete by that alone.
  virtual bool moves_when_asked() const { return false; }

  // Microseconds on the schedule's own clock, if it has one: the host's time, and when a stream is through with what it has run.
  virtual bool has_clock() const { return false; }
  virtual double host_us() const { return 0; }
  virtual double completed_us(const Stream&) const { return 0; }

  // What a user may want to know of the run so far, by name.
  virtual std::vector<std::pair<std::string, double>> report() const { return {}; }
};

} // namespace sidestream
