// The trace of one repetition, as plain records. All functions expect the simulator's lock to be held (see scheduler.h).
#pragma once

#include "caller.h"

#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <vector>

namespace sidestream {

// Memory as the trace knows it: a block of a device's memory or of pinned host memory.
struct MemoryBlock {
  void* memory;
  int64_t size_bytes; // rounded up to the size class
  uint64_t numbered_in = 0; // see Trace
  int64_t number = 0;
};

// Bytes of a block that a launch or the host reads or writes.
struct Access {
  MemoryBlock* block;
  int64_t start;
  int64_t stop;
  bool write;
};

struct TracedAccess {
  int64_t block;
  int64_t start;
  int64_t stop;
  bool write;
};

struct TraceEntry {
  enum Kind : uint8_t { kLaunch, kRecord, kWait, kSyncStream, kSyncEvent, kSyncDevice, kAllocate, kFree, kRecordStream, kHost };
  Kind kind;
  c10::DeviceIndex device = 0; // -1 for the memory of the host
  int64_t stream = 0;
  int64_t number = 0; // launch index, event, or block
  int64_t size_bytes = 0; // of the block that is allocated, freed or recorded on a stream
  const std::string* operation = nullptr;
  Caller caller = {};
  bool with_host = false; // whether a launch copies from or to memory of the host
  uint32_t first = 0; // accesses of a launch or of the host, events of an allocation or a free: [first, first + count)
  uint32_t count = 0;
};

// The index of the entry that this thread added last, or -1; forgets it. Needs no lock.
int64_t take_last_entry();

class Trace {
 public:
  void clear();
  // A block's number in the trace, given out by first appearance.
  int64_t number_of(MemoryBlock& block);
  void add(const TraceEntry& entry);
  // A launch, or what the host does itself.
  void add_with_accesses(TraceEntry entry, const std::vector<Access>& entry_accesses);
  void add_memory(TraceEntry entry, MemoryBlock& block, const std::vector<int64_t>& memory_events);

  std::vector<TraceEntry> entries;
  std::vector<TracedAccess> accesses;
  std::vector<int64_t> events;

 private:
  uint64_t repetition_ = 1; // marks the blocks that were numbered in the current trace
  int64_t blocks_ = 0;
};

} // namespace sidestream
