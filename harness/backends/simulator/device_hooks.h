// What PyTorch asks of an accelerator beside streams: whether it is there, generators, resizing of storages.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <optional>
#include <string>

namespace sidestream {

void register_device_hooks();

// Gives a storage new memory of the given size and copies what fits, in order with the current stream, as CUDA's does.
void resize_storage(const c10::Storage& storage, size_t size_bytes);

// A seed drawn at enqueue for a launch that needs random numbers, from the device's generator or the given one.
uint64_t draw_seed(c10::DeviceIndex device, const std::optional<at::Generator>& generator);
at::Generator& default_generator(c10::DeviceIndex device);
// A generator's state as bytes.
std::string generator_state(at::Generator& generator);
void set_generator_state(at::Generator& generator, const std::string& state);

} // namespace sidestream
