#include "repetition.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <tuple>
#include <utility>

#include "device.h"
#include "gates.h"
#include "thread_state.h"

namespace sidestream {
namespace {

thread_local int64_t last_entry = -1; // its mark

constexpr int kImpatient = 100; // about how often one can ask in the time that a small kernel takes
constexpr auto kPause = std::chrono::microseconds(50);

c10::Stream as_stream(StreamKey key) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(device_guard()->type(), key.device), key.stream);
}

} // namespace

int64_t take_last_entry() {
  const auto last = last_entry;
  last_entry = -1;
  return last;
}

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

bool HoldSet::is_within(const HoldSet& other) const {
  for (size_t i = 0; i < words_.size(); ++i) {
    if ((words_[i] & ~(i < other.words_.size() ? other.words_[i] : 0)) != 0) {
      return false;
    }
  }
  return true;
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
  marks_ = 0;
  ++number_;
  memory_.clear();
  host_memory_.clear();
  knows_host_memory_ = false;
  storages_.clear();
  memory_is_seen_ = true;
  error_.clear();
  frontiers_.clear();
  if (gates().in_use()) {
    gates().begin(holds.size());
  }
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
  if (gates().in_use() && !open.empty()) {
    let_others_run();
  }
  const auto pending = ask_pending(open);
  std::string error;
  {
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < open.size(); ++i) {
      auto& hold = holds_[open[i]];
      if (hold.state == HoldState::Undecided) {
        hold.state = decide(pending[i], HoldState::Pending);
      }
    }
    undecided_ = 0;
    running_ = false;
    preparing_ = 0;
    arrange();
    host_memory_.clear();
    knows_host_memory_ = false;
    error = error_;
  }
  if (gates().in_use()) {
    open_gates(open);
    gates().open_all(); // also for a launch that a thread is making right now
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
    SourceLine line,
    bool with_host,
    std::vector<AccessedBytes> accesses,
    const std::vector<TouchedStorage>& storages) {
  const std::lock_guard lock(mutex_);
  give_back_host_memory();
  touch(storages);
  Entry entry{EntryKind::Launch, on};
  entry.operation = operation;
  entry.node = node;
  entry.line = line;
  entry.with_host = with_host;
  entry.origin = Origin::now();
  entry.accesses = std::move(accesses);
  return enter_launch(std::move(entry));
}

LaunchTicket Repetition::enter_launch(Entry entry) {
  auto& stream = streams_[entry.on];
  LaunchTicket ticket;
  ticket.index = entry.number = stream.launches++;
  for (size_t i = 0; i < holds_.size(); ++i) {
    auto& hold = holds_[i];
    if (hold.state == HoldState::Missing && hold.index == ticket.index && hold.on == entry.on) {
      hold.state = HoldState::Undecided;
      ticket.behind = stream.reached;
      stream.reached.add(i);
      ++undecided_;
      ticket.hold = static_cast<int64_t>(i);
      break;
    }
  }
  ticket.entry = {number_, static_cast<int64_t>(entries_.size())};
  entries_.push_back(std::move(entry));
  return ticket;
}

bool Repetition::postpone(LaunchEntry launch, const Bytes& saved) {
  const std::lock_guard lock(mutex_);
  if (!running() || launch.repetition != number_) {
    return false;
  }
  auto& entry = entries_[static_cast<size_t>(launch.entry)];
  auto& stream = streams_[entry.on];
  const auto of_saved = [&](const AccessedBytes& access) { return access.bytes.overlaps(saved); };
  const auto writes = [&](const AccessedBytes& access) { return access.write && of_saved(access); };
  if (entry.number + 1 != stream.launches || std::none_of(entry.accesses.begin(), entry.accesses.end(), of_saved) ||
      std::any_of(entry.accesses.begin(), entry.accesses.end(), writes)) {
    return false;
  }
  // A hold of this launch stays where it is: right before whatever is launched there next, which gets this number.
  --stream.launches;
  entry.kind = EntryKind::Postponed;
  return true;
}

LaunchTicket Repetition::launch_postponed(LaunchEntry launch) {
  const std::lock_guard lock(mutex_);
  if (!running() || launch.repetition != number_) {
    return {};
  }
  auto entry = std::move(entries_[static_cast<size_t>(launch.entry)]);
  entries_[static_cast<size_t>(launch.entry)] = Entry{EntryKind::Postponed, entry.on};
  entry.kind = EntryKind::Launch;
  return enter_launch(std::move(entry));
}

