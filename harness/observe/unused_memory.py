"""Overwrites what a caching allocator keeps and nobody uses.

Memory that is used again still holds what was right the last time, so a stale read there looks right. What is handed
out is filled with NaN where it is handed out, but on a real device that comes too late for the output of a held launch:
the output is allocated inside the operation, behind the hold. So between repetitions everything that is unused is
filled, with zeros: it may have held indices, and an index out of range would make the device fail for good.
"""

from __future__ import annotations

from typing import Any

import torch

_IN_USE = "active_allocated"


def overwrite(native: Any, snapshot: list[dict[str, Any]]) -> None:
    """Fill unused memory; nothing may be running that uses what was freed.

    Args:
        native: the tap of the device; its ``fill(device, address, size_bytes)`` enqueues on the current stream.
        snapshot: what ``torch.cuda.memory_snapshot()`` gave.
    """
    filled = set()
    for segment in snapshot:
        if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
            continue  # of a captured graph, which may use it without asking the allocator
        for block in segment["blocks"]:
            if block["state"] != _IN_USE:
                native.fill(segment["device"], block["address"], block["size"])
                filled.add(segment["device"])
    for device in filled:
        torch.accelerator.current_stream(device).synchronize()
