#include "trace.h"

namespace sidestream {

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
  entries.push_back(entry);
}

void Trace::add_memory(TraceEntry entry, MemoryBlock& block, const std::vector<int64_t>& memory_events) {
  entry.number = number_of(block);
  entry.first = static_cast<uint32_t>(events.size());
  entry.count = static_cast<uint32_t>(memory_events.size());
  events.insert(events.end(), memory_events.begin(), memory_events.end());
  entries.push_back(entry);
}

} // namespace sidestream