void Repetition::launch_returned(
    LaunchEntry launch,
    std::vector<AccessedBytes> accesses,
    const std::vector<TouchedStorage>& storages) {
  const std::lock_guard lock(mutex_);
  if (!running() || launch.repetition != number_) {
    return;
  }
  auto& known = entries_[static_cast<size_t>(launch.entry)].accesses;
  for (const auto& access : accesses) {
    const bool is_known = std::any_of(known.begin(), known.end(), [&](const AccessedBytes& other) {
      return other.write && other.bytes.device == access.bytes.device && other.bytes.start == access.bytes.start &&
          other.bytes.stop == access.bytes.stop;
    });
    const auto* const block = memory_.block_around(access.bytes.device, access.bytes.start);
    const bool is_of_nested = block != nullptr && block->entry > launch.entry &&
        entries_[static_cast<size_t>(block->entry)].launch != launch.entry;
    if (!is_known && !is_of_nested) {
      known.push_back(access);
    }
  }
  touch(storages);
}

void Repetition::touch(const std::vector<TouchedStorage>& storages) {
  for (const auto& storage : storages) {
    storages_.push_back(storage.bytes);
    if (storage.integers) {
      memory_.hold_integers(storage.bytes);
    }
  }
}

Entry& Repetition::append(Entry entry) {
  entry.mark = last_entry = ++marks_;
  const auto& launch = this_thread().launch;
  if (launch.repetition == number_) {
    entry.launch = launch.entry;
  }
  entries_.push_back(std::move(entry));
  return entries_.back();
}

int64_t Repetition::record(StreamKey on) {
  const auto number = ++recordings_made_;
  append(Entry{EntryKind::Record, on, number});
  return number;
}

void Repetition::launch_held(size_t hold, void* event) {
  const std::lock_guard lock(mutex_);
  if (hold < holds_.size()) {
    holds_[hold].event = event;
  }
}

void Repetition::order_streams(StreamKey from, StreamKey to) {
  bool grows = false;
  HoldSet behind;
  {
    const std::lock_guard lock(mutex_);
    const auto number = record(from);
    append(Entry{EntryKind::Wait, to, number});
    const HoldSet reached = streams_[from].reached;
    behind = streams_[to].reached;
    grows = !reached.is_within(behind);
    streams_[to].reached.add(reached);
  }
  if (grows) {
    mark_frontier(as_stream(to), std::move(behind));
  }
}

void Repetition::mark_frontier(const c10::Stream& stream, HoldSet behind) {
  if (!gates().in_use()) {
    return;
  }
  void* const event = record_event(stream);
  const std::lock_guard lock(mutex_);
  frontiers_.push_back({event, std::move(behind)});
}

void Repetition::recorded(void* event, StreamKey on, bool traced) {
  const std::lock_guard lock(mutex_);
  auto& recording = recordings_[event];
  recording.number = traced ? record(on) : 0;
  recording.reached = streams_[on].reached;
}

void Repetition::waited(void* event, StreamKey on, bool traced) {
  bool grows = false;
  HoldSet behind;
  {
    const std::lock_guard lock(mutex_);
    const auto found = recordings_.find(event);
    if (found == recordings_.end()) {
      return;
    }
    auto& stream = streams_[on];
    behind = stream.reached;
    grows = !found->second.reached.is_within(behind);
    stream.reached.add(found->second.reached);
    if (traced && found->second.number > 0) {
      append(Entry{EntryKind::Wait, on, found->second.number});
    }
  }
  if (grows) {
    mark_frontier(as_stream(on), std::move(behind));
  }
}

void Repetition::recorded_unseen(void* event) {
  const std::lock_guard lock(mutex_);
  recordings_.erase(event);
}

void Repetition::allocated(const Bytes& bytes, StreamKey owner, bool traced) {
  const std::lock_guard lock(mutex_);
  while (const auto* const missed = memory_.overlapping(bytes)) {
    // Given back by a thread that is not observed. The allocator has waited for whatever it had to wait for by now.
    give_back(memory_.take_back(missed->bytes), {}, traced);
  }
  LiveBlock block{bytes, owner};
  block.entry = traced ? static_cast<int64_t>(entries_.size()) : -1;
  auto waited_for = memory_.hand_out(block);
  if (traced) {
    Entry entry{EntryKind::Allocate, owner};
    entry.bytes = bytes;
    entry.recordings = std::move(waited_for);
    append(std::move(entry));
  }
}

std::optional<FreedAtOnce> Repetition::freed(const Bytes& bytes, SourceLine line, bool traced) {
  const std::lock_guard lock(mutex_);
  return give_back(memory_.take_back(bytes), line, traced);
}

