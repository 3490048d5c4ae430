#include "cached_blocks.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace sidestream {
namespace {

TraceEntry entry_of(TraceEntry::Kind kind, c10::DeviceIndex device, int64_t stream) {
  TraceEntry entry{kind};
  entry.device = device;
  entry.stream = stream;
  return entry;
}

} // namespace

void CachedBlock::add_user(Stream& stream) {
  if (std::find(users.begin(), users.end(), &stream) == users.end()) {
    users.push_back(&stream);
  }
}

void trace_allocation(CachedBlock& block, c10::DeviceIndex device, int64_t stream) {
  auto& scheduler = Scheduler::get();
  if (scheduler.traces()) {
    auto entry = entry_of(TraceEntry::kAllocate, device, stream);
    entry.size_bytes = block.size_bytes;
    if (block.completed_in != scheduler.repetition()) {
      block.completed.clear();
    }
    scheduler.trace.add_memory(entry, block, block.completed);
  }
  block.completed.clear();
}

void trace_record_stream(CachedBlock& block, const Stream& stream) {
  auto& scheduler = Scheduler::get();
  if (scheduler.traces()) {
    auto entry = entry_of(TraceEntry::kRecordStream, stream.device, stream.id);
    entry.size_bytes = block.size_bytes;
    scheduler.trace.add_memory(entry, block, {});
  }
}

std::vector<RecordingPointer> record_free(
    CachedBlock& block, c10::DeviceIndex device, int64_t stream, const Caller& caller) {
  auto& scheduler = Scheduler::get();
  std::vector<RecordingPointer> recordings;
  std::vector<int64_t> events;
  for (auto* user : block.users) {
    recordings.push_back(scheduler.record_locked(*user));
    if (recordings.back()->number > 0) {
      events.push_back(recordings.back()->number);
    }
  }
  block.users.clear();
  if (scheduler.traces()) {
    auto entry = entry_of(TraceEntry::kFree, device, stream);
    entry.size_bytes = block.size_bytes;
    entry.caller = caller;
    scheduler.trace.add_memory(entry, block, events);
  }
  block.completed = std::move(events);
  block.completed_in = scheduler.repetition();
  return recordings;
}

void FreedBlocks::add(CachedBlock& block) {
  if (!block.listed) {
    block.listed = true;
    blocks_.push_back(&block);
  }
}

void FreedBlocks::poison() {
  for (auto* block : blocks_) {
    block->listed = false;
    if (block->cached) {
      std::memset(block->memory, kPoison, static_cast<size_t>(block->size_bytes));
    }
  }
  blocks_.clear();
}

} // namespace sidestream
