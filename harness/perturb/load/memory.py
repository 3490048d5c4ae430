"""The load ``memory``: keeps the device's memory busy with reads and writes beyond its caches."""

from __future__ import annotations

import torch

from harness.perturb.load.device_load import Work, largest_that_fits

_MOST_BYTES = 2**28
"""Of one buffer: several times the largest cache of a GPU, in kernels of tenths of a millisecond."""


class Sweeps(Work):
    """A buffer read from one end to the other, and another written."""

    unit = "B/s"

    def __init__(self, device: torch.device, memory_bytes: float) -> None:
        super().__init__(device, memory_bytes)
        buffers = 2 * len(self.streams)
        elements = largest_that_fits(memory_bytes, 4 * buffers, _MOST_BYTES // 4)
        self._sources = [torch.zeros(elements, device=device) for _ in self.streams]
        self._targets = [torch.zeros(elements, device=device) for _ in self.streams]
        self.amount = 2.0 * 4 * elements  # read and written

    def enqueue_piece(self, turn: int) -> None:
        """See :class:`Work`."""
        # A kernel: copy_ of memory on one device is the copy engine's.
        torch.add(self._sources[turn], 1.0, out=self._targets[turn])