std::optional<FreedAtOnce> Repetition::give_back(LiveBlock block, SourceLine line, bool traced) {
  std::vector<int64_t> recordings;
  bool reused_at_once = true;
  for (const auto& user : block.users) {
    if (block.owner.has_value() && user == *block.owner) {
      continue; // the allocator knows that its own stream is in order
    }
    reused_at_once = false;
    if (traced) {
      // Stays before the free, even if that happens inside an operation whose launch comes later.
      recordings.push_back(++recordings_made_);
      entries_.push_back(Entry{EntryKind::Record, user, recordings.back()});
    }
  }
  memory_.must_wait(block.bytes, recordings);
  if (!block.owner.has_value()) {
    // Which stream the free is a write on is not known, so it is none in the trace.
    return std::nullopt;
  }
  if (traced) {
    Entry entry{EntryKind::Free, *block.owner};
    entry.bytes = block.bytes;
    entry.recordings = std::move(recordings);
    entry.line = line;
    append(std::move(entry));
  }
  return reused_at_once ? std::optional(FreedAtOnce{*block.owner, block.integers}) : std::nullopt;
}

void Repetition::stream_recorded(c10::DeviceIndex device, const void* pointer, StreamKey on) {
  if (pointer == nullptr) {
    return;
  }
  const bool traced = !preparing();
  const std::lock_guard lock(mutex_);
  auto& block = memory_.block_at(device, reinterpret_cast<uint64_t>(pointer));
  block.add_user(on);
  if (traced) {
    Entry entry{EntryKind::RecordStream, on};
    entry.bytes = block.bytes;
    append(std::move(entry));
  }
}

void Repetition::copy_uses(const c10::Storage& storage, std::optional<StreamKey> asynchronous_on) {
  const std::lock_guard lock(mutex_);
  give_back_host_memory();
  const auto [bytes, is_new] = host_memory_.add(storage);
  if (is_new) {
    knows_host_memory_ = true;
    storages_.push_back(bytes);
    Entry entry{EntryKind::Allocate, kHost};
    entry.bytes = bytes;
    entry.recordings = memory_.hand_out(LiveBlock{bytes, kHost});
    append(std::move(entry));
  }
  if (asynchronous_on.has_value()) {
    memory_.block_at(kHost.device, bytes.start).add_user(*asynchronous_on);
  }
}

std::vector<AccessedBytes> Repetition::used_by_copies(std::vector<AccessedBytes> accesses) {
  const std::lock_guard lock(mutex_);
  give_back_host_memory();
  const auto is_unused = [&](const AccessedBytes& access) { return !host_memory_.knows(access.bytes); };
  accesses.erase(std::remove_if(accesses.begin(), accesses.end(), is_unused), accesses.end());
  return accesses;
}

void Repetition::host_accesses(
    const std::string* operation, const std::string* node, SourceLine line, std::vector<AccessedBytes> accesses) {
  const std::lock_guard lock(mutex_);
  give_back_host_memory();
  Entry entry{EntryKind::Host, kHost};
  entry.operation = operation;
  entry.node = node;
  entry.line = line;
  entry.accesses = std::move(accesses);
  append(std::move(entry));
}

void Repetition::give_back_host_memory() {
  if (!knows_host_memory()) {
    return;
  }
  for (const auto& bytes : host_memory_.take_given_up()) {
    give_back(memory_.take_back(bytes), {}, /*traced=*/true);
  }
}

void Repetition::note_unseen_memory() {
  const std::lock_guard lock(mutex_);
  memory_is_seen_ = false;
}

