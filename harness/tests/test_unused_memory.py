"""Memory that a caching allocator keeps and nobody uses is overwritten, and nothing else."""

from __future__ import annotations

from typing import Any

import torch

from harness.observe.unused_memory import overwrite
from harness.tests.simulator_support import registered


class Filling:
    """Stands for the tap of a real device, which fills memory there."""

    def __init__(self) -> None:
        self.filled: list[tuple[int, int, int]] = []

    def fill(self, device: int, address: int, size_bytes: int) -> None:
        self.filled.append((device, address, size_bytes))


def segment(device: int, *blocks: tuple[int, int, str], pool: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    made = [{"address": address, "size": size, "state": state} for address, size, state in blocks]
    return {"device": device, "segment_pool_id": pool, "blocks": made}


def test_what_nobody_uses_is_filled():
    registered()
    native = Filling()
    overwrite(
        native,
        [
            segment(0, (1000, 512, "active_allocated"), (1512, 256, "inactive"), (1768, 64, "active_pending_free")),
            segment(1, (5000, 128, "inactive")),
            segment(0, (9000, 128, "inactive"), pool=(0, 1)),
        ],
    )
    assert native.filled == [(0, 1512, 256), (0, 1768, 64), (1, 5000, 128)]
    assert torch.accelerator.current_stream(0).query()
