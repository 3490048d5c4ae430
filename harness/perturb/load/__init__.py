"""Load: work that competes with the case for the machine while repetitions run.

On a device it runs in the process under test, since kernels of two processes do not overlap on one GPU without MPS, on
streams of its own. Each dimension is one file. What a load achieves beside the cases is reported with what it achieves
alone: utilisation, as NVML counts it, proves nothing, since a sleeping kernel counts as busy.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from harness.errors import UsageError

DIMENSIONS = {
    "compute": "matrix multiplications that fill the chip",
    "memory": "reads and writes of device memory",
    "h2d": "copies to the device, from pinned and from pageable memory",
    "d2h": "copies to the host, into pinned and into pageable memory",
    "alloc": "allocations and frees in the caching allocator",
    "launch": "a storm of tiny kernels",
    "streams": "small kernels on many streams",
    "host": "busy processes on the CPU, and a thread that keeps taking the GIL",
}
"""The dimensions of load, each with what it does."""

MIXED = "mixed"
"""In place of dimensions: each of them in turn, for a moment, with quiet moments between them."""

DEFAULT_MEMORY_MIB = 1024.0
_UNITS_MIB = {"": 1.0, "MiB": 1.0, "GiB": 1024.0}


class Wanted(NamedTuple):
    """One dimension of load, and which share of the time it is busy; written ``alloc:0.5``."""

    dimension: str
    intensity: float = 1.0

    def __str__(self) -> str:
        return self.dimension if self.intensity == 1.0 else f"{self.dimension}:{self.intensity:g}"


def parse_loads(text: str) -> list[Wanted]:
    """The dimensions that ``--load`` names, separated by commas.

    Raises:
        UsageError: there is no such dimension or intensity, one is named twice, or none is.
    """
    wanted = [_parse(part, text) for part in map(str.strip, text.split(",")) if part]
    names = [each.dimension for each in wanted]
    if not names:
        raise _unknown(text, "names nothing")
    if MIXED in names and len(names) > 1:
        raise UsageError(f"--load {text!r}: mixed is every dimension in turn; name it alone.")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"--load {text!r}: {twice} is named twice; name each dimension once.")
    return wanted


def _parse(part: str, text: str) -> Wanted:
    name, separator, intensity = part.partition(":")
    if name not in DIMENSIONS and name != MIXED:
        raise _unknown(text, f"{name!r} is unknown")
    if not separator:
        return Wanted(name)
    if re.fullmatch(r"\d*\.?\d+", intensity) is None or not 0 < float(intensity) <= 1:
        raise UsageError(f"--load {text!r}: an intensity is the share of the time, above 0 and up to 1: {name}:0.5.")
    return Wanted(name, float(intensity))


def _unknown(text: str, what: str) -> UsageError:
    valid = "; ".join(f"{name} ({effect})" for name, effect in DIMENSIONS.items())
    return UsageError(f"--load {text!r}: {what}. Dimensions of load: {valid}; or mixed, each in turn.")


def dimensions_of(wanted: list[Wanted], device_type: str) -> list[Wanted]:
    """The dimensions that are meant, ``mixed`` spelled out.

    Args:
        wanted: what ``--load`` names.
        device_type: where they are to run: ``sim``, ``cuda``, ...
    """
    if [each.dimension for each in wanted] != [MIXED]:
        return wanted
    names = ["host"] if device_type == "sim" else list(DIMENSIONS)
    return [Wanted(name, wanted[0].intensity) for name in names]


def require_device(wanted: list[Wanted], device_type: str) -> None:
    """Refuse a load that the device has no use for.

    Raises:
        UsageError: it is simulated or of another kind, and the load is not that of the host.
    """
    refused = [each.dimension for each in wanted if each.dimension not in ("host", MIXED)]
    if device_type == "cuda" or not refused:
        return
    names = ",".join(refused)
    if device_type == "sim":
        raise UsageError(
            f"--load {names} needs a real device: simulated time has nothing to compete for, and the plans already "
            "decide what runs late. Use --load host, or --device cuda."
        )
    raise UsageError(f"--load {names} runs on CUDA and ROCm devices, not on {device_type}: use --load host.")


def parse_memory_mib(text: str) -> float:
    """The memory that ``--load-memory`` names: ``512MiB``, ``2GiB``, or a number of MiB.

    Raises:
        UsageError: it names none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(MiB|GiB)?", text)
    mib = float(match[1]) * _UNITS_MIB[match[2] or ""] if match is not None else 0.0
    if mib < 1:
        raise UsageError(f"--load-memory {text!r} is no amount of memory from 1 MiB on: write 512MiB or 2GiB.")
    return mib
