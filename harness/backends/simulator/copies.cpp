#include "copies.h"

#include "launch.h"
#include "output_metadata.h"
#include "pinned_memory.h"
#include "streams.h"
#include "tensor_memory.h"

#include <ATen/ExpandUtils.h>
#include <ATen/ops/copy.h>

#include <memory>
#include <utility>
#include <vector>

namespace sidestream {
namespace {

struct CopyKernel final : Work {
  at::Tensor source;
  at::Tensor destination;
  bool pageable_source = false;

  // An asynchronous copy from pageable host memory is staged when it is enqueued; from pinned memory it is read when it runs.
  void stage() override {
    if (pageable_source) {
      BackendsOnly guard;
      source = source.clone();
    }
  }

  void run() override {
    BackendsOnly guard;
    destination.copy_(source);
  }
};

} // namespace

// The device that a copy runs on: the source's, or for a copy from the host the destination's.
// Between devices it is ordered with the current streams of both, see aten/src/ATen/native/cuda/Copy.cu in PyTorch.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& destination, bool non_blocking) {
  static const auto* name = intern("aten::copy_");
  TORCH_CHECK(
      at::is_expandable_to(self.sizes(), destination.sizes()),
      "The size of the tensor to copy, ", self.sizes(), ", does not match that of its destination, ", destination.sizes(), ".");
  if (destination.numel() == 0) {
    return destination;
  }
  const bool from_device = self.is_privateuseone();
  const bool to_device = destination.is_privateuseone();
  const auto device = (from_device ? self : destination).device().index();
  auto& scheduler = Scheduler::get();
  auto& stream = scheduler.stream(device, current_stream(device));
  CpuAliases aliases;
  auto kernel = std::make_unique<CopyKernel>();
  kernel->source = from_device ? aliases.of(self) : self;
  kernel->destination = to_device ? aliases.of(destination) : destination;
  kernel->pageable_source = !from_device && !is_pinned(self.storage().data());
  std::vector<Access> accesses;
  append_accesses(accesses, self, false);
  append_accesses(accesses, destination, true);
  Stream* other = nullptr;
  if (from_device && to_device && self.device() != destination.device()) {
    auto other_device = destination.device().index();
    other = &scheduler.stream(other_device, current_stream(other_device));
    scheduler.wait(stream, scheduler.record(*other));
  }
  aliases.forget();
  Launch launch{name, std::move(kernel), std::move(accesses)};
  if (!from_device || !to_device || other) {
    launch.copied_bytes = static_cast<int64_t>(destination.nbytes());
  }
  scheduler.submit(stream, std::move(launch));
  if (other) {
    scheduler.wait(*other, scheduler.record(stream));
  } else if ((!from_device || !to_device) && !non_blocking) {
    scheduler.synchronize_stream(stream);
  }
  return destination;
}

} // namespace sidestream
