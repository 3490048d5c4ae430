#include "device_guard.h"

#include "allocator.h"
#include "scheduler.h"
#include "streams.h"
#include "torch_versions.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <mutex>
#include <utility>

namespace sidestream {
namespace {

// What torch's opaque event pointer points to.
class Event {
 public:
  // Threads may share an event: one may record it while another waits for it.
  RecordingPointer recording() {
    std::lock_guard<std::mutex> lock(mutex_);
    return recording_;
  }
  void record(RecordingPointer recording) {
    std::lock_guard<std::mutex> lock(mutex_);
    recording_ = std::move(recording);
  }

  explicit Event(c10::EventFlag flag) : has_time(flag == c10::EventFlag::BACKEND_DEFAULT) {}
  const bool has_time;

 private:
  std::mutex mutex_;
  RecordingPointer recording_;
};

RecordingPointer recording_of(void* event) {
  return static_cast<Event*>(event)->recording();
}

struct DeviceGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return c10::kPrivateUse1;
  }

  c10::Device exchangeDevice(c10::Device device) const override {
    return {c10::kPrivateUse1, exchange_device(device.index())};
  }

  c10::Device getDevice() const override {
    return {c10::kPrivateUse1, current_device()};
  }

  void setDevice(c10::Device device) const override {
    exchange_device(device.index());
  }

  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() < kDevices) {
      exchange_device(device.index());
    }
  }

  c10::Stream getStream(c10::Device device) const override {
    return to_stream(device.index(), current_stream(device.index()));
  }

  c10::Stream getDefaultStream(c10::Device device) const override {
    return to_stream(device.index(), 0);
  }

  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    return getNewStream(device, high_priority ? -1 : 0);
  }

  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return to_stream(device.index(), stream_from_pool(device.index(), priority));
  }

  c10::Stream exchangeStream(c10::Stream stream) const override {
    return to_stream(stream.device_index(), exchange_stream(stream.device_index(), stream.id()));
  }

  // The next two are virtual functions of newer versions of torch alone (isStreamCapturing from 2.12), so not marked `override`.
  void* getStreamNativeHandle(const c10::Stream stream) const {
    return &Scheduler::get().stream(stream);
  }

  bool isStreamCapturing(const c10::Stream&) const {
    return false;
  }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device, const c10::EventFlag flag)
      const override {
    TORCH_CHECK(
        device == -1 || device == stream.device_index(),
        "Event device index ", int(device), " does not match recording stream's device index ", int(stream.device_index()), ".");
    auto recording = Scheduler::get().record(Scheduler::get().stream(stream));
    if (!*event) {
      *event = new Event(flag);
    }
    static_cast<Event*>(*event)->record(std::move(recording));
  }

  void block(void* event, const c10::Stream& stream) const override {
    if (event) {
      Scheduler::get().wait(Scheduler::get().stream(stream), recording_of(event));
    }
  }

  bool queryEvent(void* event) const override {
    return !event || Scheduler::get().query_recording(recording_of(event));
  }

  void synchronizeEvent(void* event) const override {
    if (event) {
      Scheduler::get().synchronize_recording(recording_of(event));
    }
  }

  // Milliseconds between the moments at which the streams came to the two recordings: on the schedule's clock if it has one, else
  // on this host's.
  double elapsedTime(void* start, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(start && end, "Both events must be recorded before the time between them can be asked for.");
    TORCH_CHECK(
        static_cast<Event*>(start)->has_time && static_cast<Event*>(end)->has_time,
        "Both events must be created with argument 'enable_timing=True'."); // newer versions of torch ask themselves
    const auto first = recording_of(start);
    const auto second = recording_of(end);
    Lock lock(Scheduler::get().mutex);
    TORCH_CHECK(
        first->complete && second->complete, "Both events must be completed before the time between them can be asked for.");
    TORCH_CHECK(first->stream->device == second->stream->device, "There is no time between events of two devices.");
    TORCH_CHECK(
        first->clock == second->clock, "The two events were recorded under different schedules, which share no clock.");
    return (second->completed_us - first->completed_us) / 1e3;
  }

  c10::DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }

#ifdef SIDESTREAM_HAS_DEVICE_CAPABILITY
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    return {};
  }
#endif

  bool queryStream(const c10::Stream& stream) const override {
    return Scheduler::get().query_stream(Scheduler::get().stream(stream));
  }

  void synchronizeStream(const c10::Stream& stream) const override {
    Scheduler::get().synchronize_stream(Scheduler::get().stream(stream));
  }

  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Scheduler::get().synchronize_device(device);
  }

  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    if (auto* block = Allocator::block_of(pointer)) {
      Allocator::get().record_stream(*block, Scheduler::get().stream(stream));
    }
  }
};

} // namespace

void register_device_guard() {
  // The registry does not own its entries; torch wants them never to be destroyed.
  c10::impl::DeviceGuardImplRegistrar(c10::kPrivateUse1, new DeviceGuard());
}

} // namespace sidestream
