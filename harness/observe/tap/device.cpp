#include "device.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <atomic>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace sidestream {
namespace {

using SleepKernel = void (*)(int64_t);

std::atomic<const c10::impl::DeviceGuardImplInterface*> guard{nullptr};
std::atomic<SleepKernel> sleep_kernel{nullptr};
std::atomic<int64_t> hold_cycles{0};

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

bool find_sleep_kernel() {
  // at::cuda::sleep(int64_t), declared in ATen/cuda/Sleep.h; called by address so that this extension needs no CUDA
  // to be built. torch loads its libraries without RTLD_GLOBAL, so the library must be named.
  for (const char* const library : {"libtorch_cuda.so", "libtorch_hip.so"}) {
    if (void* const handle = dlopen(library, RTLD_NOLOAD | RTLD_LAZY)) {
      void* const found = dlsym(handle, "_ZN2at4cuda5sleepEl");
      dlclose(handle); // the library stays loaded, torch holds it
      if (found != nullptr) {
        sleep_kernel = reinterpret_cast<SleepKernel>(found);
        return true;
      }
    }
  }
  return false;
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

void* enqueue_hold(size_t position, const c10::Stream& stream) {
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
  {
    const CurrentDevice current(stream.device());
    // The j-th hold sleeps j + 1 times as long, so that holds are released in the order of the plan.
    sleep_on_current_stream(hold_cycles.load() * (static_cast<int64_t>(position) + 1));
    device_guard()->record(&event, stream, device, c10::EventFlag::PYTORCH_DEFAULT);
  }
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
