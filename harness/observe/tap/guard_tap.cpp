#include "guard_tap.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/version.h>

#include <stdexcept>

#include "device.h"
#include "thread_state.h"

#define TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

namespace sidestream {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
using c10::impl::DeviceGuardImplInterface;

// Every virtual of DeviceGuardImplInterface is forwarded: one that is not would silently get the interface's default.
class GuardTap final : public DeviceGuardImplInterface {
 public:
  explicit GuardTap(const DeviceGuardImplInterface* original) : original_(original) {}

  const DeviceGuardImplInterface* original() const {
    return original_;
  }

  DeviceType type() const override {
    return original_->type();
  }
  Device exchangeDevice(Device device) const override {
    return original_->exchangeDevice(device);
  }
  Device getDevice() const override {
    return original_->getDevice();
  }
  void setDevice(Device device) const override {
    original_->setDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    original_->uncheckedSetDevice(device);
  }
  Stream getStream(Device device) const override {
    return original_->getStream(device);
  }
  Stream getDefaultStream(Device device) const override {
    return original_->getDefaultStream(device);
  }
  Stream getStreamFromGlobalPool(Device device, bool is_high_priority) const override {
    return original_->getStreamFromGlobalPool(device, is_high_priority);
  }
  Stream getNewStream(Device device, int priority) const override {
    return original_->getNewStream(device, priority);
  }
  Stream exchangeStream(Stream stream) const override {
    return original_->exchangeStream(stream);
  }
#if TORCH_AT_LEAST(2, 11)
  void* getStreamNativeHandle(const Stream stream) const override {
    return original_->getStreamNativeHandle(stream);
  }
#endif
  DeviceIndex deviceCount() const noexcept override {
    return original_->deviceCount();
  }
#if TORCH_AT_LEAST(2, 10)
  c10::DeviceCapability getDeviceCapability(Device device) const override {
    return original_->getDeviceCapability(device);
  }
#endif
#if TORCH_AT_LEAST(2, 12)
  bool isStreamCapturing(const Stream& stream) const override {
    return original_->isStreamCapturing(stream);
  }
#endif
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    original_->recordDataPtrOnStream(data, stream);
  }
  double elapsedTime(void* start, void* end, const DeviceIndex device) const override {
    return original_->elapsedTime(start, end, device);
  }

  void destroyEvent(void* event, const DeviceIndex device) const noexcept override {
    original_->destroyEvent(event, device);
  }

  void record(void** event, const Stream& stream, const DeviceIndex device, const c10::EventFlag flag) const override {
    original_->record(event, stream, device, flag);
    if (observed()) {
      repetition().mark_used(stream.device_index());
      repetition().recorded(*event, key_of(stream), !repetition().preparing());
    } else if (repetition().running()) {
      repetition().recorded_unseen(*event);
    }
  }

  void block(void* event, const Stream& stream) const override {
    if (observed()) {
      repetition().mark_used(stream.device_index());
      repetition().waited(event, key_of(stream), !repetition().preparing());
    }
    original_->block(event, stream);
  }

  bool queryEvent(void* event) const override {
    const bool complete = original_->queryEvent(event);
    if (observed()) {
      HostSync::of_event(event, !repetition().preparing()).asked(complete);
    }
    return complete;
  }

  bool queryStream(const Stream& stream) const override {
    const bool complete = original_->queryStream(stream);
    if (observed()) {
      HostSync::of_stream(key_of(stream), !repetition().preparing()).asked(complete);
    }
    return complete;
  }

  void synchronizeStream(const Stream& stream) const override {
    synchronize(HostSync::of_stream(key_of(stream), !repetition().preparing()), [&] {
      original_->synchronizeStream(stream);
    });
  }

  void synchronizeEvent(void* event) const override {
    synchronize(HostSync::of_event(event, !repetition().preparing()), [&] { original_->synchronizeEvent(event); });
  }

  void synchronizeDevice(const DeviceIndex device) const override {
    synchronize(HostSync::of_device(device, !repetition().preparing()), [&] { original_->synchronizeDevice(device); });
  }

 private:
  template <typename Wait>
  static void synchronize(HostSync sync, Wait wait) {
    const bool counts = observed();
    if (counts) {
      sync.begin();
    }
    wait();
    if (counts) {
      sync.end();
    }
  }

  const DeviceGuardImplInterface* const original_;
};

const GuardTap* installed = nullptr;

// Never destroyed: events that were made while a tap was installed keep a pointer to it. Nor is a second one made for
// the same guard.
const GuardTap* tap_of(const DeviceGuardImplInterface* original) {
  static const GuardTap* made = nullptr;
  if (made == nullptr || made->original() != original) {
    made = new GuardTap(original);
  }
  return made;
}

} // namespace

void install_guard_tap(DeviceType type) {
  if (installed != nullptr) {
    throw std::runtime_error("a tap is installed already");
  }
  const auto* const original = c10::impl::getDeviceGuardImpl(type);
  const auto* const tap = tap_of(original);
  set_device_guard(original);
  installed = tap;
  c10::impl::device_guard_impl_registry[static_cast<size_t>(type)].store(tap);
}

void remove_guard_tap() {
  if (installed == nullptr) {
    return;
  }
  auto& registered = c10::impl::device_guard_impl_registry[static_cast<size_t>(installed->type())];
  const DeviceGuardImplInterface* expected = installed;
  // Somebody who has decorated the tap meanwhile keeps it underneath; without a repetition it only forwards.
  registered.compare_exchange_strong(expected, installed->original());
  installed = nullptr;
}

} // namespace sidestream
