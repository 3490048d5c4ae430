#include "host_order.h"

#include "python_frames.h"

#include <ATen/record_function.h>
#include <c10/util/Exception.h>

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>

namespace sidestream {
namespace {

constexpr auto kGlance = std::chrono::microseconds(100);
// Glances in a row at which a thread must be asleep to count as stopped: one that waits for the GIL or for a lock is so for a moment.
constexpr int kGlancesAsleep = 10;
constexpr int kGlancesAsleepAfterNode = 2;
// Glances after which a replay gives up if nobody runs, and if somebody runs but makes no call.
constexpr int kGlancesUntilMisfit = 10'000;
constexpr int kGlancesUntilTooLong = 200'000;

const std::string& no_operation() {
  static const auto& text = *new std::string();
  return text;
}

constexpr char kBeginOfNode[] = "begin";
constexpr char kEndOfNode[] = "end";
constexpr char kNodePrefix[] = "autograd::engine::evaluate_function: ";
constexpr char kDeviceThreadPrefix[] = "pt_autograd_";

// `d0` for the name of the engine's thread of device 0; empty for other names.
std::string name_of_device_thread(const char* system_name) {
  if (std::strncmp(system_name, kDeviceThreadPrefix, sizeof(kDeviceThreadPrefix) - 1) != 0) {
    return {};
  }
  const char* index = system_name + sizeof(kDeviceThreadPrefix) - 1;
  if (!*index || std::strspn(index, "0123456789") != std::strlen(index)) {
    return {};
  }
  return std::string("d") + index;
}

struct NodeMark : at::ObserverContext {};

bool is_node(const at::RecordFunction& function) {
  return std::strncmp(function.name(), kNodePrefix, sizeof(kNodePrefix) - 1) == 0;
}

std::unique_ptr<at::ObserverContext> on_operation_begin(const at::RecordFunction& function) {
  if (!HostOrder::active() || !is_node(function)) {
    return nullptr;
  }
  auto& order = HostOrder::get();
  order.enter(kBeginOfNode, function.name() + sizeof(kNodePrefix) - 1, true);
  order.leave();
  return std::make_unique<NodeMark>();
}

void on_operation_end(const at::RecordFunction&, at::ObserverContext* context) {
  if (context && HostOrder::active()) {
    auto& order = HostOrder::get();
    order.enter(kEndOfNode, no_operation(), true);
    order.leave();
  }
}

} // namespace

std::atomic<bool> HostOrder::active_{false};

struct HostOrder::Thread {
  std::string name;
  int64_t id;
  int state_file = -1;
  int depth = 0; // of calls within calls
  bool waiting = false; // for its turn
  bool inside = false; // a call
  bool after_node = false; // its last call was the end of a node
  int glances_asleep = 0; // in a row

  // Whether the thread is asleep: the letter after the name in its stat file, see proc(5).
  bool sleeps() const {
    char text[256];
    auto size = state_file < 0 ? -1 : pread(state_file, text, sizeof(text) - 1, 0);
    if (size <= 0) {
      return true; // it has ended
    }
    text[size] = 0;
    const char* after = std::strrchr(text, ')');
    return after && after[1] == ' ' && after[2] == 'S';
  }
};

HostOrder::HostOrder() = default;

HostOrder& HostOrder::get() {
  static auto& order = *new HostOrder(); // leaked: autograd threads may outlive static destructors
  return order;
}

HostOrder::Thread& HostOrder::add_thread(std::string name, int64_t id) {
  auto thread = std::make_unique<Thread>();
  thread->name = std::move(name);
  thread->id = id;
  auto path = "/proc/self/task/" + std::to_string(id) + "/stat";
  thread->state_file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  threads_.push_back(std::move(thread));
  return *threads_.back();
}

HostOrder::Thread& HostOrder::this_thread() {
  auto id = static_cast<int64_t>(syscall(SYS_gettid));
  int others = 0;
  for (auto& thread : threads_) {
    if (thread->id == id) {
      return *thread;
    }
    others += thread->name[0] == 't';
  }
  char system_name[16] = {};
  pthread_getname_np(pthread_self(), system_name, sizeof(system_name));
  auto name = name_of_device_thread(system_name);
  return add_thread(name.empty() ? "t" + std::to_string(others + 1) : name, id);
}

void HostOrder::find_device_threads() {
  DIR* folder = opendir("/proc/self/task");
  if (!folder) {
    return;
  }
  while (const auto* entry = readdir(folder)) {
    auto path = std::string("/proc/self/task/") + entry->d_name + "/comm";
    int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    char text[32] = {};
    auto size = file < 0 ? 0 : read(file, text, sizeof(text) - 1);
    if (file >= 0) {
      close(file);
    }
    if (size > 0) {
      text[std::strcspn(text, "\n")] = 0;
      auto name = name_of_device_thread(text);
      if (!name.empty()) {
        add_thread(name, std::atoll(entry->d_name));
      }
    }
  }
  closedir(folder);
}

void HostOrder::switch_off() {
  std::lock_guard<std::mutex> lock(mutex_);
  mode_ = kOff;
}

void HostOrder::record_next() {
  std::lock_guard<std::mutex> lock(mutex_);
  mode_ = kRecord;
}

void HostOrder::replay_next(std::vector<Segment> order, uint32_t checksum) {
  std::lock_guard<std::mutex> lock(mutex_);
  mode_ = kReplay;
  order_ = std::move(order);
  wanted_checksum_ = checksum;
}

void HostOrder::end_turns(std::unique_lock<std::mutex>& lock) {
  active_ = false;
  changed_.notify_all();
  auto waits = [](const std::unique_ptr<Thread>& thread) { return thread->waiting; };
  changed_.wait(lock, [&] { return std::none_of(threads_.begin(), threads_.end(), waits); });
}

std::pair<std::vector<HostOrder::Segment>, uint32_t> HostOrder::made() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return {made_, checksum_};
}