// Puts the entries in order and names the memory.
//
// A launch is entered when its operation begins, and what the operation allocates for it comes later: so it moves to behind
// its last allocation, and the recordings, waits and host synchronizations of the operation stay behind it.
void Repetition::arrange() {
  const auto of_memory = [](const Entry& entry) {
    return entry.kind == EntryKind::Allocate || entry.kind == EntryKind::Free || entry.kind == EntryKind::RecordStream;
  };
  if (!memory_is_seen_) {
    for (auto& entry : entries_) {
      entry.accesses.clear();
    }
    const auto is_left_out = [&](const Entry& entry) {
      return of_memory(entry) || entry.kind == EntryKind::Host || entry.kind == EntryKind::Postponed;
    };
    entries_.erase(std::remove_if(entries_.begin(), entries_.end(), is_left_out), entries_.end());
    return;
  }
  const auto count = entries_.size();
  std::vector<size_t> place(count); // behind which entry it stands
  bool moves = false;
  for (size_t i = 0; i < count; ++i) {
    place[i] = i;
    if (entries_[i].kind == EntryKind::Allocate && entries_[i].launch >= 0) {
      place[static_cast<size_t>(entries_[i].launch)] = i;
      moves = true;
    }
  }
  if (moves) {
    for (size_t i = 0; i < count; ++i) {
      if (!of_memory(entries_[i]) && entries_[i].launch >= 0) {
        place[i] = std::max(i, place[static_cast<size_t>(entries_[i].launch)]);
      }
    }
    std::vector<size_t> order(count);
    for (size_t i = 0; i < count; ++i) {
      order[i] = i;
    }
    std::sort(order.begin(), order.end(), [&](size_t one, size_t other) {
      // What has moved comes after the entry that it has moved behind.
      return std::make_tuple(place[one], place[one] != one, one) <
          std::make_tuple(place[other], place[other] != other, other);
    });
    std::vector<Entry> arranged;
    arranged.reserve(count);
    for (const auto i : order) {
      arranged.push_back(std::move(entries_[i]));
    }
    entries_ = std::move(arranged);
  }
  const auto is_postponed = [](const Entry& entry) { return entry.kind == EntryKind::Postponed; };
  entries_.erase(std::remove_if(entries_.begin(), entries_.end(), is_postponed), entries_.end());
  BlockNames names;
  for (const auto& storage : storages_) {
    names.add(storage);
  }
  for (const auto& entry : entries_) {
    if (of_memory(entry)) {
      names.add(entry.bytes);
    }
    for (const auto& access : entry.accesses) {
      names.add(access.bytes);
    }
  }
  names.join();
  for (auto& entry : entries_) {
    if (of_memory(entry)) {
      names.name(entry.bytes);
    }
    for (auto& access : entry.accesses) {
      names.name(access.bytes);
    }
  }
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
    device_guard()->synchronizeStream(as_stream(on));
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

HoldState Repetition::decide(bool pending, HoldState proved) {
  if (gates().in_use() && gates().expired()) {
    return HoldState::Expired;
  }
  return pending ? proved : HoldState::Ran;
}

void Repetition::open_gates(const std::vector<size_t>& positions) {
  for (const auto position : positions) {
    let_others_run();
    gates().open(position);
  }
}

void Repetition::let_others_run() {
  std::vector<void*> events;
  std::vector<StreamKey> streams;
  {
    const std::lock_guard lock(mutex_);
    HoldSet opened;
    for (size_t i = 0; i < holds_.size(); ++i) {
      if (gates().is_open(i)) {
        opened.add(i);
      }
    }
    for (const auto& frontier : frontiers_) {
      if (frontier.behind.is_within(opened)) {
        events.push_back(frontier.event);
      }
    }
    for (const auto& [on, stream] : streams_) {
      if (stream.reached.is_within(opened)) {
        streams.push_back(on);
      }
    }
  }
  const auto wait_until = [](const auto& is_complete) {
    for (int asked = 0; !gates().expired(); ++asked) {
      try {
        if (is_complete()) {
          return;
        }
      } catch (const std::exception&) {
        return; // the device is broken; the synchronization that follows says so
      }
      if (asked < kImpatient) {
        std::this_thread::yield();
      } else {
        std::this_thread::sleep_for(kPause);
      }
    }
  };
  for (auto* const event : events) {
    wait_until([event] { return device_guard()->queryEvent(event); });
  }
  for (const auto& on : streams) {
    wait_until([&on] { return device_guard()->queryStream(as_stream(on)); });
  }
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
    of.append(std::move(entry));
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
  {
    const std::lock_guard lock(of.mutex_);
    for (size_t i = 0; i < reached.size(); ++i) {
      auto& hold = of.holds_[reached[i]];
      if (hold.state == HoldState::Undecided) {
        hold.state = Repetition::decide(pending[i], HoldState::Forced);
        hold.line = hold.state == HoldState::Forced ? line_ : SourceLine{};
        --of.undecided_;
      }
    }
  }
  if (gates().in_use()) {
    of.open_gates(reached); // or the host would wait for good
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
      hold.state = Repetition::decide(true, HoldState::Forced);
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
  std::vector<size_t> to_open;
  {
    const std::lock_guard lock(of.mutex_);
    for (size_t i = 0; i < reached.size(); ++i) {
      auto& hold = of.holds_[reached[i]];
      if (hold.state != HoldState::Undecided) {
        continue;
      }
      if (complete) {
        hold.state = Repetition::decide(hold.seen_pending, HoldState::Forced);
        --of.undecided_;
      } else if (pending[i] && !hold.seen_pending) {
        // A loop that asks until the answer is yes waits for the hold, too.
        hold.seen_pending = true;
        hold.line = line;
      } else if (pending[i] && gates().in_use()) {
        // It asks again, and the answer would never be yes.
        hold.state = HoldState::Forced;
        --of.undecided_;
        to_open.push_back(reached[i]);
      }
    }
  }
  of.open_gates(to_open);
}

} // namespace sidestream
