// What the observers remember about the thread they run on.
#pragma once

#include "repetition.h"

namespace sidestream {

class Running;

struct ThreadState {
  bool ignored = false; // a thread of the harness, such as a load: nothing it does belongs to the case
  int counted_depth = 0; // how many operations that stand for all launches inside them are running
  int host_depth = 0; // how many operations by which the host accesses memory are running
  Running* running = nullptr; // the operation of the innermost launch in the trace that is running
  LaunchEntry launch{}; // the innermost launch in the trace whose operation is running
};

inline ThreadState& this_thread() {
  static thread_local ThreadState state;
  return state;
}

inline bool observed() {
  return repetition().running() && !this_thread().ignored;
}

} // namespace sidestream
