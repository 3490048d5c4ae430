#include "device_memory.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <tuple>

namespace sidestream {

void DeviceMemory::clear() {
  live_.clear();
  waiting_.clear();
}

std::vector<int64_t> DeviceMemory::hand_out(LiveBlock block) {
  const Bytes bytes = block.bytes;
  live_[{bytes.device, bytes.start}] = std::move(block);
  std::vector<int64_t> recordings;
  std::vector<Waiting> still_waiting;
  for (auto& waiting : waiting_) {
    if (!waiting.bytes.overlaps(bytes)) {
      still_waiting.push_back(std::move(waiting));
      continue;
    }
    for (const auto& [start, stop] :
         {std::pair(waiting.bytes.start, bytes.start), std::pair(bytes.stop, waiting.bytes.stop)}) {
      if (start < stop) { // the rest is handed out another time
        still_waiting.push_back({Bytes{bytes.device, start, stop}, waiting.recordings});
      }
    }
    recordings.insert(recordings.end(), waiting.recordings.begin(), waiting.recordings.end());
  }
  waiting_ = std::move(still_waiting);
  std::sort(recordings.begin(), recordings.end());
  recordings.erase(std::unique(recordings.begin(), recordings.end()), recordings.end());
  return recordings;
}

const LiveBlock* DeviceMemory::overlapping(const Bytes& bytes) const {
  auto next = live_.lower_bound({bytes.device, bytes.start});
  if (next != live_.begin() && std::prev(next)->second.bytes.overlaps(bytes)) {
    return &std::prev(next)->second;
  }
  return next != live_.end() && next->first.first == bytes.device && next->first.second < bytes.stop ? &next->second
                                                                                                    : nullptr;
}

LiveBlock& DeviceMemory::block_at(c10::DeviceIndex device, uint64_t address) {
  auto& block = live_[{device, address}];
  if (block.bytes.device < 0) {
    block.bytes = Bytes{device, address, address};
  }
  return block;
}

void DeviceMemory::hold_integers(const Bytes& bytes) {
  auto found = live_.upper_bound(Address{bytes.device, bytes.start});
  if (found != live_.begin() && (--found)->second.bytes.overlaps(bytes)) {
    found->second.integers = true;
  }
}

const LiveBlock* DeviceMemory::block_around(c10::DeviceIndex device, uint64_t address) const {
  return overlapping(Bytes{device, address, address + 1});
}

LiveBlock DeviceMemory::take_back(const Bytes& bytes) {
  const auto found = live_.find({bytes.device, bytes.start});
  LiveBlock block{bytes, std::nullopt};
  if (found != live_.end()) {
    block = std::move(found->second);
    block.bytes = bytes; // now the size of a block of before is known as well
    live_.erase(found);
  }
  return block;
}

void DeviceMemory::must_wait(const Bytes& bytes, const std::vector<int64_t>& recordings) {
  if (!recordings.empty()) {
    waiting_.push_back({bytes, recordings});
  }
}

void BlockNames::add(const Bytes& bytes) {
  added_.push_back(bytes);
  added_.back().stop = std::max(bytes.stop, bytes.start + 1);
}

void BlockNames::join() {
  std::sort(added_.begin(), added_.end(), [](const Bytes& one, const Bytes& other) {
    return std::tie(one.device, one.start) < std::tie(other.device, other.start);
  });
  for (const auto& bytes : added_) {
    if (!blocks_.empty() && blocks_.back().bytes.overlaps(bytes)) {
      blocks_.back().bytes.stop = std::max(blocks_.back().bytes.stop, bytes.stop);
    } else {
      blocks_.push_back({bytes});
    }
  }
}

void BlockNames::name(Bytes& bytes) {
  auto found = std::upper_bound(blocks_.begin(), blocks_.end(), bytes, [](const Bytes& wanted, const Block& block) {
    return std::tie(wanted.device, wanted.start) < std::tie(block.bytes.device, block.bytes.start);
  });
  if (found == blocks_.begin()) {
    throw std::logic_error("memory of the trace has no name");
  }
  auto& block = *std::prev(found);
  if (block.number < 0) {
    block.number = numbered_++;
  }
  bytes.block = block.number;
  if (bytes.stop == bytes.start) {
    bytes.stop = block.bytes.stop;
  }
  bytes.start -= block.bytes.start;
  bytes.stop -= block.bytes.start;
}

} // namespace sidestream
