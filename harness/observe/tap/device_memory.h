// The memory of the devices as one repetition sees it: what its caching allocators have handed out, and what that memory is
// called in the trace. Pinned memory of the host is that of device -1.
#pragma once

#include <c10/core/Device.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "stream_key.h"

namespace sidestream {

// Addresses [start, stop) of a device; once they are named, bytes of a block of the trace instead.
struct Bytes {
  c10::DeviceIndex device = -1;
  uint64_t start = 0;
  uint64_t stop = 0; // of memory whose size nobody knows, the same as start
  int64_t block = -1;

  bool overlaps(const Bytes& other) const {
    return device == other.device && start < other.stop && other.start < stop;
  }
};

struct AccessedBytes {
  Bytes bytes;
  bool write;
};

// The memory of a tensor that a launch touches.
struct TouchedStorage {
  Bytes bytes;
  bool integers = false;
};

struct LiveBlock {
  Bytes bytes;
  std::optional<StreamKey> owner; // unknown if it was handed out before the repetition
  std::vector<StreamKey> users = {}; // other streams that it was recorded on
  int64_t entry = -1; // of its allocation in the trace; negative if that is not in the trace
  bool integers = false; // whether a launch has used it as such

  void add_user(StreamKey on) {
    if (std::find(users.begin(), users.end(), on) == users.end()) {
      users.push_back(on);
    }
  }
};

// What is live, and which recordings what was given back waits for. Expects the repetition's lock to be held.
class DeviceMemory {
 public:
  void clear();

  // Enters a block; returns the recordings that its bytes had to wait for.
  std::vector<int64_t> hand_out(LiveBlock block);
  // A live block that overlaps: whoever gave it back was not seen.
  const LiveBlock* overlapping(const Bytes& bytes) const;
  // The block that begins at this address; one of unknown owner is entered if there is none.
  LiveBlock& block_at(c10::DeviceIndex device, uint64_t address);
  const LiveBlock* block_around(c10::DeviceIndex device, uint64_t address) const;
  // A launch uses these bytes as integers.
  void hold_integers(const Bytes& bytes);
  // Removes the block at the start of these bytes; one of unknown owner if there is none.
  LiveBlock take_back(const Bytes& bytes);
  // From now on whoever is given any of these bytes has waited for the recordings.
  void must_wait(const Bytes& bytes, const std::vector<int64_t>& recordings);

 private:
  using Address = std::pair<c10::DeviceIndex, uint64_t>;
  struct Waiting {
    Bytes bytes;
    std::vector<int64_t> recordings;
  };

  std::map<Address, LiveBlock> live_;
  std::vector<Waiting> waiting_;
};

// Names bytes: all that ever overlapped are one block, which begins at the lowest address.
class BlockNames {
 public:
  // Everything that is to be named, and what it is part of, such as the whole storage of a slice.
  void add(const Bytes& bytes);
  // After everything has been added: joins what overlaps.
  void join();
  // Turns addresses into bytes of a block; blocks are numbered from 0 in the order in which they are first named.
  void name(Bytes& bytes);

 private:
  struct Block {
    Bytes bytes;
    int64_t number = -1;
  };
  std::vector<Bytes> added_;
  std::vector<Block> blocks_;
  int64_t numbered_ = 0;
};

} // namespace sidestream
