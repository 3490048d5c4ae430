// Pinned host memory: asynchronous copies read and write it when they run, not when they are enqueued.
#pragma once

#include <c10/core/Allocator.h>

namespace sidestream {

c10::Allocator& pinned_allocator();
bool is_pinned(const void* pointer);

} // namespace sidestream
