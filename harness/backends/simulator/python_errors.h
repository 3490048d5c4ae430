// Errors that come from Python kernels.
#pragma once

#include <exception>

namespace sidestream {

// Whether the error is a Python NotImplementedError: a Python meta kernel's way to say that there is none for such arguments.
bool is_python_not_implemented(const std::exception& error);

} // namespace sidestream
