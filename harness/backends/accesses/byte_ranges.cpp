#include "byte_ranges.h"

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>

#include <algorithm>

namespace sidestream {
namespace {

constexpr int64_t kMostRuns = 4096;

struct Dimension {
  int64_t size;
  int64_t stride;
};

} // namespace

std::vector<at::Tensor> parts_of(const at::Tensor& tensor) {
  if (tensor.layout() == c10::kStrided || tensor.is_nested()) {
    return {tensor};
  }
  if (tensor.layout() == c10::kSparse) {
    const auto* impl = static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
    return {impl->indices(), impl->values()};
  }
  const auto* impl = static_cast<at::SparseCsrTensorImpl*>(tensor.unsafeGetTensorImpl());
  return {impl->compressed_indices(), impl->plain_indices(), impl->values()};
}

void byte_ranges_of(const at::Tensor& tensor, ByteRanges& ranges) {
  if (!tensor.has_storage()) {
    return;
  }
  if (tensor.is_nested()) {
    ranges.push_back({0, static_cast<int64_t>(tensor.storage().nbytes())});
    return;
  }
  if (tensor.numel() == 0) {
    return;
  }
  const auto item = static_cast<int64_t>(tensor.element_size());
  const auto start = tensor.storage_offset() * item;
  if (tensor.is_contiguous()) {
    ranges.push_back({start, start + tensor.numel() * item});
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
    ranges.push_back({start, start + last + run});
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
      ranges.push_back({from, to});
      from = next;
    }
    to = std::max(to, next + run);
  }
  ranges.push_back({from, to});
}

} // namespace sidestream
