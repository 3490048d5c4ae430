#include "device.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <atomic>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "gates.h"

namespace sidestream {
namespace {

using SleepKernel = void (*)(int64_t);
using Fill = int (*)(void* pointer, int value, size_t size_bytes, void* stream);
using HandleOf = void* (*)(const c10::Stream* stream);

std::atomic<const c10::impl::DeviceGuardImplInterface*> guard{nullptr};
std::atomic<SleepKernel> sleep_kernel{nullptr};
std::atomic<int64_t> hold_cycles{0};
std::atomic<Fill> fill{nullptr};
std::atomic<HandleOf> handle_of{nullptr};

struct HoldEvents {
  std::mutex mutex;
  std::unordered_map<c10::DeviceIndex, std::vector<void*>> all;
  std::unordered_map<c10::DeviceIndex, size_t> used;
};

HoldEvents& hold_events() {
  static auto* const instance = new HoldEvents;
  return *instance;
}

std::function<void(int64_t)>& sleep_fallback() {
  static auto* const instance = new std::function<void(int64_t)>;
  return *instance;
}

// Makes a device current through the guard that the tap decorates.
class CurrentDevice {
 public:
  explicit CurrentDevice(c10::Device device) : previous_(device_guard()->exchangeDevice(device)) {}
  ~CurrentDevice() {
    device_guard()->uncheckedSetDevice(previous_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  c10::Device previous_;
};

void sleep_on_current_stream(int64_t cycles) {
  if (const auto kernel = sleep_kernel.load()) {
    kernel(cycles);
  } else {
    TORCH_CHECK(sleep_fallback(), "nothing holds a stream of this device: it has no sleep kernel");
    sleep_fallback()(cycles);
  }
}

} // namespace

const c10::impl::DeviceGuardImplInterface* device_guard() {
  return guard.load(std::memory_order_acquire);
}

void set_device_guard(const c10::impl::DeviceGuardImplInterface* original) {
  guard.store(original, std::memory_order_release);
}

void* find_in(const char* library, const char* symbol) {
  // torch loads its libraries without RTLD_GLOBAL, so the library must be named.
  void* const handle = dlopen(library, RTLD_NOLOAD | RTLD_LAZY);
  if (handle == nullptr) {
    return nullptr;
  }
  void* const found = dlsym(handle, symbol);
  dlclose(handle); // the library stays loaded, torch holds it
  return found;
}

bool find_sleep_kernel() {
  // at::cuda::sleep(int64_t), declared in ATen/cuda/Sleep.h; called by address so that this extension needs no CUDA
  // to be built.
  for (const char* const library : {"libtorch_cuda.so", "libtorch_hip.so"}) {
    if (void* const found = find_in(library, "_ZN2at4cuda5sleepEl")) {
      sleep_kernel = reinterpret_cast<SleepKernel>(found);
      return true;
    }
  }
  return false;
}

bool find_fill() {
  struct Runtime {
    const char* library;
    const char* fill;
    const char* handle; // c10::cuda::CUDAStream::stream() const: the object is nothing but a c10::Stream
  };
  for (const auto& runtime :
       {Runtime{"libc10_cuda.so", "cudaMemsetAsync", "_ZNK3c104cuda10CUDAStream6streamEv"},
        Runtime{"libc10_hip.so", "hipMemsetAsync", "_ZNK3c103hip9HIPStream6streamEv"}}) {
    void* const found = find_in(runtime.library, runtime.fill);
    void* const handle = find_in(runtime.library, runtime.handle);
    if (found != nullptr && handle != nullptr) {
      fill = reinterpret_cast<Fill>(found);
      handle_of = reinterpret_cast<HandleOf>(handle);
      return true;
    }
  }
  return false;
}

bool has_native_streams() {
  return handle_of.load() != nullptr;
}

void* native_stream(const c10::Stream& stream) {
  return handle_of.load()(&stream);
}

bool can_poison() {
  return fill.load() != nullptr;
}

void fill_with_poison(void* pointer, size_t size_bytes, const c10::Stream& stream, int byte) {
  const CurrentDevice current(stream.device());
  const int error = fill.load()(pointer, byte, size_bytes, native_stream(stream));
  TORCH_CHECK(error == 0, "filling freed memory failed with error ", error, " of the runtime");
}

void set_sleep_fallback(std::function<void(int64_t)> fallback) {
  sleep_fallback() = std::move(fallback);
}

bool can_sleep() {
  return sleep_kernel.load() != nullptr || sleep_fallback();
}

void set_hold_cycles(int64_t cycles) {
  hold_cycles = cycles;
}

bool can_hold() {
  return gates().in_use() || can_sleep();
}

void* enqueue_hold(size_t position, const c10::Stream& stream) {
  const CurrentDevice current(stream.device());
  if (gates().in_use()) {
    gates().enqueue_wait(position, stream);
  } else {
    // The j-th hold sleeps j + 1 times as long, so that holds are released in the order of the plan.
    sleep_on_current_stream(hold_cycles.load() * (static_cast<int64_t>(position) + 1));
  }
  return record_event(stream);
}

void* record_event(const c10::Stream& stream) {
  const auto device = stream.device_index();
  auto& pool = hold_events();
  void* event = nullptr;
  size_t slot = 0;
  {
    const std::lock_guard lock(pool.mutex);
    auto& events = pool.all[device];
    slot = pool.used[device]++;
    if (slot == events.size()) {
      events.push_back(nullptr);
    }
    event = events[slot];
  }
  const bool fresh = event == nullptr;
  device_guard()->record(&event, stream, device, c10::EventFlag::PYTORCH_DEFAULT);
  if (fresh) {
    const std::lock_guard lock(pool.mutex);
    pool.all[device][slot] = event;
  }
  return event;
}

void reuse_hold_events() {
  auto& pool = hold_events();
  const std::lock_guard lock(pool.mutex);
  pool.used.clear();
}

void destroy_hold_events() {
  std::unordered_map<c10::DeviceIndex, std::vector<void*>> all;
  {
    auto& pool = hold_events();
    const std::lock_guard lock(pool.mutex);
    all.swap(pool.all);
    pool.used.clear();
  }
  for (const auto& [device, events] : all) {
    for (auto* const event : events) {
      if (event != nullptr) {
        device_guard()->destroyEvent(event, device);
      }
    }
  }
}

} // namespace sidestream
