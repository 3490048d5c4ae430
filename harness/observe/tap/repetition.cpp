#include "repetition.h"

#include <stdexcept>

#include "device.h"

namespace sidestream {

void HoldSet::add(size_t position) {
  const size_t word = position / 64;
  if (words_.size() <= word) {
    words_.resize(word + 1);
  }
  words_[word] |= uint64_t{1} << (position % 64);
}

void HoldSet::add(const HoldSet& other) {
  if (words_.size() < other.words_.size()) {
    words_.resize(other.words_.size());
  }
  for (size_t i = 0; i < other.words_.size(); ++i) {
    words_[i] |= other.words_[i];
  }
}

bool HoldSet::has(size_t position) const {
  const size_t word = position / 64;
  return word < words_.size() && ((words_[word] >> (position % 64)) & 1) != 0;
}

Repetition& repetition() {
  static auto* const instance = new Repetition; // leaked: the engine's threads may outlive static objects
  return *instance;
}

void Repetition::begin(const std::vector<std::pair<StreamKey, int64_t>>& holds, bool serial, bool lines) {
  forget_forward_lines();
  const std::lock_guard lock(mutex_);
  entries_.clear();
  streams_.clear();
  recordings_.clear();
  recordings_made_ = 0;
  error_.clear();
  holds_.clear();
  for (const auto& [on, index] : holds) {
    holds_.push_back(Hold{on, index});
  }
  undecided_ = 0;
  used_devices_ = 0;
  preparing_ = 0;
  serial_ = serial;
  lines_ = lines;
  running_.store(true, std::memory_order_release);
}

void Repetition::finish() {
  std::vector<size_t> open;
  {
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < holds_.size(); ++i) {
      if (holds_[i].state == HoldState::Undecided) {
        open.push_back(i);
      }
    }
  }
  const auto pending = ask_pending(open);
  std::string error;
  {
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < open.size(); ++i) {
      auto& hold = holds_[open[i]];
      if (hold.state == HoldState::Undecided) {
        hold.state = pending[i] ? HoldState::Pending : HoldState::Ran;
      }
    }
    undecided_ = 0;
    running_ = false;
    preparing_ = 0;
    error = error_;
  }
  synchronize_used_streams();
  if (!error.empty()) {
    throw std::runtime_error(error);
  }
}

void Repetition::set_preparing(bool on) {
  if (on) {
    ++preparing_;
  } else if (preparing_ > 0) {
    --preparing_;
  }
}

LaunchTicket Repetition::launch(
    StreamKey on,
    const std::string* operation,
    const std::string* node,
    SourceLine line) {
  const std::lock_guard lock(mutex_);
  auto& stream = streams_[on];
  LaunchTicket ticket;
  ticket.index = stream.launches++;
  for (size_t i = 0; i < holds_.size(); ++i) {
    auto& hold = holds_[i];
    if (hold.state == HoldState::Missing && hold.index == ticket.index && hold.on == on) {
      hold.state = HoldState::Undecided;
      stream.reached.add(i);
      ++undecided_;
      ticket.hold = static_cast<int64_t>(i);
      break;
    }
  }
  Entry entry{EntryKind::Launch, on, ticket.index};
  entry.operation = operation;
  entry.node = node;
  entry.line = line;
  entries_.push_back(entry);
  return ticket;
}

void Repetition::launch_held(size_t hold, void* event) {
  const std::lock_guard lock(mutex_);
  if (hold < holds_.size()) {
    holds_[hold].event = event;
  }
}

void Repetition::order_streams(StreamKey from, StreamKey to) {
  const std::lock_guard lock(mutex_);
  const auto number = ++recordings_made_;
  entries_.push_back(Entry{EntryKind::Record, from, number});
  entries_.push_back(Entry{EntryKind::Wait, to, number});
  const HoldSet reached = streams_[from].reached;
  streams_[to].reached.add(reached);
}

void Repetition::recorded(void* event, StreamKey on, bool traced) {
  const std::lock_guard lock(mutex_);
  auto& recording = recordings_[event];
  recording.number = traced ? ++recordings_made_ : 0;
  recording.reached = streams_[on].reached;
  if (traced) {
    entries_.push_back(Entry{EntryKind::Record, on, recording.number});
  }
}

void Repetition::waited(void* event, StreamKey on, bool traced) {
  const std::lock_guard lock(mutex_);
  const auto found = recordings_.find(event);
  if (found == recordings_.end()) {
    return;
  }
  streams_[on].reached.add(found->second.reached);
  if (traced && found->second.number > 0) {
    entries_.push_back(Entry{EntryKind::Wait, on, found->second.number});
  }
}

void Repetition::recorded_unseen(void* event) {
  const std::lock_guard lock(mutex_);
  recordings_.erase(event);
}

void Repetition::mark_used(c10::DeviceIndex device) {
  if (device >= 0 && device < 64) {
    used_devices_.fetch_or(uint64_t{1} << device, std::memory_order_relaxed);
  }
}

void Repetition::synchronize_used_devices() {
  const auto used = used_devices_.load();
  for (c10::DeviceIndex device = 0; device < 64; ++device) {
    if (((used >> device) & 1) != 0) {
      device_guard()->synchronizeDevice(device);
    }
  }
}

void Repetition::synchronize_used_streams() {
  std::vector<StreamKey> used;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [on, stream] : streams_) {
      used.push_back(on);
    }
  }
  for (const auto& on : used) {
    const c10::Device device(device_guard()->type(), on.device);
    device_guard()->synchronizeStream(c10::Stream(c10::Stream::UNSAFE, device, on.stream));
  }
}

