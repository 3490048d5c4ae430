// What the caching allocators of the device hand out and take back. The allocators of CUDA, ROCm and XPU, and the simulator's,
// tell a profiler of each block, if the thread has one (c10::reportMemoryUsageToProfiler, c10/core/Allocator.h): during a
// repetition it has one that passes it on. The threads of the autograd engine inherit it from the thread that called backward.
//
// A block is reported with the allocator's lock held, so whoever listens neither allocates nor takes the GIL.
#pragma once

namespace sidestream {

// Lets the allocators report what the calling thread does, until the repetition ends. If a profiler of somebody else's listens on
// this thread already, the repetition's memory is not seen.
void report_memory_of_this_thread();
// Ends it on the thread that began the repetition.
void begin_memory_reports();
void end_memory_reports();

// Whether blocks are to be filled with 0xFF when they are given back.
void set_poisoning(bool on);

} // namespace sidestream
