"""The load ``launch``: a storm of kernels that do next to nothing."""

from __future__ import annotations

import torch

from harness.perturb.load.device_load import Work


class Launches(Work):
    """Kernels of one element each."""

    unit = "launches/s"

    def __init__(self, device: torch.device, memory_bytes: float) -> None:
        super().__init__(device, memory_bytes)
        self._values = [torch.zeros(1, device=device) for _ in self.streams]

    def enqueue_piece(self, turn: int) -> None:
        """See :class:`Work`."""
        self._values[turn].zero_()
