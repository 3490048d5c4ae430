// What is known of the repetition that is running: its trace so far, the launches counted on each stream, and its
// holds.
//
// Locking: the mutex guards bookkeeping alone. It is never held while taking the GIL or calling into the device,
// since a thread that holds the GIL, or one inside the driver, may be waiting for the thread that waits here.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "device_memory.h"
#include "host_memory.h"
#include "origin.h"
#include "source_lines.h"
#include "stream_key.h"

namespace sidestream {

enum class EntryKind : uint8_t {
  Launch,
  Record,
  Wait,
  SyncStream,
  SyncEvent,
  SyncDevice,
  Host,
  Allocate,
  Free,
  RecordStream,
  Postponed, // a launch that comes later; not in the trace
};

struct Entry {
  EntryKind kind;
  StreamKey on{};
  int64_t number = 0; // of the launch on its stream, or of the recording
  const std::string* operation = nullptr;
  const std::string* node = nullptr;
  SourceLine line{};
  Bytes bytes{}; // handed out, given back or recorded on a stream
  std::vector<int64_t> recordings{}; // that an allocation waited for, or that the reuse of a freed block must wait for
  std::vector<AccessedBytes> accesses{}; // of a launch or of the host
  int64_t launch = -1; // the entry of the launch that this is part of
  int64_t mark = -1; // tells it from others wherever it is moved to; launches have none
  Origin origin{}; // of a launch
  bool with_host = false; // whether a launch copies from or to memory of the host
};

// A launch in the trace.
struct LaunchEntry {
  uint64_t repetition = 0;
  int64_t entry = -1;
  bool integers = false; // whether it takes integers, which may be indices
};

enum class HoldState : uint8_t { Missing, Undecided, Pending, Forced, Ran, Expired };

struct HoldOutcome {
  HoldState state;
  SourceLine line{};
};

// A set of holds, by their position in the plan.
class HoldSet {
 public:
  void add(size_t position);
  void add(const HoldSet& other);
  bool has(size_t position) const;
  bool is_within(const HoldSet& other) const;
  bool empty() const {
    return words_.empty();
  }

 private:
  std::vector<uint64_t> words_;
};

// What a launch has to do before it is enqueued.
struct LaunchTicket {
  LaunchEntry entry{};
  int64_t index = -1;
  int64_t hold = -1; // position in the plan, or -1
  HoldSet behind{}; // of a launch to hold: the holds that its stream is behind already
};

// A wait of the host: decides, before the host waits, whether each hold that it reaches is still pending.
class HostSync;

// A block that its owner may be given again at once.
struct FreedAtOnce {
  StreamKey owner;
  bool integers;
};

class Repetition {
 public:
  void begin(const std::vector<std::pair<StreamKey, int64_t>>& holds, bool serial, bool lines);
  // Decides the holds, stops tracing, synchronizes every device that was used, forgets nothing until the next begin.
  void finish();

  bool running() const {
    return running_.load(std::memory_order_acquire);
  }
  bool preparing() const {
    return preparing_.load(std::memory_order_relaxed) > 0;
  }
  bool serial() const {
    return serial_.load(std::memory_order_relaxed);
  }
  bool lines() const {
    return lines_.load(std::memory_order_relaxed);
  }
  void set_preparing(bool on);

  // `storages` are what the accesses are part of; `with_host` is whether it copies from or to memory of the host.
  LaunchTicket launch(
      StreamKey on,
      const std::string* operation,
      const std::string* node,
      SourceLine line,
      bool with_host,
      std::vector<AccessedBytes> accesses,
      const std::vector<TouchedStorage>& storages);
  // What it gave back, once it has returned. Memory that was handed out to a launch inside it is that launch's.
  void launch_returned(LaunchEntry launch, std::vector<AccessedBytes> accesses, const std::vector<TouchedStorage>& storages);
  // Takes back a launch, so that others come before it, if all it does to this memory is to read it: its operation saves an
  // argument, which it does before it enqueues anything.
  bool postpone(LaunchEntry launch, const Bytes& saved);
  // The launch comes now, and not when it was entered.
  LaunchTicket launch_postponed(LaunchEntry launch);
  void launch_held(size_t hold, void* event);
  // With gates: what is enqueued on the stream from now on is behind more holds than these. What is there already must have
  // run before more of them are opened than these.
  void mark_frontier(const c10::Stream& stream, HoldSet behind);
  // `to` continues after everything enqueued on `from`, by a wait that PyTorch's copy between devices issues below
  // the guard.
  void order_streams(StreamKey from, StreamKey to);

  void recorded(void* event, StreamKey on, bool traced);
  void waited(void* event, StreamKey on, bool traced);
  // By a thread that is not observed: what the event was before, at this address, is over.
  void recorded_unseen(void* event);

  // A caching allocator has handed out bytes to the current stream.
  void allocated(const Bytes& bytes, StreamKey owner, bool traced);
  // They have been given back. Returns their owner where the allocator reuses them at once, without waiting for anybody.
  std::optional<FreedAtOnce> freed(const Bytes& bytes, SourceLine line, bool traced);
  // record_stream of the memory that begins at this address, be it on the owner.
  void stream_recorded(c10::DeviceIndex device, const void* pointer, StreamKey on);
  // Somebody else listens to the allocators of a thread: then accesses cannot be judged and are left out.
  void note_unseen_memory();

