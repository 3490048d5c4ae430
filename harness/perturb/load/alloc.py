"""The load ``alloc``: churn in the caching allocator that the cases use.

Its blocks belong to its own streams, so that no case is given one of them; what it competes for is the allocator's lock
and its segments. All blocks are allocated once at the start, so that no call to the driver is made later.
"""

from __future__ import annotations

import torch

from harness.perturb.load.device_load import Work

_SIZES_BYTES = (512, 1024, 2048, 8192, 2**16, 2**18, 2**20, 2**21, 2**22)
"""The size classes of the cases: lab tensors are of 1 KiB, their buffers of up to 4 MiB. Up to 1 MiB a block comes from
a segment of 2 MiB, beyond that from one of 20 MiB (c10/core/AllocatorConfig.h)."""


class Allocations(Work):
    """A block of each size class, allocated and given back in another order."""

    unit = "allocations/s"
    uses_tested_allocator = True

    def __init__(self, device: torch.device, memory_bytes: float) -> None:
        super().__init__(device, memory_bytes)
        fitting = [size for size in _SIZES_BYTES if size * 4 * len(self.streams) <= memory_bytes]
        self._sizes = fitting or list(_SIZES_BYTES[:1])
        self.amount = float(len(self._sizes))

    def enqueue_piece(self, turn: int) -> None:
        """See :class:`Work`."""
        blocks = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in self._sizes]
        # Every other one first, so that neighbours are split and joined.
        del blocks[::2]
        del blocks
