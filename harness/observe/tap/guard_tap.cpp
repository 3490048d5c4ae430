#include "guard_tap.h"

#include <c10/core/Allocator.h>

#include <stdexcept>

#include "device.h"
#include "forwarding_guard.h"
#include "memory_reports.h"
#include "thread_state.h"

namespace sidestream {
namespace {

using c10::impl::DeviceGuardImplInterface;

class GuardTap final : public ForwardingGuard {
 public:
  using ForwardingGuard::ForwardingGuard;

  Stream exchangeStream(Stream stream) const override {
    if (observed()) {
      report_memory_of_this_thread(); // it may free what backward used without running any operation itself
    }
    return original()->exchangeStream(stream);
  }

  void record(void** event, const Stream& stream, const DeviceIndex device, const c10::EventFlag flag) const override {
    original()->record(event, stream, device, flag);
    if (observed()) {
      repetition().mark_used(stream.device_index());
      repetition().recorded(*event, key_of(stream), !repetition().preparing());
    } else if (repetition().running()) {
      repetition().recorded_unseen(*event);
    }
  }

  void block(void* event, const Stream& stream) const override {
    if (observed()) {
      report_memory_of_this_thread();
      repetition().mark_used(stream.device_index());
      repetition().waited(event, key_of(stream), !repetition().preparing());
    }
    original()->block(event, stream);
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    original()->recordDataPtrOnStream(data, stream);
    if (observed()) {
      repetition().stream_recorded(data.device().index(), data.get(), key_of(stream));
    }
  }

  bool queryEvent(void* event) const override {
    const bool complete = original()->queryEvent(event);
    if (observed()) {
      HostSync::of_event(event, !repetition().preparing()).asked(complete);
    }
    return complete;
  }

  bool queryStream(const Stream& stream) const override {
    const bool complete = original()->queryStream(stream);
    if (observed()) {
      HostSync::of_stream(key_of(stream), !repetition().preparing()).asked(complete);
    }
    return complete;
  }

  void synchronizeStream(const Stream& stream) const override {
    synchronize(HostSync::of_stream(key_of(stream), !repetition().preparing()), [&] {
      original()->synchronizeStream(stream);
    });
  }

  void synchronizeEvent(void* event) const override {
    synchronize(HostSync::of_event(event, !repetition().preparing()), [&] { original()->synchronizeEvent(event); });
  }

  void synchronizeDevice(const DeviceIndex device) const override {
    synchronize(HostSync::of_device(device, !repetition().preparing()), [&] { original()->synchronizeDevice(device); });
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

void install_guard_tap(c10::DeviceType type) {
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
