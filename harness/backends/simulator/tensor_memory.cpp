#include "tensor_memory.h"

#include "allocator.h"
#include "output_metadata.h"
#include "pinned_memory.h"
#include "sparse.h"

#include <c10/core/DispatchKeySet.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/SmallVector.h>

#include <algorithm>

namespace sidestream {
namespace {

constexpr int64_t kMostRuns = 4096;

struct Dimension {
  int64_t size;
  int64_t stride;
};

} // namespace

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
  if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0) {
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
  const auto item = static_cast<int64_t>(tensor.element_size());
  const auto start = storage_start + tensor.storage_offset() * item;
  if (tensor.is_contiguous()) {
    accesses.push_back({block, start, start + tensor.numel() * item, write});
    return;
  }
  // Dimensions from the innermost on, in bytes, without those that do not move.
  c10::SmallVector<Dimension, 8> dimensions;
  for (int64_t d = 0; d < tensor.dim(); d++) {
    if (tensor.size(d) > 1 && tensor.stride(d) != 0) {
      dimensions.push_back({tensor.size(d), tensor.stride(d) * item});
    }
  }
  std::sort(dimensions.begin(), dimensions.end(), [](const Dimension& a, const Dimension& b) { return a.stride < b.stride; });
  int64_t run = item;
  size_t inner = 0;
  while (inner < dimensions.size() && dimensions[inner].stride <= run) {
    // Adjacent or overlapping: one longer run.
    run += (dimensions[inner].size - 1) * dimensions[inner].stride;
    inner++;
  }
  int64_t runs = 1;
  int64_t last = 0;
  for (size_t d = inner; d < dimensions.size(); d++) {
    last += (dimensions[d].size - 1) * dimensions[d].stride;
    runs = runs > kMostRuns ? runs : runs * dimensions[d].size;
  }
  if (runs > kMostRuns) {
    accesses.push_back({block, start, start + last + run, write});
    return;
  }
  std::vector<int64_t> starts{start};
  starts.reserve(static_cast<size_t>(runs));
  for (size_t d = inner; d < dimensions.size(); d++) {
    auto known = starts.size();
    for (int64_t i = 1; i < dimensions[d].size; i++) {
      for (size_t k = 0; k < known; k++) {
        starts.push_back(starts[k] + i * dimensions[d].stride);
      }
    }
  }
  std::sort(starts.begin(), starts.end());
  auto from = starts.front();
  auto to = from + run;
  for (auto next : starts) {
    if (next > to) {
      accesses.push_back({block, from, to, write});
      from = next;
    }
    to = std::max(to, next + run);
  }
  accesses.push_back({block, from, to, write});
}

} // namespace sidestream
