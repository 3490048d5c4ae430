#include "tensor_memory.h"

#include "allocator.h"
#include "byte_ranges.h"
#include "output_metadata.h"
#include "pinned_memory.h"
#include "sparse.h"

#include <c10/core/DispatchKeySet.h>
#include <c10/core/TensorImpl.h>

namespace sidestream {
at::Tensor CpuAliases::of(const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  for (const auto& [known, alias] : tensors_) {
    if (known == impl) {
      return alias;
    }
  }
  if (tensor.layout() != c10::kStrided) {
    std::vector<at::Tensor> parts;
    for (const auto& part : parts_of(tensor)) {
      parts.push_back(of(part));
    }
    BackendsOnly guard;
    tensors_.emplace_back(impl, with_parts(tensor, parts));
    return tensors_.back().second;
  }
  const auto& storage = impl->unsafe_storage();
  c10::Storage host;
  for (const auto& [known, alias] : storages_) {
    if (known == storage.unsafeGetStorageImpl()) {
      host = alias;
    }
  }
  if (!host) {
    host = c10::Storage(
        c10::Storage::use_byte_size_t(),
        storage.nbytes(),
        c10::DataPtr(const_cast<void*>(storage.data()), c10::Device(c10::kCPU)),
        nullptr,
        false);
    storages_.emplace_back(storage.unsafeGetStorageImpl(), host);
  }
  auto alias = at::detail::make_tensor<c10::TensorImpl>(
      std::move(host), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  alias._set_conj(tensor.is_conj());
  alias._set_neg(tensor.is_neg());
  tensors_.emplace_back(impl, alias);
  return alias;
}

void append_accesses(std::vector<Access>& accesses, const at::Tensor& tensor, bool write) {
  if (tensor.defined() && tensor.layout() != c10::kStrided) {
    for (const auto& part : parts_of(tensor)) {
      append_accesses(accesses, part, write);
    }
    return;
  }
  if (!tensor.defined() || !tensor.has_storage()) {
    return;
  }
  MemoryBlock* block = nullptr;
  int64_t storage_start = 0; // in the block: 0 but for host memory that something else refers to as well, such as a NumPy array
  const auto& storage = tensor.storage();
  if (tensor.is_cpu()) {
    block = PinnedAllocator::get().block_at(storage.data());
    storage_start = block ? static_cast<const char*>(storage.data()) - static_cast<const char*>(block->memory) : 0;
  } else {
    block = Allocator::block_of(storage.data_ptr());
  }
  if (!block) {
    return;
  }
  ByteRanges ranges;
  byte_ranges_of(tensor, ranges);
  for (const auto& range : ranges) {
    accesses.push_back({block, storage_start + range.start, storage_start + range.stop, write});
  }
}

} // namespace sidestream
