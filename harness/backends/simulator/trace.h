// The trace of one repetition, as plain records. All functions expect the simulator's lock to be held (see scheduler.h).
#pragma once

#include "caller.h"

#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <vector>

namespace sidestream {

struct Block;

// Bytes of a block that a launch reads or writes.
struct Access {
  Block* block;
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
  enum Kind : uint8_t { kLaunch, kRecord, kWait, kSyncStream, kSyncEvent, kSyncDevice, kAllocate, kFree };
  Kind kind;
  c10::DeviceIndex device = 0;
  int64_t stream = 0;
  int64_t number = 0; // launch index, event, or block
  int64_t size_bytes = 0; // of an allocation
  const std::string* operation = nullptr;
  Caller caller = {};
  uint32_t first = 0; // accesses of a launch, events of an allocation or a free: [first, first + count)
  uint32_t count = 0;
};

class Trace {
 public:
  void clear();
  // A block's number in the trace, given out by first appearance.
  int64_t number_of(Block& block);
  void add(const TraceEntry& entry) { entries.push_back(entry); }
  void add_launch(TraceEntry entry, const std::vector<Access>& launch_accesses);
  void add_memory(TraceEntry entry, Block& block, const std::vector<int64_t>& memory_events);

  std::vector<TraceEntry> entries;
  std::vector<TracedAccess> accesses;
  std::vector<int64_t> events;

 private:
  uint64_t repetition_ = 1; // marks the blocks that were numbered in the current trace
  int64_t blocks_ = 0;
};

} // namespace sidestream
