"""What the loads ``h2d`` and ``d2h`` share: copies between the host and the device, pinned and pageable by turns."""

from __future__ import annotations

import torch

from harness.perturb.load.device_load import Work, largest_that_fits

_MOST_BYTES = 2**24


class Copies(Work):
    """Copies in one direction: on the first stream of pinned memory, on the second of pageable memory.

    Each batch has as many of one as of the other, since the streams take turns. Of pageable memory the thread waits for
    the copy, without the GIL.
    """

    unit = "B/s"
    to_device: bool

    def __init__(self, device: torch.device, memory_bytes: float) -> None:
        super().__init__(device, memory_bytes)
        elements = largest_that_fits(memory_bytes, len(self.streams), _MOST_BYTES)
        self._on_device = [torch.zeros(elements, dtype=torch.uint8, device=device) for _ in self.streams]
        self._on_host = [
            torch.zeros(elements, dtype=torch.uint8, pin_memory=True),
            torch.zeros(elements, dtype=torch.uint8),
        ]
        self.amount = float(elements)

    def enqueue_piece(self, turn: int) -> None:
        """See :class:`Work`."""
        here, there = self._on_host[turn], self._on_device[turn]
        source, target = (here, there) if self.to_device else (there, here)
        target.copy_(source, non_blocking=True)
