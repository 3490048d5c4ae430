#include "host_memory.h"

#include <algorithm>
#include <cstdint>

namespace sidestream {

Bytes host_bytes_of(const c10::Storage& storage) {
  const auto start = reinterpret_cast<uint64_t>(storage.data());
  return {kHost.device, start, start == 0 ? 0 : start + storage.nbytes()};
}

const HostMemory::Block* HostMemory::block_around(const Bytes& bytes) const {
  const auto found = std::find_if(blocks_.begin(), blocks_.end(), [&](const Block& block) {
    return block.bytes.start <= bytes.start && bytes.stop <= block.bytes.stop;
  });
  return found == blocks_.end() ? nullptr : &*found;
}

std::pair<Bytes, bool> HostMemory::add(const c10::Storage& storage) {
  const auto bytes = host_bytes_of(storage);
  if (const auto* const known = block_around(bytes)) {
    return {known->bytes, false};
  }
  Block block{bytes, std::nullopt};
  if (storage.allocator() != nullptr) {
    block.owner = storage.getWeakStorageImpl();
  }
  blocks_.push_back(std::move(block));
  return {bytes, true};
}

std::vector<Bytes> HostMemory::take_given_up() {
  std::vector<Bytes> given_up;
  const auto is_given_up = [&](const Block& block) {
    if (!block.owner.has_value() || !block.owner->expired()) {
      return false;
    }
    given_up.push_back(block.bytes);
    return true;
  };
  blocks_.erase(std::remove_if(blocks_.begin(), blocks_.end(), is_given_up), blocks_.end());
  return given_up;
}

} // namespace sidestream