void HostOrder::start() {
  std::unique_lock<std::mutex> lock(mutex_);
  end_turns(lock);
  if (mode_ == kOff) {
    return;
  }
  for (auto& thread : threads_) {
    if (thread->state_file >= 0) {
      close(thread->state_file);
    }
  }
  threads_.clear();
  find_device_threads();
  last_ = &add_thread("m", static_cast<int64_t>(syscall(SYS_gettid)));
  segment_ = 0;
  segment_calls_ = 0;
  made_.clear();
  checksum_ = 2166136261u;
  calls_ = 0;
  failure_.clear();
  told_ = false;
  if (callback_ == 0) {
    callback_ = at::addGlobalCallback(at::RecordFunctionCallback(&on_operation_begin, &on_operation_end).scopes({at::RecordScope::FUNCTION}));
  }
  active_ = true;
}

void HostOrder::stop() {
  std::string message;
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!active_) {
      return;
    }
    end_turns(lock);
    if (callback_ != 0) {
      at::removeCallback(callback_);
      callback_ = 0;
    }
    if (!failure_.empty()) {
      message = told_ ? "" : failure_;
    } else if (mode_ == kReplay) {
      if (const auto* next = expected()) {
        message = "The program does not fit the recorded order of its host threads: it ended after " + std::to_string(calls_) +
            " calls, where a call of " + next->thread + " was to come.";
      } else if (checksum_ != wanted_checksum_) {
        message = "The program does not fit the recorded order of its host threads: its threads made as many calls in turn, but "
                  "not the same ones.";
      }
    }
  }
  TORCH_CHECK(message.empty(), message);
}

const HostOrder::Segment* HostOrder::expected() const {
  return segment_ < order_.size() ? &order_[segment_] : nullptr;
}

bool HostOrder::others_are_stopped(const Thread& me) {
  bool stopped = true;
  for (auto& thread : threads_) {
    if (thread.get() == &me || thread->waiting) {
      continue;
    }
    if (thread->inside) {
      stopped = false;
      continue;
    }
    if (thread->name[0] == 't') {
      continue;
    }
    if (!thread->sleeps()) {
      thread->glances_asleep = 0;
    } else if (thread->glances_asleep < kGlancesAsleep) {
      thread->glances_asleep++;
    }
    stopped = stopped && thread->glances_asleep >= (thread->after_node ? kGlancesAsleepAfterNode : kGlancesAsleep);
  }
  return stopped;
}

bool HostOrder::may_go(const Thread& me, bool others_stopped) {
  if (mode_ == kReplay) {
    const auto* next = expected();
    return others_stopped && next && next->thread == me.name;
  }
  return others_stopped && (last_ == &me || !last_->waiting);
}

void HostOrder::begin(Thread& me, const char* kind, const std::string& operation) {
  me.inside = true;
  last_ = &me;
  calls_++;
  if (mode_ == kReplay && ++segment_calls_ == order_[segment_].calls) {
    segment_++;
    segment_calls_ = 0;
  }
  if (made_.empty() || made_.back().thread != me.name) {
    made_.push_back({me.name, 0});
  }
  made_.back().calls++;
  // FNV-1a (Fowler, Noll and Vo) of the thread and of what it does.
  auto add = [this](const char* text) {
    for (; *text; text++) {
      checksum_ = (checksum_ ^ static_cast<uint8_t>(*text)) * 16777619u;
    }
    checksum_ = (checksum_ ^ '/') * 16777619u;
  };
  add(me.name.c_str());
  add(kind);
  add(operation.c_str());
}

std::string HostOrder::misfit(const Thread& me, const char* kind, const std::string& operation) const {
  const auto* next = expected();
  return "The program does not fit the recorded order of its host threads: after " + std::to_string(calls_) + " calls " +
      (next ? "a call of " + next->thread + " was to come" : "none was to come any more") + ", but " + me.name + " makes one (" +
      kind + (operation.empty() ? "" : " ") + operation + ").";
}

void HostOrder::enter(const char* kind, const std::string& operation, bool quiet) {
  std::string message;
  {
    WithoutGil without_gil; // other threads may need it to come to a stop
    std::unique_lock<std::mutex> lock(mutex_);
    auto& me = this_thread();
    if (me.depth++ > 0) {
      return;
    }
    me.waiting = true;
    me.after_node = std::strcmp(kind, kEndOfNode) == 0;
    me.glances_asleep = 0;
    changed_.notify_all();
    int glances = 0;
    auto calls_seen = calls_;
    while (active_ && failure_.empty()) {
      bool stopped = others_are_stopped(me);
      if (may_go(me, stopped)) {
        begin(me, kind, operation);
        break;
      }
      if (calls_ != calls_seen) {
        calls_seen = calls_;
        glances = 0;
      }
      glances++;
      if (mode_ == kReplay && glances > (stopped ? kGlancesUntilMisfit : kGlancesUntilTooLong)) {
        failure_ = misfit(me, kind, operation);
      } else if (glances > kGlancesUntilTooLong) {
        begin(me, kind, operation);
        break;
      }
      changed_.wait_for(lock, kGlance);
    }
    me.waiting = false;
    changed_.notify_all();
    if (active_ && !failure_.empty() && !told_ && !quiet) {
      told_ = true;
      message = failure_;
    }
  }
  if (!message.empty()) {
    leave();
    TORCH_CHECK(false, message);
  }
}

void HostOrder::leave() {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& me = this_thread();
  if (me.depth > 0 && --me.depth == 0) {
    me.inside = false;
    changed_.notify_all();
  }
}

} // namespace sidestream
