// Who enqueues: the autograd node that is running, and the line of the caller's Python code.
#pragma once

#include "origin.h"

#include <cstdint>
#include <string>

namespace sidestream {

struct Caller {
  const std::string* node = nullptr; // null outside backward; interned, never freed
  const std::string* file = nullptr; // null where lines are not wanted or not known; interned, never freed
  int line = 0;
  Origin origin = {}; // of a launch
};

const std::string* intern(const std::string& text);

// What a traced launch, host synchronization, host access or free needs to know of its caller. May take the GIL when lines are wanted, so
// never call it with the simulator's lock held.
Caller describe_launch();
Caller describe_line();

// Of an operator on the host's own memory. As describe_launch, but the forward line of a node stays that of its launch.
Caller describe_host_access();

// Starts a repetition whose body runs on the calling thread, which holds the GIL: forgets the lines of the last repetition.
void start_lines(bool wanted);
// From here on no line is looked up.
void stop_lines();

} // namespace sidestream
