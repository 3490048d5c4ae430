"""Python's ways to read a CPU tensor's memory that are no operators, so that nothing but they can say so.

Each counts as a read of the tensor when it is called. What is done afterwards with an array that shares the memory is
not seen, unless it becomes a tensor again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

METHODS = ("numpy", "tolist", "__dlpack__", "__reduce_ex__")
"""``__array__`` and printing go through these or through operators."""


def report_to(native: ModuleType) -> Callable[[], None]:
    """Make these methods of ``torch.Tensor`` report to a native trace; outside a repetition they cost a call.

    Args:
        native: its ``trace_host_read(operation, tensor)`` receives each read.

    Returns:
        A function that restores the methods as they were.
    """
    saved = {method: (torch.Tensor.__dict__.get(method), getattr(torch.Tensor, method)) for method in METHODS}
    for method, (_, read) in saved.items():
        setattr(torch.Tensor, method, _reporting(native.trace_host_read, method, read))

    def restore() -> None:
        for method, (own, _) in saved.items():
            if own is None:
                delattr(torch.Tensor, method)  # it was inherited
            else:
                setattr(torch.Tensor, method, own)

    return restore


def _reporting(
    trace_host_read: Callable[[str, torch.Tensor], None], method: str, read: Callable[..., Any]
) -> Callable[..., Any]:
    operation = f"Tensor.{method}"

    @functools.wraps(read)
    def reporting(self: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        trace_host_read(operation, self)
        return read(self, *arguments, **keywords)

    return reporting
