// The operators of the simulated device.
#pragma once

#include <cstdint>

namespace sidestream {

void register_operators();

// Keeps the current stream busy for a number of cycles, which a simulated device does not spend: a launch without accesses.
void sleep(int64_t cycles);

} // namespace sidestream
