#include "pinned_memory.h"

#include <c10/core/CPUAllocator.h>

#include <cstring>
#include <map>
#include <mutex>
#include <utility>

namespace sidestream {
namespace {

class PinnedAllocator final : public c10::Allocator {
 public:
  static PinnedAllocator& get() {
    static auto& allocator = *new PinnedAllocator();
    return allocator;
  }

  c10::DataPtr allocate(size_t size_bytes) override {
    auto memory = c10::GetCPUAllocator()->allocate(size_bytes);
    void* start = memory.get();
    if (!start) {
      return memory;
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      live_.insert_or_assign(start, Live{size_bytes, std::move(memory)});
    }
    return {start, start, &PinnedAllocator::free, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &PinnedAllocator::free;
  }

  void copy_data(void* destination, const void* source, std::size_t count) const override {
    std::memcpy(destination, source, count);
  }

  bool owns(const void* pointer) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto next = live_.upper_bound(pointer);
    if (next == live_.begin()) {
      return false;
    }
    const auto& [start, live] = *std::prev(next);
    return static_cast<const char*>(pointer) < static_cast<const char*>(start) + live.size_bytes;
  }

 private:
  struct Live {
    size_t size_bytes;
    c10::DataPtr memory;
  };

  static void free(void* start) {
    Live freed;
    {
      auto& self = get();
      std::lock_guard<std::mutex> lock(self.mutex_);
      auto found = self.live_.find(start);
      if (found == self.live_.end()) {
        return;
      }
      freed = std::move(found->second);
      self.live_.erase(found);
    }
  }

  std::mutex mutex_;
  std::map<const void*, Live> live_;
};

} // namespace

c10::Allocator& pinned_allocator() {
  return PinnedAllocator::get();
}

bool is_pinned(const void* pointer) {
  return PinnedAllocator::get().owns(pointer);
}

} // namespace sidestream
