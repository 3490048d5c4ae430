// Who issued a synchronization: the caller's Python code, or a C++ function of PyTorch.
#pragma once

#include <string>

namespace sidestream {

// What innermost function on this thread's stack issued the call that the tap sees: "user" where Python code comes
// first, else the function of PyTorch, without its namespace and arguments ("InputBuffer::add"), or, where it has no
// symbol, what follows by exclusion. Interned. Costs some ten microseconds.
const std::string* current_issuer();

// What `current_issuer` says for the caller's code.
const std::string* user_issuer();

} // namespace sidestream
