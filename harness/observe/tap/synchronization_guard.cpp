#include "synchronizations.h"

#include "forwarding_guard.h"
#include "issuer.h"

namespace sidestream {
namespace {

// Idle it only forwards: one load of an atomic more a call.
class SynchronizationGuard final : public ForwardingGuard {
 public:
  using ForwardingGuard::ForwardingGuard;

  void record(void** event, const Stream& stream, const DeviceIndex device, const c10::EventFlag flag) const override {
    const auto call = [&] { original()->record(event, stream, device, flag); };
    issue(SynchronizationKind::Record, key_of(stream), event, call);
  }

  void block(void* event, const Stream& stream) const override {
    const auto call = [&] { original()->block(event, stream); };
    if (!synchronizations().armed()) {
      return call(); // without the cost of wrapping what follows
    }
    const auto misdirected = [&] {
      // An event that the stream itself has passed already: the wait is made and orders nothing.
      void* other = nullptr;
      original()->record(&other, stream, stream.device_index(), c10::EventFlag::PYTORCH_DEFAULT);
      original()->block(other, stream);
      original()->destroyEvent(other, stream.device_index());
    };
    issue(SynchronizationKind::Wait, key_of(stream), &event, call, misdirected);
  }

  void synchronizeStream(const Stream& stream) const override {
    const auto call = [&] { original()->synchronizeStream(stream); };
    issue(SynchronizationKind::SynchronizeStream, key_of(stream), nullptr, call);
  }

  void synchronizeEvent(void* event) const override {
    const auto call = [&] { original()->synchronizeEvent(event); };
    issue(SynchronizationKind::SynchronizeEvent, {-1, 0}, &event, call);
  }

  void synchronizeDevice(const DeviceIndex device) const override {
    const auto call = [&] { original()->synchronizeDevice(device); };
    issue(SynchronizationKind::SynchronizeDevice, {device, 0}, nullptr, call);
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    const auto call = [&] { original()->recordDataPtrOnStream(data, stream); };
    issue(SynchronizationKind::RecordStream, key_of(stream), nullptr, call);
  }

 private:
  template <typename Call>
  static void issue(
      SynchronizationKind kind,
      StreamKey on,
      void* const* event,
      const Call& call,
      const std::function<void()>& misdirected = nullptr) {
    if (synchronizations().armed()) {
      synchronizations().issue(kind, on, nullptr, event, call, misdirected);
    } else {
      call();
    }
  }
};

const SynchronizationGuard* installed_guard = nullptr;

} // namespace

void install_synchronization_guard(c10::DeviceType type) {
  const auto* const current = c10::impl::getDeviceGuardImpl(type);
  if (current == installed_guard) {
    return;
  }
  if (installed_guard == nullptr || installed_guard->original() != current) {
    installed_guard = new SynchronizationGuard(current); // leaked: events keep a pointer to it
  }
  c10::impl::device_guard_impl_registry[static_cast<size_t>(type)].store(installed_guard);
}

void remove_synchronization_guard() {
  if (installed_guard == nullptr) {
    return;
  }
  auto& registered = c10::impl::device_guard_impl_registry[static_cast<size_t>(installed_guard->type())];
  const c10::impl::DeviceGuardImplInterface* expected = installed_guard;
  registered.compare_exchange_strong(expected, installed_guard->original());
}

} // namespace sidestream
