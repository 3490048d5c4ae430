// The caching allocator, after CUDA's: a block belongs to the stream that was current when it was allocated. Freed, it goes to
// that stream's free list of its size at once (last in, first out), whatever still uses it, unless `record_stream` marked it as
// used by other streams: then it comes back once recordings made on those streams at the time of the free are complete.
// Memory is never given back to the system while work that may touch it can be pending.
#pragma once

#include "cached_blocks.h"
#include "streams.h"
#include "torch_versions.h"

#include <c10/core/Allocator.h>

#include <array>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace sidestream {

struct Block : CachedBlock { // its users are the other streams it was recorded on
  Stream* owner;
};

// Bytes, counted as torch.cuda.memory_stats counts them.
struct ByteCount {
  int64_t current = 0;
  int64_t peak = 0;
  int64_t allocated = 0; // in all
  int64_t freed = 0; // in all

  void increase(int64_t size_bytes);
  void decrease(int64_t size_bytes);
};

struct MemoryStatistics {
  ByteCount allocated; // live blocks, rounded up to size classes as on CUDA
  ByteCount active; // live blocks, and freed ones that wait for streams that they were recorded on
  ByteCount reserved; // all blocks
};

// Free and total bytes of the memory that both devices are made of: the host's.
std::pair<size_t, size_t> memory_info();

class Allocator final : public DeviceAllocatorInterface {
 public:
  static Allocator& get();

  // Memory for the current stream of the current device. Fresh memory is filled with 0xFF (a NaN in every floating-point type).
  c10::DataPtr allocate(size_t size_bytes) override;
  void copy_data(void* destination, const void* source, std::size_t count) const override;

  // The block under a storage; null for memory that is not from here.
  static Block* block_of(const c10::DataPtr& pointer);
  void record_stream(Block& block, Stream& stream);
  void free(Block& block);

  // From here on, a block that is freed in a repetition and reused at once is filled with 0xFF on its stream, as whoever is given
  // it next might write it: so whoever still reads it on another stream, in no order with the free, can see that.
  void set_poisoning(bool on);

  MemoryStatistics statistics(c10::DeviceIndex device);
  void reset_accumulated_statistics(c10::DeviceIndex device);
  void reset_peak_statistics(c10::DeviceIndex device);
  // Gives cached memory back to the system. Waits for all work first, as cudaFree does, if there is any memory to give back.
  void empty_cache();
  // Fills blocks that were freed since the last call with 0xFF, so that nothing of the last repetition looks right by chance.
  // Only while nothing is pending, with the lock held.
  void poison_freed();

#ifdef SIDESTREAM_HAS_DEVICE_ALLOCATOR
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { empty_cache(); }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex device) override { reset_accumulated_statistics(device); }
  void resetPeakStats(c10::DeviceIndex device) override { reset_peak_statistics(device); }
  // A virtual function of newer versions of torch alone, so not marked `override`.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) { return memory_info(); }
#endif

 private:
  struct Deferred {
    Block* block;
    std::vector<RecordingPointer> recordings;
  };
  std::vector<Block*>& free_list(const Block& block) { return free_[block.owner][block.size_bytes]; }
  void make_available(Block& block);
  // Tells the thread's profiler, if it has one (c10/core/Allocator.h), with the lock held, as CUDA's allocator does.
  void report(const Block& block, int64_t change_bytes) const;
  void process_deferred();
  bool has_cached_blocks() const;

  std::unordered_map<Stream*, std::unordered_map<int64_t, std::vector<Block*>>> free_;
  std::vector<Deferred> deferred_;
  FreedBlocks freed_;
  std::array<MemoryStatistics, kDevices> statistics_{};
  bool poisons_ = false;
};

} // namespace sidestream
