#include "copies.h"

#include "host_accesses.h"
#include "host_operators.h"
#include "launch.h"
#include "output_metadata.h"
#include "pinned_memory.h"
#include "streams.h"
#include "tensor_memory.h"

#include <ATen/ExpandUtils.h>
#include <ATen/ops/conj_physical.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/neg.h>

#include <memory>
#include <utility>
#include <vector>

namespace sidestream {
namespace {

thread_local bool within_operator_of_device = false;

struct CopyKernel final : Work {
  at::Tensor source;
  at::Tensor destination;
  bool source_is_read_at_enqueue = false;

  void stage() override {
    if (source_is_read_at_enqueue) {
      BackendsOnly guard;
      source = source.clone();
    }
  }

  void run() override {
    BackendsOnly guard;
    destination.copy_(source);
  }
};

void copy_between_devices(const at::Tensor& source, const at::Tensor& destination, const std::string* name) {
  const auto device = source.device().index();
  auto& scheduler = Scheduler::get();
  auto& stream = scheduler.stream(device, current_stream(device));
  CpuAliases aliases;
  auto kernel = std::make_unique<CopyKernel>();
  kernel->source = aliases.of(source);
  kernel->destination = aliases.of(destination);
  std::vector<Access> accesses;
  append_accesses(accesses, source, false);
  append_accesses(accesses, destination, true);
  Stream* other = nullptr;
  if (source.device() != destination.device()) {
    auto other_device = destination.device().index();
    other = &scheduler.stream(other_device, current_stream(other_device));
    scheduler.wait(stream, scheduler.record(*other));
  }
  aliases.forget();
  Launch launch{name, std::move(kernel), std::move(accesses)};
  if (other) {
    launch.copied_bytes = static_cast<int64_t>(destination.nbytes());
  }
  scheduler.submit(stream, std::move(launch));
  if (other) {
    scheduler.wait(*other, scheduler.record(stream));
  }
}

void copy_from_host(const at::Tensor& source, const at::Tensor& destination, bool non_blocking, const std::string* name) {
  const auto device = destination.device().index();
  auto& scheduler = Scheduler::get();
  auto& stream = scheduler.stream(device, current_stream(device));
  const bool is_read_when_it_runs =
      is_pinned(source.data_ptr()) && copies_host_memory_itself(source, source, destination, non_blocking);
  CpuAliases aliases;
  auto kernel = std::make_unique<CopyKernel>();
  std::vector<Access> accesses;
  if (is_read_when_it_runs) {
    kernel->source = aliases.of(source);
    append_accesses(accesses, source, false);
    if (non_blocking) {
      PinnedAllocator::get().record_use(source.storage().data_ptr(), source.data_ptr(), stream);
    }
  } else {
    kernel->source = source;
    kernel->source_is_read_at_enqueue = true;
    trace_host_access(name, source, false);
  }
  kernel->destination = aliases.of(destination);
  append_accesses(accesses, destination, true);
  aliases.forget();
  Launch launch{name, std::move(kernel), std::move(accesses)};
  launch.copied_bytes = static_cast<int64_t>(destination.nbytes());
  launch.with_host = !within_operator_of_device;
  scheduler.submit(stream, std::move(launch));
  if (!non_blocking) {
    scheduler.synchronize_stream(stream);
  }
}

void copy_to_host(const at::Tensor& source, const at::Tensor& destination, bool non_blocking, const std::string* name) {
  const auto device = source.device().index();
  auto& scheduler = Scheduler::get();
  auto& stream = scheduler.stream(device, current_stream(device));
  const bool is_written_when_it_runs =
      is_pinned(destination.data_ptr()) && copies_host_memory_itself(destination, source, destination, non_blocking);
  CpuAliases aliases;
  auto kernel = std::make_unique<CopyKernel>();
  kernel->source = aliases.of(source);
  std::vector<Access> accesses;
  append_accesses(accesses, source, false);
  if (is_written_when_it_runs) {
    kernel->destination = aliases.of(destination);
    kernel->destination._set_conj(source.is_conj());
    kernel->destination._set_neg(source.is_neg());
    append_accesses(accesses, destination, true);
    if (non_blocking) {
      PinnedAllocator::get().record_use(destination.storage().data_ptr(), destination.data_ptr(), stream);
    }
  } else {
    kernel->destination = destination;
  }
  aliases.forget();
  Launch launch{name, std::move(kernel), std::move(accesses)};
  launch.copied_bytes = static_cast<int64_t>(destination.nbytes());
  launch.with_host = !within_operator_of_device;
  scheduler.submit(stream, std::move(launch));
  // A copy to pageable memory returns when it is done, whatever was asked for.
  if (!non_blocking || !is_written_when_it_runs) {
    scheduler.synchronize_stream(stream);
  }
  if (!is_written_when_it_runs) {
    trace_host_access(name, destination, true);
    return;
  }
  // The bytes come as they are, and the host makes of them what they should be, at once: so does PyTorch, which waits no more for
  // an asynchronous copy here (torch 2.11 on an H200 gives the wrong value for `pinned.copy_(value.conj(), non_blocking=True)`).
  if (source.is_conj() != destination.is_conj()) {
    destination.conj_physical_();
  }
  if (source.is_neg() != destination.is_neg()) {
    destination.neg_();
  }
}

} // namespace

WithinOperatorOfDevice::WithinOperatorOfDevice() : was_within_(std::exchange(within_operator_of_device, true)) {}

WithinOperatorOfDevice::~WithinOperatorOfDevice() {
  within_operator_of_device = was_within_;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& destination, bool non_blocking) {
  static const auto* name = intern("aten::copy_");
  TORCH_CHECK(
      at::is_expandable_to(self.sizes(), destination.sizes()),
      "The size of the tensor to copy, ", self.sizes(), ", does not match that of its destination, ", destination.sizes(), ".");
  if (destination.numel() == 0) {
    return destination;
  }
  if (!self.is_privateuseone()) {
    copy_from_host(self, destination, non_blocking, name);
  } else if (!destination.is_privateuseone()) {
    copy_to_host(self, destination, non_blocking, name);
  } else {
    copy_between_devices(self, destination, name);
  }
  return destination;
}

} // namespace sidestream
