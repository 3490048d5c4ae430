// Where a launch comes from: the thread of the host that makes it, and the backward that it is part of.
#pragma once

#include <ATen/record_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cstdint>

namespace sidestream {

struct Origin {
  uint64_t thread = 0; // PyTorch's own number
  int64_t backward = -1; // the engine's number of the backward that is running on this thread, its callbacks included; -1 outside

  static Origin now() {
    return {at::RecordFunction::currentThreadId(), torch::autograd::get_current_graph_task_id()};
  }
};

} // namespace sidestream