  // A copy uses pinned memory of the host; an asynchronous one tells the pinned allocator of its stream.
  void copy_uses(const c10::Storage& storage, std::optional<StreamKey> asynchronous_on);
  // Whether a copy has used pinned memory. Takes no lock.
  bool knows_host_memory() const {
    return knows_host_memory_.load(std::memory_order_relaxed);
  }
  // Of what the host accesses, that which a copy has used.
  std::vector<AccessedBytes> used_by_copies(std::vector<AccessedBytes> accesses);
  // The host itself reads or writes such memory now.
  void host_accesses(
      const std::string* operation, const std::string* node, SourceLine line, std::vector<AccessedBytes> accesses);

  void mark_used(c10::DeviceIndex device);
  void synchronize_used_devices();
  // Those that launches, recordings and waits of this repetition went to. Not the whole device, which would wait for
  // the load as well.
  void synchronize_used_streams();

  // The first error that an observer had to swallow; finish() raises it.
  void note_error(const std::string& sentence);

  const std::vector<Entry>& entries() const {
    return entries_;
  }
  std::vector<HoldOutcome> outcomes() const;

 private:
  friend class HostSync;

  struct Stream {
    int64_t launches = 0;
    HoldSet reached; // the holds that its next launch would run after
  };
  struct Recording {
    int64_t number; // 0: made while preparing, not in the trace
    HoldSet reached;
  };
  struct Frontier {
    void* event;
    HoldSet behind; // the holds that the work before the event is behind
  };
  struct Hold {
    StreamKey on;
    int64_t index;
    HoldState state = HoldState::Missing;
    void* event = nullptr; // null until the hold has been enqueued
    bool seen_pending = false; // by a query of the body
    SourceLine line{};
  };

  // Whether each hold in `positions` is pending, asked of the device without the mutex.
  std::vector<bool> ask_pending(const std::vector<size_t>& positions);
  // With gates: opens these one after the other, in the order of the plan, each once all that is not behind a closed gate has
  // run. Called without the mutex.
  void open_gates(const std::vector<size_t>& positions);
  // Returns once all work that is not behind a closed gate has run, or the time of the gates is up.
  void let_others_run();
  // The state of a hold, by whether it is pending now; that proves `proved`, unless the gates' time was up.
  static HoldState decide(bool pending, HoldState proved);
  // All of these expect the mutex to be held.
  LaunchTicket enter_launch(Entry entry);
  void touch(const std::vector<TouchedStorage>& storages);
  Entry& append(Entry entry);
  int64_t record(StreamKey on);
  std::optional<FreedAtOnce> give_back(LiveBlock block, SourceLine line, bool traced);
  // Enters what the host has given up. Later than it did, but before anybody uses the memory again.
  void give_back_host_memory();
  void arrange();

  std::atomic<bool> running_{false};
  std::atomic<int> preparing_{0};
  std::atomic<bool> serial_{false};
  std::atomic<bool> lines_{false};
  std::atomic<uint64_t> used_devices_{0};
  std::atomic<size_t> undecided_{0};

  mutable std::mutex mutex_;
  std::vector<Entry> entries_;
  std::unordered_map<StreamKey, Stream, StreamKeyHash> streams_;
  std::unordered_map<void*, Recording> recordings_;
  std::vector<Hold> holds_;
  std::vector<Frontier> frontiers_;
  int64_t recordings_made_ = 0;
  int64_t marks_ = 0;
  uint64_t number_ = 0; // of the repetition in this process
  DeviceMemory memory_; // the host's as well, once a copy has used it
  HostMemory host_memory_;
  std::atomic<bool> knows_host_memory_{false};
  std::vector<Bytes> storages_; // that accesses are part of
  bool memory_is_seen_ = true;
  std::string error_;
};

Repetition& repetition();

// The mark of the entry that this thread added to the trace last, or -1; forgets it.
int64_t take_last_entry();

class HostSync {
 public:
  static HostSync of_stream(StreamKey stream, bool traced);
  static HostSync of_event(void* event, bool traced);
  static HostSync of_device(c10::DeviceIndex device, bool traced);

  // Before the host waits.
  void begin();
  // After it has waited.
  void end();
  // Instead of both: the host asked, without waiting, whether the work was complete.
  void asked(bool complete);

 private:
  HostSync(EntryKind kind, StreamKey on, bool traced) : kind_(kind), on_(on), traced_(traced) {}

  EntryKind kind_;
  StreamKey on_;
  bool traced_;
  void* event_ = nullptr;
  bool skip_ = false;
  std::vector<size_t> outlived_; // holds that the host does not wait for but that were pending when it began to
  SourceLine line_;

  void append_entry();
  // The holds whose state is still open: those that this wait reaches, and the others. Takes the mutex.
  void open_holds(std::vector<size_t>& reached, std::vector<size_t>& others);
};

} // namespace sidestream
