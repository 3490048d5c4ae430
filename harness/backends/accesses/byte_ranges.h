// The bytes that a tensor covers.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <vector>

namespace sidestream {

// Bytes [start, stop) from the start of a tensor's storage.
struct ByteRange {
  int64_t start;
  int64_t stop;
};

using ByteRanges = c10::SmallVector<ByteRange, 4>;

// The dense tensors that a tensor consists of: itself where it is dense, else indices and values.
std::vector<at::Tensor> parts_of(const at::Tensor& tensor);

// The bytes that a dense tensor covers, as maximal contiguous runs in ascending order; beyond 4096 runs, the range from the first
// to the last byte. None for a tensor without elements or without a storage; the whole storage of a nested one.
void byte_ranges_of(const at::Tensor& tensor, ByteRanges& ranges);

} // namespace sidestream
