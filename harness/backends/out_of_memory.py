"""Memory that ran out says something about the machine, and nothing about the order of streams."""

from __future__ import annotations

import contextlib

import torch

from harness.backends.select import Backend

_SAID = ("DefaultCPUAllocator", "out of memory")
"""What the allocators say that raise a plain RuntimeError: that of the CPU, and those of pinned memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, of the device or of the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _SAID)


def describe_memory(backend: Backend) -> str:
    """What PyTorch has allocated on each device of a backend, in words."""
    module = torch.get_device_module(backend.device)
    said = []
    for index in range(backend.device_count):
        with contextlib.suppress(AttributeError, RuntimeError):
            allocated, reserved = module.memory_allocated(index), module.memory_reserved(index)
            free, total = module.mem_get_info(index)
            said.append(
                f"{backend.device.type}:{index}: {_mib(allocated)} allocated, {_mib(reserved)} reserved by PyTorch, "
                f"{_mib(free)} of {_mib(total)} free"
            )
    return "; ".join(said) or "what is allocated cannot be told here"


def _mib(number: int) -> str:
    return f"{number / (1 << 20):,.0f} MiB"
