// What the device's allocator and that of pinned memory have in common: blocks that go to a free list instead of back to the system,
// how they appear in the trace, and their poisoning. All functions expect the simulator's lock to be held.
#pragma once

#include "scheduler.h"

#include <c10/core/Device.h>

#include <cstdint>
#include <vector>

namespace sidestream {

constexpr int kPoison = 0xFF; // fills memory that nobody has written

struct CachedBlock : MemoryBlock {
  std::vector<Stream*> users = {}; // streams whose work must be complete before it is reused
  std::vector<int64_t> completed = {}; // recordings that its reuse waited for
  uint64_t completed_in = 0; // the repetition that numbered them
  bool cached = false; // in a free list
  bool listed = false; // in a list of freed blocks

  void add_user(Stream& stream);
};

// The block has been handed out. The device and the stream are those of its owner, -1 for the memory of the host.
void trace_allocation(CachedBlock& block, c10::DeviceIndex device, int64_t stream);

// `record_stream` was called for the block on a stream, be it the owner's.
void trace_record_stream(CachedBlock& block, const Stream& stream);

// The block has been given back: makes the recordings that its reuse must wait for, one on each user, and forgets the users.
std::vector<RecordingPointer> record_free(
    CachedBlock& block, c10::DeviceIndex device, int64_t stream, const Caller& caller);

// The blocks that were freed since the last poisoning.
class FreedBlocks {
 public:
  void add(CachedBlock& block);
  // Fills those that are in a free list with 0xFF; the others are in use again, or their reuse must still wait.
  void poison();

 private:
  std::vector<CachedBlock*> blocks_;
};

} // namespace sidestream
