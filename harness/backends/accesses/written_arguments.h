// Which arguments of an operator a call of it writes.
#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

#include <cstddef>
#include <vector>

namespace sidestream {

struct WrittenArguments {
  std::vector<bool> by_schema; // one an argument
  // Running statistics of a batch normalization, which it updates in training whether the schema says so (as newer ones do, which
  // call them written in evaluation as well) or not.
  std::vector<bool> statistics; // one an argument
  int training = -1; // the argument that says whether it is in training; negative if it always is

  bool has(size_t position, c10::ArrayRef<c10::IValue> call) const;
};

WrittenArguments written_arguments_of(const c10::FunctionSchema& schema);

} // namespace sidestream
