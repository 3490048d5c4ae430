// What the host itself reads and writes of pinned memory, as entries of the trace.
//
// Operators on CPU tensors are seen by a callback of at::RecordFunction, which is installed only in a repetition and only while a
// pinned block is in use, so that it costs nothing otherwise; it changes nothing that dispatch or autograd looks at.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace sidestream {

// Installs or removes the callback; call it after a repetition began or ended, or a pinned block was handed out or freed, without
// the simulator's lock.
void update_host_observer();
bool observes_host();

// The host reads or writes the memory of a tensor now. Nothing where that is not pinned.
void trace_host_access(const std::string* operation, const at::Tensor& tensor, bool write);

// While it lives, the caller's own code runs on this thread although an operator does: what it calls counts for itself.
class OutsideOperator {
 public:
  OutsideOperator();
  ~OutsideOperator();
  OutsideOperator(const OutsideOperator&) = delete;
  OutsideOperator& operator=(const OutsideOperator&) = delete;

 private:
  bool was_within_;
};

} // namespace sidestream
