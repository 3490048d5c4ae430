#include "memory_reports.h"

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "device.h"
#include "source_lines.h"
#include "thread_state.h"

namespace sidestream {
namespace {

namespace profiler = torch::profiler::impl;

std::atomic<bool> poisons{false};
constexpr int kPoison = 0xFF; // a NaN
constexpr int kHarmlessIndex = 0; // a stale index out of range would make the device fail for good

// Whoever looks for the thread's profiler takes what it finds for one of PyTorch's: so this is one, which is disabled.
class MemoryReports final : public profiler::ProfilerStateBase {
 public:
  MemoryReports() : ProfilerStateBase(profiler::ProfilerConfig(profiler::ProfilerState::Disabled)) {}

  bool memoryProfilingEnabled() const override {
    return true;
  }

  profiler::ActiveProfilerType profilerType() override {
    return profiler::ActiveProfilerType::NONE;
  }

  void reportMemoryUsage(void* pointer, int64_t size, size_t, size_t, c10::Device device) override {
    const auto* const guard = device_guard();
    if (guard == nullptr || device.type() != guard->type() || !observed() || pointer == nullptr || size == 0) {
      return;
    }
    try {
      report(pointer, size, device);
    } catch (const c10::Error& error) {
      repetition().note_error(std::string("observing memory failed: ") + error.what_without_backtrace());
    } catch (const std::exception& error) {
      repetition().note_error(std::string("observing memory failed: ") + error.what());
    }
  }

 private:
  static void report(void* pointer, int64_t size, c10::Device device) {
    const auto start = reinterpret_cast<uint64_t>(pointer);
    const bool traced = !repetition().preparing();
    if (size > 0) {
      const Bytes bytes{device.index(), start, start + static_cast<uint64_t>(size)};
      const auto owner = device_guard()->getStream(device);
      repetition().allocated(bytes, key_of(owner), traced);
      if (traced && poisons.load(std::memory_order_relaxed)) {
        fill_with_poison(
            pointer, static_cast<size_t>(size), owner, this_thread().launch.integers ? kHarmlessIndex : kPoison);
      }
      return;
    }
    const Bytes bytes{device.index(), start, start + static_cast<uint64_t>(-size)};
    const auto line = traced && repetition().lines() ? line_without_taking_the_gil() : SourceLine{};
    const auto freed = repetition().freed(bytes, line, traced);
    if (freed.has_value() && poisons.load(std::memory_order_relaxed)) {
      const auto& owner = freed->owner;
      const c10::Stream stream(c10::Stream::UNSAFE, c10::Device(device.type(), owner.device), owner.stream);
      fill_with_poison(pointer, static_cast<size_t>(-size), stream, freed->integers ? kHarmlessIndex : kPoison);
    }
  }
};

const std::shared_ptr<c10::DebugInfoBase>& reports() {
  static const auto* const instance = new std::shared_ptr<c10::DebugInfoBase>(std::make_shared<MemoryReports>());
  return *instance; // leaked: threads of the engine may keep it until the process ends
}

std::shared_ptr<c10::ThreadLocalDebugInfo> before;
std::thread::id begun_by;

} // namespace

void report_memory_of_this_thread() {
  const auto* const found = c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE);
  if (found == nullptr) {
    c10::ThreadLocalDebugInfo::_push(c10::DebugInfoKind::PROFILER_STATE, reports());
  } else if (found != reports().get()) {
    repetition().note_unseen_memory();
  }
}

void begin_memory_reports() {
  before = c10::ThreadLocalDebugInfo::current();
  begun_by = std::this_thread::get_id();
  report_memory_of_this_thread();
}

void end_memory_reports() {
  if (begun_by == std::this_thread::get_id()) {
    c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(std::move(before));
  }
  before.reset();
  begun_by = {};
}

void set_poisoning(bool on) {
  poisons = on;
}

} // namespace sidestream
