// What differs between the versions of torch that the simulator builds with, 2.7 and newer.
#pragma once

#include <c10/core/Allocator.h>
#include <torch/version.h>

#define SIDESTREAM_TORCH_IS_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

// What torch.accelerator.get_device_capability says.
#if __has_include(<c10/core/DeviceCapability.h>)
#include <c10/core/DeviceCapability.h>
#define SIDESTREAM_HAS_DEVICE_CAPABILITY 1
#endif

// The interface behind torch.accelerator.memory_stats and its like.
#if SIDESTREAM_TORCH_IS_AT_LEAST(2, 9)
#include <c10/core/CachingDeviceAllocator.h>
#define SIDESTREAM_HAS_DEVICE_ALLOCATOR 1
#endif

namespace sidestream {

#ifdef SIDESTREAM_HAS_DEVICE_ALLOCATOR
using DeviceAllocatorInterface = c10::DeviceAllocator;
#else
using DeviceAllocatorInterface = c10::Allocator;
#endif

} // namespace sidestream
