#include "pinned_memory.h"

#include "host_accesses.h"

#include <c10/util/Exception.h>
#include <c10/util/llvmMathExtras.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>

namespace sidestream {
namespace {

constexpr int64_t kPinnedAlignment = 64;
constexpr c10::DeviceIndex kHost = -1; // as owner: neither a device nor a stream

void free_pinned(void* context) {
  PinnedAllocator::get().free(*static_cast<PinnedBlock*>(context));
}

} // namespace

PinnedAllocator& PinnedAllocator::get() {
  static auto& allocator = *new PinnedAllocator(); // leaked: storages may outlive static destructors
  return allocator;
}

c10::DataPtr PinnedAllocator::allocate(size_t size_bytes) {
  if (size_bytes == 0) {
    return {nullptr, nullptr, &c10::detail::deleteNothing, c10::Device(c10::kCPU)};
  }
  auto rounded = static_cast<int64_t>(c10::llvm::PowerOf2Ceil(size_bytes));
  auto& scheduler = Scheduler::get();
  PinnedBlock* block = nullptr;
  {
    Lock lock(scheduler.mutex);
    process_recordings();
    auto& list = free_[rounded];
    if (!list.empty()) {
      block = list.back();
      list.pop_back();
      block->cached = false;
    } else {
      void* memory = std::aligned_alloc(kPinnedAlignment, static_cast<size_t>(std::max(rounded, kPinnedAlignment)));
      TORCH_CHECK_WITH(
          OutOfMemoryError, memory, "The simulated accelerator found no memory for a pinned block of ", rounded, " bytes.");
      std::memset(memory, kPoison, static_cast<size_t>(rounded));
      block = new PinnedBlock{{{memory, rounded}}};
      blocks_.emplace(memory, block);
    }
    live_++;
    trace_allocation(*block, kHost, kHost);
  }
  update_host_observer();
  return {block->memory, block, &free_pinned, c10::Device(c10::kCPU)};
}

void PinnedAllocator::copy_data(void* destination, const void* source, std::size_t count) const {
  std::memcpy(destination, source, count);
}

PinnedBlock* PinnedAllocator::block_at(const void* pointer) {
  Lock lock(Scheduler::get().mutex);
  auto next = blocks_.upper_bound(pointer);
  if (next == blocks_.begin()) {
    return nullptr;
  }
  auto& [start, block] = *std::prev(next);
  return static_cast<const char*>(pointer) < static_cast<const char*>(start) + block->size_bytes ? block : nullptr;
}

bool PinnedAllocator::record_use(const c10::DataPtr& storage, const void* pointer, Stream& stream) {
  Lock lock(Scheduler::get().mutex);
  PinnedBlock* block = nullptr;
  if (storage.get_deleter() == &free_pinned) {
    block = static_cast<PinnedBlock*>(storage.get_context());
  } else {
    auto found = blocks_.find(pointer);
    if (found == blocks_.end()) {
      return false;
    }
    block = found->second;
  }
  block->add_user(stream);
  return true;
}

void PinnedAllocator::free(PinnedBlock& block) {
  auto& scheduler = Scheduler::get();
  Caller caller;
  if (scheduler.traces()) {
    caller = describe_line();
  }
  {
    Lock lock(scheduler.mutex);
    live_--;
    for (auto& recording : record_free(block, kHost, kHost, caller)) {
      recordings_.emplace_back(std::move(recording), &block);
      block.awaited++;
    }
    freed_.add(block);
    if (block.awaited == 0) {
      make_available(block);
    }
  }
  update_host_observer();
}

void PinnedAllocator::make_available(PinnedBlock& block) {
  block.cached = true;
  free_[block.size_bytes].push_back(&block);
}

void PinnedAllocator::process_recordings() {
  while (!recordings_.empty() && Scheduler::get().settled(*recordings_.front().first)) {
    auto& block = *recordings_.front().second;
    recordings_.pop_front();
    if (--block.awaited == 0) {
      make_available(block);
    }
  }
}

void PinnedAllocator::poison_freed() {
  process_recordings();
  freed_.poison();
}

bool is_pinned(const void* pointer) {
  return PinnedAllocator::get().block_at(pointer) != nullptr;
}

} // namespace sidestream
