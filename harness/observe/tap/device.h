// The device under test as it was registered with PyTorch, below the tap; and what holds a stream of it.
#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstddef>
#include <cstdint>
#include <functional>

namespace sidestream {

// The guard that the tap decorates; null when no tap is installed.
const c10::impl::DeviceGuardImplInterface* device_guard();
void set_device_guard(const c10::impl::DeviceGuardImplInterface* guard);

// How a stream is kept busy for a number of cycles: PyTorch's own spin kernel where its library exports it, else
// `fallback`, which is called with the number of cycles while the device and the stream are current, without the GIL.
bool find_sleep_kernel();
void set_sleep_fallback(std::function<void(int64_t)> fallback);
bool can_sleep();
void set_hold_cycles(int64_t cycles);

// A function of a library that torch has loaded, or of one that this depends on; null if it is not there.
void* find_in(const char* library, const char* symbol);

// The runtime's own handle of a stream, where `find_fill` has found how to get it.
bool has_native_streams();
void* native_stream(const c10::Stream& stream);

// How the device's memory is filled from outside PyTorch: cudaMemsetAsync or hipMemsetAsync, where they and the runtime's own
// handle of a stream can be had.
bool find_fill();
bool can_poison();
// Enqueues that these bytes are filled with `byte`, without allocating and without taking any lock of PyTorch's.
void fill_with_poison(void* pointer, size_t size_bytes, const c10::Stream& stream, int byte);

// Whether there is a way to hold a stream: a sleep, or a gate where these are in use.
bool can_hold();
// Enqueues the hold at `position` of its plan on the current stream of the stream's device, which must be that
// stream; returns an event that is recorded behind it.
void* enqueue_hold(size_t position, const c10::Stream& stream);
// Records an event, which belongs to a pool and is used again in the next repetition.
void* record_event(const c10::Stream& stream);
void reuse_hold_events();
void destroy_hold_events();

} // namespace sidestream