void Repetition::note_error(const std::string& sentence) {
  const std::lock_guard lock(mutex_);
  if (error_.empty()) {
    error_ = sentence;
  }
}

std::vector<HoldOutcome> Repetition::outcomes() const {
  const std::lock_guard lock(mutex_);
  std::vector<HoldOutcome> result;
  for (const auto& hold : holds_) {
    result.push_back({hold.state, hold.line});
  }
  return result;
}

std::vector<bool> Repetition::ask_pending(const std::vector<size_t>& positions) {
  std::vector<void*> events;
  {
    const std::lock_guard lock(mutex_);
    for (const auto position : positions) {
      events.push_back(holds_[position].event);
    }
  }
  std::vector<bool> pending;
  for (auto* const event : events) {
    if (event == nullptr) {
      pending.push_back(true); // another thread is enqueuing it right now
      continue;
    }
    try {
      pending.push_back(!device_guard()->queryEvent(event));
    } catch (const std::exception&) {
      pending.push_back(false); // the device is broken; the synchronization that follows says so
    }
  }
  return pending;
}

HostSync HostSync::of_stream(StreamKey stream, bool traced) {
  return HostSync(EntryKind::SyncStream, stream, traced);
}

HostSync HostSync::of_event(void* event, bool traced) {
  HostSync sync(EntryKind::SyncEvent, {-1, 0}, traced);
  sync.event_ = event;
  return sync;
}

HostSync HostSync::of_device(c10::DeviceIndex device, bool traced) {
  return HostSync(EntryKind::SyncDevice, {device, 0}, traced);
}

void HostSync::append_entry() {
  auto& of = repetition();
  const std::lock_guard lock(of.mutex_);
  Entry entry{kind_, on_};
  if (kind_ == EntryKind::SyncEvent) {
    const auto found = of.recordings_.find(event_);
    if (found == of.recordings_.end() || found->second.number == 0) {
      return; // recorded before the repetition, or never: it orders nothing
    }
    entry.number = found->second.number;
  }
  if (traced_) {
    of.entries_.push_back(entry);
  }
}

void HostSync::open_holds(std::vector<size_t>& reached, std::vector<size_t>& others) {
  auto& of = repetition();
  const std::lock_guard lock(of.mutex_);
  HoldSet set;
  if (kind_ == EntryKind::SyncEvent) {
    const auto found = of.recordings_.find(event_);
    if (found != of.recordings_.end()) {
      set = found->second.reached;
    }
  } else {
    for (const auto& [on, stream] : of.streams_) {
      if (on.device == on_.device && (kind_ == EntryKind::SyncDevice || on.stream == on_.stream)) {
        set.add(stream.reached);
      }
    }
  }
  for (size_t i = 0; i < of.holds_.size(); ++i) {
    if (of.holds_[i].state == HoldState::Undecided) {
      (set.has(i) ? reached : others).push_back(i);
    }
  }
}

void HostSync::begin() {
  auto& of = repetition();
  append_entry();
  if (of.undecided_.load(std::memory_order_relaxed) == 0) {
    return;
  }
  std::vector<size_t> reached;
  std::vector<size_t> others;
  open_holds(reached, others);
  const auto pending = of.ask_pending(reached);
  bool forces = false;
  for (const bool is_pending : pending) {
    forces = forces || is_pending;
  }
  if (forces) {
    line_ = current_line();
    const auto others_pending = of.ask_pending(others);
    for (size_t i = 0; i < others.size(); ++i) {
      if (others_pending[i]) {
        outlived_.push_back(others[i]);
      }
    }
  }
  const std::lock_guard lock(of.mutex_);
  for (size_t i = 0; i < reached.size(); ++i) {
    auto& hold = of.holds_[reached[i]];
    if (hold.state == HoldState::Undecided) {
      hold.state = pending[i] ? HoldState::Forced : HoldState::Ran;
      hold.line = pending[i] ? line_ : SourceLine{};
      --of.undecided_;
    }
  }
}

void HostSync::end() {
  if (outlived_.empty()) {
    return;
  }
  // The host waited for one hold; another one, that it does not wait for, was over meanwhile. It was pending when the
  // wait began, which proves it for all that had been enqueued by then, and no greater length of both would change
  // that.
  auto& of = repetition();
  const auto pending = of.ask_pending(outlived_);
  const std::lock_guard lock(of.mutex_);
  for (size_t i = 0; i < outlived_.size(); ++i) {
    auto& hold = of.holds_[outlived_[i]];
    if (!pending[i] && hold.state == HoldState::Undecided) {
      hold.state = HoldState::Forced;
      hold.line = line_;
      --of.undecided_;
    }
  }
}

void HostSync::asked(bool complete) {
  auto& of = repetition();
  if (complete) {
    append_entry();
  }
  if (of.undecided_.load(std::memory_order_relaxed) == 0) {
    return;
  }
  std::vector<size_t> reached;
  std::vector<size_t> others;
  open_holds(reached, others);
  if (reached.empty()) {
    return;
  }
  std::vector<bool> pending(reached.size(), false);
  SourceLine line;
  if (!complete) {
    pending = of.ask_pending(reached);
    line = current_line();
  }
  const std::lock_guard lock(of.mutex_);
  for (size_t i = 0; i < reached.size(); ++i) {
    auto& hold = of.holds_[reached[i]];
    if (hold.state != HoldState::Undecided) {
      continue;
    }
    if (!complete) {
      // A loop that asks until the answer is yes waits for the hold, too.
      if (pending[i] && !hold.seen_pending) {
        hold.seen_pending = true;
        hold.line = line;
      }
    } else {
      hold.state = hold.seen_pending ? HoldState::Forced : HoldState::Ran;
      --of.undecided_;
    }
  }
}

} // namespace sidestream
