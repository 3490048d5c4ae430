// A device guard that hands every call to another one: what a decorator of a device guard derives from.
#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/version.h>

#define TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) || (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

namespace sidestream {

// Every virtual of DeviceGuardImplInterface is forwarded: one that is not would silently get the interface's default.
class ForwardingGuard : public c10::impl::DeviceGuardImplInterface {
 public:
  using Device = c10::Device;
  using DeviceIndex = c10::DeviceIndex;
  using DeviceType = c10::DeviceType;
  using Stream = c10::Stream;

  explicit ForwardingGuard(const c10::impl::DeviceGuardImplInterface* original) : original_(original) {}

  const c10::impl::DeviceGuardImplInterface* original() const {
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
  }
  void block(void* event, const Stream& stream) const override {
    original_->block(event, stream);
  }
  bool queryEvent(void* event) const override {
    return original_->queryEvent(event);
  }
  bool queryStream(const Stream& stream) const override {
    return original_->queryStream(stream);
  }
  void synchronizeStream(const Stream& stream) const override {
    original_->synchronizeStream(stream);
  }
  void synchronizeEvent(void* event) const override {
    original_->synchronizeEvent(event);
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    original_->synchronizeDevice(device);
  }

 private:
  const c10::impl::DeviceGuardImplInterface* const original_;
};

} // namespace sidestream
