// The order in which the threads of the host call the simulator, recorded and replayed. With two devices the autograd engine has two
// threads that enqueue, and which of them is first differs from run to run.
//
// While an order is recorded or replayed, one thread of the program runs at a time. A call of the simulator, and the begin and the end
// of each autograd node, begins only when every other thread of the program is stopped: waiting for its own turn, or asleep. So what
// a thread does between two calls, such as taking a node from its queue or putting one into another's, is in the same order as the
// calls. A thread that is woken is runnable for the system from then on, which is how one that is about to take a node is told from one
// that has nothing to do. What is recorded is whose call came when. Between two calls of one thread another gets its turn only if the
// first has gone to sleep.
//
// Threads are named by what they are and not by their ids: `m` is the one that started the recording, `d0` and `d1` are the engine's
// device threads, `t1`, `t2`, ... are others by their first call; the program need not stand still for these.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace sidestream {

class HostOrder {
 public:
  struct Segment {
    std::string thread;
    int64_t calls;
  };

  static HostOrder& get();
  static bool active() { return active_.load(std::memory_order_relaxed); }

  // What `start` does from here on: nothing, record, or replay this order, whose calls must have this checksum.
  void switch_off();
  void record_next();
  void replay_next(std::vector<Segment> order, uint32_t checksum);

  // The calling thread becomes `m`.
  void start();
  // Ends the recording or the replay. Throws if the program did not fit the order and no call has thrown that already.
  void stop();
  // What has been recorded or replayed since `start`.
  std::pair<std::vector<Segment>, uint32_t> made() const;

  struct Thread;
  // A call begins; it waits for its turn. Throws, unless `quiet`, if the program does not fit the order.
  void enter(const char* kind, const std::string& operation, bool quiet);
  void leave();

 private:
  HostOrder();
  enum Mode : uint8_t { kOff, kRecord, kReplay };

  // Lets whoever waits for a turn go on without.
  void end_turns(std::unique_lock<std::mutex>& lock);
  Thread& this_thread();
  Thread& add_thread(std::string name, int64_t id);
  void find_device_threads();
  bool others_are_stopped(const Thread& me);
  bool may_go(const Thread& me, bool others_stopped);
  void begin(Thread& me, const char* kind, const std::string& operation);
  std::string misfit(const Thread& me, const char* kind, const std::string& operation) const;
  const Segment* expected() const;

  static std::atomic<bool> active_;
  mutable std::mutex mutex_; // never held with the simulator's lock, nor while the GIL is taken or given up
  std::condition_variable changed_;
  Mode mode_ = kOff;
  uint64_t callback_ = 0; // of the begins and ends of autograd nodes
  std::vector<std::unique_ptr<Thread>> threads_;
  Thread* last_ = nullptr; // made the last call
  std::vector<Segment> order_;
  uint32_t wanted_checksum_ = 0;
  size_t segment_ = 0; // of `order_`
  int64_t segment_calls_ = 0; // made of it
  std::vector<Segment> made_;
  uint32_t checksum_ = 0;
  int64_t calls_ = 0;
  std::string failure_; // empty while the program fits the order
  bool told_ = false; // the failure, by an exception
};

// A call of the simulator, for as long as it lasts.
class HostCall {
 public:
  explicit HostCall(const char* kind, const std::string& operation = {}) : active_(HostOrder::active()) {
    if (active_) {
      HostOrder::get().enter(kind, operation, false);
    }
  }
  ~HostCall() {
    if (active_) {
      HostOrder::get().leave();
    }
  }
  HostCall(const HostCall&) = delete;
  HostCall& operator=(const HostCall&) = delete;

 private:
  const bool active_;
};

} // namespace sidestream
