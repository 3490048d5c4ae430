// The Python side of a caller: giving up the GIL around waits, and reading the caller's source line.
#pragma once

#include <string>
#include <vector>

namespace sidestream {

// Gives up the GIL for a scope if this thread holds it.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  void* state_;
};

struct SourceLine {
  const std::string* file = nullptr; // interned
  int line = 0;
};

// Files whose path starts with one of these are not the caller's own.
void set_ignored_prefixes(std::vector<std::string> prefixes);

// The innermost frame in a file of the caller's own; empty where there is none. These take the GIL.
SourceLine line_of_this_thread();
SourceLine line_of_body_thread();

// The thread that runs the body of the repetition: the one that calls backward. The first two need the GIL.
void remember_body_thread();
void forget_body_thread();
bool is_body_thread();

} // namespace sidestream
