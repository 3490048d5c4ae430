// Which streams exist and which one is current: two devices, each with a default stream (id 0) and, as on CUDA, a pool of
// 32 streams per priority that is handed out round robin, so that the 33rd stream asked for is the first one again.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>

namespace sidestream {

constexpr c10::DeviceIndex kDevices = 2;
constexpr int64_t kPoolSize = 32;
constexpr int kPriorities = 4; // 0 (the lowest) to -3, as on CUDA
constexpr int64_t kStreamsOfDevice = 1 + kPriorities * kPoolSize;

// Current device and stream of the calling thread. An index below 0 means the current device.
c10::DeviceIndex current_device();
c10::DeviceIndex exchange_device(c10::DeviceIndex device);
c10::DeviceIndex checked_device(c10::DeviceIndex device);
int64_t current_stream(c10::DeviceIndex device);
int64_t exchange_stream(c10::DeviceIndex device, int64_t id);

// The next stream of the pool. A priority outside of -3 (the highest) to 0 (the default) is the nearest of these, as on CUDA
// (pytorch/pytorch#143849).
int64_t stream_from_pool(c10::DeviceIndex device, int priority);

c10::Stream to_stream(c10::DeviceIndex device, int64_t id);

// Makes a device current for a scope, and with it that device's current stream.
class DeviceScope {
 public:
  explicit DeviceScope(c10::DeviceIndex device) : previous_(exchange_device(device)) {}
  ~DeviceScope() { exchange_device(previous_); }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  c10::DeviceIndex previous_;
};

} // namespace sidestream
