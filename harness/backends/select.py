"""Which accelerator is under test: ``--device auto|cuda|cuda:N|sim``. One backend a process."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Protocol

import torch

from harness.errors import UsageError


class Backend(Protocol):
    """The accelerator under test."""

    device: torch.device

    @property
    def device_count(self) -> int: ...

    def describe(self) -> dict[str, str]:
        """What to print about it: device, runtime, driver."""
        ...

    def synchronize(self) -> None:
        """Wait for all work on every device."""
        ...


class SimulatedBackend:
    """The simulated accelerator: PyTorch's own engine and kernels, on streams whose scheduler the harness controls."""

    def __init__(self, native: Any) -> None:
        self.native = native
        self.device = torch.device("sim", 0)

    @property
    def device_count(self) -> int:
        return int(torch.accelerator.device_count())

    def describe(self) -> dict[str, str]:
        """See :class:`Backend`."""
        return {"device": f"simulated accelerator ({self.device_count} devices)"}

    def synchronize(self) -> None:
        """See :class:`Backend`."""
        for index in range(self.device_count):
            torch.accelerator.synchronize(index)


def resolve(option: str) -> str:
    """The device that an option value means here: ``sim``, ``cuda`` or ``cuda:N``.

    Raises:
        UsageError: the value names no device, or one that this machine does not have.
    """
    if option == "sim":
        return "sim"
    if option == "auto":
        return "cuda" if torch.cuda.is_available() else "sim"
    match = re.fullmatch(r"cuda(?::(\d+))?", option)
    if match is None:
        raise UsageError(f"--device {option} is unknown: use auto, cuda, cuda:N or sim.")
    if not torch.cuda.is_available():
        build = "this torch was built without CUDA" if not torch.backends.cuda.is_built() else "torch finds no GPU"
        raise UsageError(f"--device {option} needs a GPU and {build} here: use --device sim, or check nvidia-smi.")
    if match[1] is not None and int(match[1]) >= torch.cuda.device_count():
        raise UsageError(
            f"--device {option} does not exist: this machine has {torch.cuda.device_count()} GPU(s), counted from 0."
        )
    return option


def is_rocm() -> bool:
    """Whether CUDA means ROCm in this build of torch."""
    return torch.version.hip is not None


def open_backend(device: str, announce: Callable[[str], None] | None = None) -> Backend:
    """The backend of a resolved device; for ``sim`` it is built (once) and registered.

    Raises:
        UsageError: it cannot be built, or another backend has taken its place in this process.
    """
    if device == "sim":
        from harness.backends import simulator

        return SimulatedBackend(simulator.register(announce))
    from harness.backends.real import RealBackend

    return RealBackend(torch.device(device))
