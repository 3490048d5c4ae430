// Pinned host memory, after CUDA's caching host allocator (aten/src/ATen/core/CachingHostAllocator.h in PyTorch): sizes are rounded
// up to powers of two and blocks never split. An asynchronous copy marks the block as used by its stream. Freed, a block goes to the
// free list of its size (last in, first out) once recordings made on those streams at the time of the free are complete; blocks that
// wait for that are looked at in the order in which they were freed, when memory is asked for, up to the first that must still wait.
// Memory is never given back to the system, so a copy that outlives its block writes into a block and not into the heap.
#pragma once

#include "cached_blocks.h"

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

namespace sidestream {

struct PinnedBlock : CachedBlock { // its users are the streams whose copies it was recorded on
  int64_t awaited = 0; // recordings that must complete before it is free
};

class PinnedAllocator final : public c10::Allocator {
 public:
  static PinnedAllocator& get();

  // Fresh memory is filled with 0xFF, as on the device.
  c10::DataPtr allocate(size_t size_bytes) override;
  void copy_data(void* destination, const void* source, std::size_t count) const override;

  // The block that a pointer points into, whatever owns it: NumPy arrays over it count. Null for pageable memory.
  PinnedBlock* block_at(const void* pointer);
  // An asynchronous copy on the stream uses this memory. As CUDA's allocator does, it finds the block by the owner of the storage
  // or by the block's first byte; for any other pointer it does not know, and returns false.
  bool record_use(const c10::DataPtr& storage, const void* pointer, Stream& stream);
  void free(PinnedBlock& block);

  // Whether any block is in use. Does not take the lock.
  bool has_live_blocks() const { return live_ > 0; }
  // As the device allocator's, with the lock held.
  void poison_freed();

 private:
  void make_available(PinnedBlock& block);
  void process_recordings();

  std::map<const void*, PinnedBlock*> blocks_; // every block there ever was, by its first byte
  std::unordered_map<int64_t, std::vector<PinnedBlock*>> free_;
  std::deque<std::pair<RecordingPointer, PinnedBlock*>> recordings_;
  FreedBlocks freed_;
  std::atomic<int64_t> live_{0};
};

bool is_pinned(const void* pointer);

} // namespace sidestream
