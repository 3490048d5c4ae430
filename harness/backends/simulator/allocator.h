// The caching allocator, after CUDA's: a block belongs to the stream that was current when it was allocated. Freed, it goes to
// that stream's free list of its size at once (last in, first out), whatever still uses it, unless `record_stream` marked it as
// used by other streams: then it comes back once recordings made on those streams at the time of the free are complete.
// Memory is never given back to the system while work that may touch it can be pending.
#pragma once

#include "scheduler.h"

#include <c10/core/Allocator.h>

#include <array>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace sidestream {

struct Block {
  void* memory;
  int64_t size_bytes; // rounded up to the size class
  Stream* owner;
  std::vector<Stream*> users; // other streams it was recorded on
  std::vector<int64_t> completed; // recordings that its reuse waited for
  uint64_t completed_in = 0; // the repetition that numbered them
  uint64_t numbered_in = 0; // see Trace
  int64_t number = 0;
  bool cached = false; // in a free list
  bool listed = false; // in the list of blocks to poison
};

class Allocator final : public c10::Allocator {
 public:
  static Allocator& get();

  // Memory for the current stream of the current device. Fresh memory is filled with 0xFF (a NaN in every floating-point type).
  c10::DataPtr allocate(size_t size_bytes) override;
  void copy_data(void* destination, const void* source, std::size_t count) const override;

  // The block under a storage; null for memory that is not from here.
  static Block* block_of(const c10::DataPtr& pointer);
  void record_stream(Block& block, Stream& stream);
  void free(Block& block);

  // Bytes of live blocks, rounded up to size classes as on CUDA.
  int64_t allocated_bytes(c10::DeviceIndex device);
  int64_t reserved_bytes(c10::DeviceIndex device);
  // Gives cached memory back to the system, unless work is pending.
  void empty_cache();
  // Fills blocks that were freed since the last call with 0xFF, so that nothing of the last repetition looks right by chance.
  // Only while nothing is pending, with the lock held.
  void poison_freed();

 private:
  struct Deferred {
    Block* block;
    std::vector<RecordingPointer> recordings;
  };
  std::vector<Block*>& free_list(const Block& block) { return free_[block.owner][block.size_bytes]; }
  void make_available(Block& block);
  void process_deferred();

  std::unordered_map<Stream*, std::unordered_map<int64_t, std::vector<Block*>>> free_;
  std::vector<Deferred> deferred_;
  std::vector<Block*> freed_; // since the last poison_freed
  std::array<int64_t, 8> allocated_{};
  std::array<int64_t, 8> reserved_{};
};

} // namespace sidestream
