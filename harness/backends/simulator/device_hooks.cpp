#include "device_hooks.h"

#include "allocator.h"
#include "pinned_memory.h"
#include "scheduler.h"
#include "streams.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <vector>
#include <utility>

namespace sidestream {
namespace {

// A generator of a simulated device: PyTorch's CPU generator, from which each launch draws its seed when it is enqueued.
class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  explicit DeviceGenerator(c10::DeviceIndex device, uint64_t seed = c10::default_rng_seed_val)
      : DeviceGenerator(device, c10::make_intrusive<at::CPUGeneratorImpl>(seed)) {}

  DeviceGenerator(c10::DeviceIndex device, c10::intrusive_ptr<at::CPUGeneratorImpl> numbers)
      : GeneratorImpl(c10::Device(c10::kPrivateUse1, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        numbers_(std::move(numbers)) {}

  uint64_t draw() { return numbers_->random64(); }

  void set_current_seed(uint64_t seed) override { numbers_->set_current_seed(seed); }
  void set_offset(uint64_t offset) override { numbers_->set_offset(offset); }
  uint64_t get_offset() const override { return numbers_->get_offset(); }
  uint64_t current_seed() const override { return numbers_->current_seed(); }
  uint64_t seed() override { return numbers_->seed(); }
  void set_state(const c10::TensorImpl& state) override { numbers_->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return numbers_->get_state(); }

 private:
  DeviceGenerator* clone_impl() const override {
    auto numbers = c10::make_intrusive<at::CPUGeneratorImpl>(numbers_->current_seed());
    numbers->set_state(*numbers_->get_state());
    return new DeviceGenerator(device_.index(), std::move(numbers));
  }

  c10::intrusive_ptr<at::CPUGeneratorImpl> numbers_;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &PinnedAllocator::get(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }

  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<DeviceGenerator>(checked_device(device));
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size_bytes) const override {
    resize_storage(storage, size_bytes);
  }
};

struct CopyBytes final : Work {
  CopyBytes(void* destination, const void* source, size_t count)
      : destination_(destination), source_(source), count_(count) {}
  void run() override { std::memcpy(destination_, source_, count_); }

 private:
  void* destination_;
  const void* source_;
  size_t count_;
};

} // namespace

void register_device_hooks() {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
}

void resize_storage(const c10::Storage& storage, size_t size_bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  TORCH_CHECK(impl->resizable(), "This storage cannot be resized.");
  auto device = storage.device().index();
  DeviceScope scope(device);
  auto memory = Allocator::get().allocate(size_bytes);
  auto kept = std::min(size_bytes, storage.nbytes());
  if (kept > 0) {
    auto& scheduler = Scheduler::get();
    Launch launch{intern("resize_storage"), std::make_unique<CopyBytes>(memory.get(), storage.data(), kept), {}};
    if (auto* source = Allocator::block_of(storage.data_ptr())) {
      launch.accesses.push_back({source, 0, static_cast<int64_t>(kept), false});
    }
    launch.accesses.push_back({Allocator::block_of(memory), 0, static_cast<int64_t>(kept), true});
    scheduler.submit(scheduler.stream(device, current_stream(device)), std::move(launch));
  }
  impl->set_data_ptr_noswap(std::move(memory));
  impl->set_nbytes(size_bytes);
}

at::Generator& default_generator(c10::DeviceIndex device) {
  static auto& generators = *new std::vector<at::Generator>([] {
    std::vector<at::Generator> made;
    for (c10::DeviceIndex index = 0; index < kDevices; index++) {
      made.push_back(at::make_generator<DeviceGenerator>(index));
    }
    return made;
  }());
  return generators[checked_device(device)];
}

std::string generator_state(at::Generator& generator) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  auto state = generator.unsafeGetGeneratorImpl()->get_state();
  return {static_cast<const char*>(state->data()), static_cast<size_t>(state->numel())};
}

void set_generator_state(at::Generator& generator, const std::string& bytes) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  auto* impl = generator.unsafeGetGeneratorImpl();
  auto state = impl->get_state();
  auto size_bytes = static_cast<size_t>(state->numel());
  TORCH_CHECK(
      size_bytes == bytes.size(), "The state of a generator has ", size_bytes, " bytes, not ", bytes.size(), ".");
  std::memcpy(state->mutable_data(), bytes.data(), bytes.size());
  impl->set_state(*state);
}

uint64_t draw_seed(c10::DeviceIndex device, const std::optional<at::Generator>& generator) {
  auto source = generator.has_value() && generator->defined() ? *generator : default_generator(device);
  TORCH_CHECK(
      source.device().type() == c10::kPrivateUse1,
      "Expected a 'sim' device type for generator but found '", source.device().type(), "'");
  std::lock_guard<std::mutex> lock(source.mutex());
  return static_cast<DeviceGenerator*>(source.unsafeGetGeneratorImpl())->draw();
}

} // namespace sidestream
