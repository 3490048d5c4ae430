"""Where the simulator differs from CUDA on purpose, a sentence each. A test that is skipped for one of them says it."""

DIFFERENCES = {
    "sleep": "in submission order a sleep takes no time on the simulator, where only held launches wait; in virtual "
    "time it takes its cycles",
    "blocks": "the simulator reuses a block for allocations of the same size alone, the last freed first; CUDA's "
    "allocator cuts blocks from segments of 2 MiB and more, and joins them again",
    "memory": "free and total memory are those of the host, which both simulated devices share",
    "polling": "in submission order a stream goes on by itself when the host has asked 1,000 times if it is done",
    "errors": "a kernel that fails on the simulator raises at the next synchronization, by name, and what follows "
    "still runs; on CUDA a failed assertion makes the device unusable",
    "numbers": "the simulator's random numbers are those of PyTorch's CPU generator, not CUDA's for the same seed",
    "staging": "a non-blocking copy from pageable memory never waits for its stream on the simulator; CUDA's driver "
    "may, and was seen to above 64 KiB, so no program can rely on either",
    "priorities": "a priority chooses the pool and nothing else on the simulator; on CUDA it is a hint to the device",
    "graphs": "streams of the simulator cannot be captured into graphs, nor its events shared between processes",
}
