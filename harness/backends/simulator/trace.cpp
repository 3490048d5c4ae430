#include "trace.h"

namespace sidestream {
namespace {

thread_local int64_t last_entry = -1;

} // namespace

int64_t take_last_entry() {
  const auto last = last_entry;
  last_entry = -1;
  return last;
}

void Trace::add(const TraceEntry& entry) {
  last_entry = static_cast<int64_t>(entries.size());
  entries.push_back(entry);
}

void Trace::clear() {
  entries.clear();
  accesses.clear();
  events.clear();
  repetition_++;
  blocks_ = 0;
}

int64_t Trace::number_of(MemoryBlock& block) {
  if (block.numbered_in != repetition_) {
    block.numbered_in = repetition_;
    block.number = blocks_++;
  }
  return block.number;
}

void Trace::add_with_accesses(TraceEntry entry, const std::vector<Access>& entry_accesses) {
  entry.first = static_cast<uint32_t>(accesses.size());
  entry.count = static_cast<uint32_t>(entry_accesses.size());
  for (const auto& access : entry_accesses) {
    accesses.push_back({number_of(*access.block), access.start, access.stop, access.write});
  }
  add(entry);
}

void Trace::add_memory(TraceEntry entry, MemoryBlock& block, const std::vector<int64_t>& memory_events) {
  entry.number = number_of(block);
  entry.first = static_cast<uint32_t>(events.size());
  entry.count = static_cast<uint32_t>(memory_events.size());
  events.insert(events.end(), memory_events.begin(), memory_events.end());
  add(entry);
}

} // namespace sidestream
