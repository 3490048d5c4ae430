#include "streams.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>

namespace sidestream {
namespace {

thread_local c10::DeviceIndex this_device = 0;
thread_local int64_t this_stream[kDevices] = {};
std::atomic<uint64_t> handed_out[kDevices][kPriorities];

} // namespace

c10::DeviceIndex checked_device(c10::DeviceIndex device) {
  if (device < 0) {
    return this_device;
  }
  TORCH_CHECK(
      device < kDevices, "The simulated accelerator has ", int(kDevices), " devices; there is no sim:", int(device), ".");
  return device;
}

c10::DeviceIndex current_device() {
  return this_device;
}

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  auto previous = this_device;
  this_device = checked_device(device);
  return previous;
}

int64_t current_stream(c10::DeviceIndex device) {
  return this_stream[checked_device(device)];
}

int64_t exchange_stream(c10::DeviceIndex device, int64_t id) {
  TORCH_CHECK(id >= 0 && id < kStreamsOfDevice, "The simulated accelerator has no stream ", id, ".");
  auto& current = this_stream[checked_device(device)];
  auto previous = current;
  current = id;
  return previous;
}

int64_t stream_from_pool(c10::DeviceIndex device, int priority) {
  int level = std::clamp(-priority, 0, kPriorities - 1);
  auto turn = handed_out[checked_device(device)][level]++;
  return 1 + level * kPoolSize + static_cast<int64_t>(turn % kPoolSize);
}

c10::Stream to_stream(c10::DeviceIndex device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kPrivateUse1, checked_device(device)), id);
}

} // namespace sidestream
