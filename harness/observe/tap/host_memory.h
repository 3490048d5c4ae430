// Pinned memory of the host as one repetition sees it: what copies have used so far.
//
// Nobody reports what the pinned allocator hands out and takes back, so a block becomes known when a copy first uses it. What the
// host did to it before is ordered before that copy anyway. Its tensor's storage tells when it has been given up.
#pragma once

#include <c10/core/Storage.h>

#include <optional>
#include <utility>
#include <vector>

#include "device_memory.h"
#include "stream_key.h"

namespace sidestream {

// The host's place where blocks have an owner and bytes have a device.
constexpr StreamKey kHost{-1, 0};

// The addresses of a storage of the host; empty if it has none.
Bytes host_bytes_of(const c10::Storage& storage);

// Expects the repetition's lock to be held.
class HostMemory {
 public:
  void clear() {
    blocks_.clear();
  }

  // Whether these bytes are of a block that a copy has used.
  bool knows(const Bytes& bytes) const {
    return block_around(bytes) != nullptr;
  }
  // A copy uses this memory. Returns the block that it is part of, and whether that was not known.
  std::pair<Bytes, bool> add(const c10::Storage& storage);
  // Removes the blocks that have been given up.
  std::vector<Bytes> take_given_up();

 private:
  struct Block {
    Bytes bytes;
    // None where the storage is not the memory's owner, as that of a tensor over a NumPy array is not: the end of it says nothing.
    std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> owner;
  };
  const Block* block_around(const Bytes& bytes) const;

  std::vector<Block> blocks_;
};

} // namespace sidestream
