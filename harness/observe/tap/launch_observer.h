// Sees every launch on the device, in the threads of the autograd engine too, and enqueues holds before the launches
// that a plan names. It is a global RecordFunction callback and not a TorchDispatchMode, because an active mode makes
// the engine accumulate gradients out of place (torch::autograd::InputBuffer asks isTensorSubclassLike): the observer
// would change the observed. It sees as well where the host itself accesses pinned memory that copies have used.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>

#include <string>

#include "thread_state.h"

namespace sidestream {

void install_launch_observer(c10::DeviceType type);
void remove_launch_observer();

// The host reads this tensor now, by no operation that would be seen. Nothing where no copy has used the memory.
void observe_host_read(const std::string& operation, const at::Tensor& tensor);

// While it lives, the caller's own code runs on this thread, which packs a tensor that the operation around it saves for
// backward: what it does is not part of that operation, and comes before it if the tensor is an argument. Unless it succeeds, the
// operation ends there: so does checkpointing when it has recomputed enough.
class Packing {
 public:
  explicit Packing(const at::Tensor& saved);
  ~Packing();
  void succeeded() {
    succeeded_ = true;
  }
  Packing(const Packing&) = delete;
  Packing& operator=(const Packing&) = delete;

 private:
  ThreadState operation_;
  bool succeeded_ = false;
};

} // namespace sidestream
