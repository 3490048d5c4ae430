// Which dispatched operations launch work on the device.
#pragma once

#include <ATen/record_function.h>
#include <c10/core/DeviceType.h>

#include <optional>
#include <string>
#include <vector>

#include "written_arguments.h"

namespace sidestream {

struct Operation {
  std::string base_name; // aten::add
  const std::string* name = nullptr; // aten::add.Tensor
  size_t argument_count = 0;
  bool launches = false; // for strided tensors
  bool launches_other_layouts = false; // sparse, quantized, nested
  bool waits = false; // the host waits for the stream inside the operation, whatever its arguments
  bool works_on_host = false; // the host itself, on the memory of its CPU tensors
  bool stands_for_nested = false; // what it launches through other dispatched operations is part of it
  WrittenArguments written;
  size_t return_count = 0;
  // Positions of the arguments of a copy; negative for other operations.
  int copy_destination = -1;
  int copy_source = -1;
  int copy_non_blocking = -1;

  bool is_copy() const {
    return copy_source >= 0;
  }
};

// The operation that a range of the dispatcher belongs to; null for other ranges. Decided once an operation and thread.
const Operation* operation_of(const at::RecordFunction& range, c10::DeviceType type);

// The same by name, aten::add.Tensor; nothing if there is no such operation.
std::optional<Operation> decide_operation(const std::string& name, c10::DeviceType type);

// A string that lives as long as the process.
const std::string* interned(const std::string& text);

} // namespace sidestream
