// What identifies a stream.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>

namespace sidestream {

struct StreamKey {
  c10::DeviceIndex device;
  c10::StreamId stream;
  bool operator==(const StreamKey& other) const {
    return device == other.device && stream == other.stream;
  }
};

struct StreamKeyHash {
  size_t operator()(const StreamKey& key) const {
    return std::hash<int64_t>()(key.stream * 64 + key.device);
  }
};

inline StreamKey key_of(const c10::Stream& stream) {
  return {stream.device_index(), stream.id()};
}

} // namespace sidestream
