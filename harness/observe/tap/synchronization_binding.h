#pragma once

#include <pybind11/pybind11.h>

namespace sidestream {

void bind_synchronizations(pybind11::module_& module);

} // namespace sidestream
