#include "allocator.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include <unistd.h>

namespace sidestream {
namespace {

constexpr int64_t kSizeClass = 512;
constexpr size_t kAlignment = 512; // as on CUDA

void free_context(void* context) {
  Allocator::get().free(*static_cast<Block*>(context));
}

} // namespace

void ByteCount::increase(int64_t size_bytes) {
  current += size_bytes;
  peak = std::max(peak, current);
  allocated += size_bytes;
}

void ByteCount::decrease(int64_t size_bytes) {
  current -= size_bytes;
  freed += size_bytes;
}

std::pair<size_t, size_t> memory_info() {
  auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return {page * static_cast<size_t>(sysconf(_SC_AVPHYS_PAGES)), page * static_cast<size_t>(sysconf(_SC_PHYS_PAGES))};
}

Allocator& Allocator::get() {
  static auto& allocator = *new Allocator(); // leaked: storages may outlive static destructors
  return allocator;
}

c10::DataPtr Allocator::allocate(size_t size_bytes) {
  auto device = current_device();
  c10::Device device_of_pointer(c10::kPrivateUse1, device);
  if (size_bytes == 0) {
    return {nullptr, nullptr, &c10::detail::deleteNothing, device_of_pointer};
  }
  auto rounded = (static_cast<int64_t>(size_bytes) + kSizeClass - 1) / kSizeClass * kSizeClass;
  auto& scheduler = Scheduler::get();
  auto& owner = scheduler.stream(device, current_stream(device));
  Lock lock(scheduler.mutex);
  process_deferred();
  Block* block = nullptr;
  auto& list = free_[&owner][rounded];
  if (!list.empty()) {
    block = list.back();
    list.pop_back();
    block->cached = false;
    if (poisons_ && scheduler.traces()) {
      scheduler.fill_locked(owner, block->memory, kPoison, rounded);
    }
  } else {
    void* memory = std::aligned_alloc(kAlignment, static_cast<size_t>(rounded));
    TORCH_CHECK_WITH(
        OutOfMemoryError, memory, "The simulated accelerator found no host memory for a block of ", rounded, " bytes.");
    std::memset(memory, kPoison, static_cast<size_t>(rounded));
    block = new Block{{{memory, rounded}}, &owner};
    statistics_[device].reserved.increase(rounded);
  }
  statistics_[device].allocated.increase(rounded);
  statistics_[device].active.increase(rounded);
  trace_allocation(*block, owner.device, owner.id);
  report(*block, rounded);
  return {block->memory, block, &free_context, device_of_pointer};
}

void Allocator::copy_data(void* destination, const void* source, std::size_t count) const {
  std::memcpy(destination, source, count);
}

Block* Allocator::block_of(const c10::DataPtr& pointer) {
  return pointer.get_deleter() == &free_context ? static_cast<Block*>(pointer.get_context()) : nullptr;
}

void Allocator::record_stream(Block& block, Stream& stream) {
  Lock lock(Scheduler::get().mutex);
  trace_record_stream(block, stream);
  if (&stream != block.owner) {
    block.add_user(stream);
  }
}

void Allocator::free(Block& block) {
  auto& scheduler = Scheduler::get();
  Caller caller;
  if (scheduler.traces()) {
    caller = describe_line();
  }
  Lock lock(scheduler.mutex);
  statistics_[block.owner->device].allocated.decrease(block.size_bytes);
  auto recordings = record_free(block, block.owner->device, block.owner->id, caller);
  report(block, -block.size_bytes);
  freed_.add(block);
  if (poisons_ && recordings.empty() && scheduler.in_repetition()) {
    scheduler.fill_locked(*block.owner, block.memory, kPoison, block.size_bytes);
  }
  if (recordings.empty()) {
    make_available(block);
  } else {
    deferred_.push_back({&block, std::move(recordings)});
  }
}

void Allocator::report(const Block& block, int64_t change_bytes) const {
  const auto device = block.owner->device;
  const auto& statistics = statistics_[device];
  c10::reportMemoryUsageToProfiler(
      block.memory, change_bytes, static_cast<size_t>(statistics.allocated.current),
      static_cast<size_t>(statistics.reserved.current), c10::Device(c10::kPrivateUse1, device));
}

void Allocator::set_poisoning(bool on) {
  Lock lock(Scheduler::get().mutex);
  poisons_ = on;
}

void Allocator::make_available(Block& block) {
  block.cached = true;
  statistics_[block.owner->device].active.decrease(block.size_bytes);
  free_list(block).push_back(&block);
}

void Allocator::process_deferred() {
  for (size_t i = 0; i < deferred_.size();) {
    auto& recordings = deferred_[i].recordings;
    bool complete = std::all_of(recordings.begin(), recordings.end(), [](const RecordingPointer& recording) {
      return Scheduler::get().settled(*recording);
    });
    if (complete) {
      make_available(*deferred_[i].block);
      deferred_.erase(deferred_.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      i++;
    }
  }
}

MemoryStatistics Allocator::statistics(c10::DeviceIndex device) {
  Lock lock(Scheduler::get().mutex);
  return statistics_[checked_device(device)];
}

void Allocator::reset_accumulated_statistics(c10::DeviceIndex device) {
  Lock lock(Scheduler::get().mutex);
  auto& statistics = statistics_[checked_device(device)];
  for (auto* count : {&statistics.allocated, &statistics.active, &statistics.reserved}) {
    count->allocated = 0;
    count->freed = 0;
  }
}

void Allocator::reset_peak_statistics(c10::DeviceIndex device) {
  Lock lock(Scheduler::get().mutex);
  auto& statistics = statistics_[checked_device(device)];
  for (auto* count : {&statistics.allocated, &statistics.active, &statistics.reserved}) {
    count->peak = count->current;
  }
}

bool Allocator::has_cached_blocks() const {
  return !deferred_.empty() || std::any_of(free_.begin(), free_.end(), [](const auto& lists) {
    return std::any_of(lists.second.begin(), lists.second.end(), [](const auto& list) { return !list.second.empty(); });
  });
}

void Allocator::empty_cache() {
  auto& scheduler = Scheduler::get();
  {
    Lock lock(scheduler.mutex);
    if (!has_cached_blocks()) {
      return;
    }
  }
  for (c10::DeviceIndex device = 0; device < kDevices; device++) {
    scheduler.synchronize_device(device);
  }
  Lock lock(scheduler.mutex);
  if (scheduler.has_pending_work()) {
    return; // of another thread, which may still touch what is cached
  }
  poison_freed();
  for (auto& [stream, lists] : free_) {
    for (auto& [size_bytes, blocks] : lists) {
      for (auto* block : blocks) {
        statistics_[stream->device].reserved.decrease(block->size_bytes);
        std::free(block->memory);
        delete block;
      }
    }
  }
  free_.clear();
}

void Allocator::poison_freed() {
  process_deferred();
  freed_.poison();
}

#ifdef SIDESTREAM_HAS_DEVICE_ALLOCATOR
void Allocator::recordStream(const c10::DataPtr& pointer, c10::Stream stream) {
  if (auto* block = block_of(pointer)) {
    record_stream(*block, Scheduler::get().stream(stream));
  }
}

c10::CachingDeviceAllocator::DeviceStats Allocator::getDeviceStats(c10::DeviceIndex device) {
  auto counted = statistics(device);
  c10::CachingDeviceAllocator::DeviceStats stats;
  for (auto [count, stat] :
       {std::pair(&counted.allocated, &stats.allocated_bytes[0]), std::pair(&counted.active, &stats.active_bytes[0]),
        std::pair(&counted.reserved, &stats.reserved_bytes[0])}) { // the first is that of all pools
    stat->current = count->current;
    stat->peak = count->peak;
    stat->allocated = count->allocated;
    stat->freed = count->freed;
  }
  return stats;
}
#endif

} // namespace sidestream
