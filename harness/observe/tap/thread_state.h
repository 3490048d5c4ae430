// What the observers remember about the thread they run on.
#pragma once

#include "repetition.h"

namespace sidestream {

struct ThreadState {
  bool ignored = false; // a thread of the harness, such as a load: nothing it does belongs to the case
  int counted_depth = 0; // how many operations that stand for all launches inside them are running
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
