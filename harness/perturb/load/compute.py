"""The load ``compute``: keeps the multiprocessors busy with matrix multiplications."""

from __future__ import annotations

import contextlib

import torch

from harness.errors import InfrastructureError
from harness.perturb.load.device_load import BATCH_MS, Work

_SIZES = (4096, 2048, 1024, 512)
"""The first that fits. Larger ones hold every kernel of a case back for their whole length, since a kernel is handed
out only after all blocks of the one before; these fill the chip as well, in many short kernels."""


class Multiplications(Work):
    """Square matrices, large enough to fill the chip."""

    unit = "FLOP/s"

    def __init__(self, device: torch.device, memory_bytes: float) -> None:
        super().__init__(device, memory_bytes)
        dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
        # A generator of its own: the case's random numbers must not depend on the load.
        generator = torch.Generator(device).manual_seed(0)
        matrices = 2 + len(self.streams)
        for size in _SIZES:
            if size != _SIZES[-1] and matrices * size**2 * dtype.itemsize > memory_bytes:
                continue
            with contextlib.suppress(torch.cuda.OutOfMemoryError):
                self._left, self._right = (
                    torch.rand((size, size), device=device, generator=generator).to(dtype) for _ in range(2)
                )
                self._results = [torch.empty_like(self._left) for _ in self.streams]
                torch.cuda.current_stream().synchronize()
                self.amount = 2.0 * size**3
                if size == _SIZES[-1] or self.time_ms(1) <= BATCH_MS:
                    return
        raise InfrastructureError("its matrices do not fit into the memory that is left on the device.")

    def enqueue_piece(self, turn: int) -> None:
        """See :class:`Work`."""
        torch.mm(self._left, self._right, out=self._results[turn])
