// Which line of the caller's Python code is running.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sidestream {

// A line of a file that `file_name` knows; no line if `file` is negative.
struct SourceLine {
  int32_t file = -1;
  int32_t line = 0;
  bool known() const {
    return file >= 0;
  }
};

std::string file_name(int32_t file);

// Files whose path starts with one of these are never the caller's.
void set_ignored_prefixes(std::vector<std::string> prefixes);

// The innermost line of the caller's code on this thread. Takes the GIL.
SourceLine current_line();

// Where the caller's code is to blame for the launch of an autograd node: in the node's own Python code if that is
// running (a custom Function, a hook), else at the forward operation that made the node, else where backward was
// called. Takes the GIL.
SourceLine line_in_backward(uint64_t forward_thread, uint64_t sequence_number);

// The same without the GIL, for callers that must not wait for it: the caller's line if this thread happens to hold the GIL,
// else that of the forward operation if an autograd node is running whose line is known, else none.
SourceLine line_without_taking_the_gil();

// Remembers that the node with this sequence number, made by this thread, belongs to `line`.
void note_forward_line(uint64_t forward_thread, uint64_t sequence_number, SourceLine line);
void forget_forward_lines();

} // namespace sidestream
