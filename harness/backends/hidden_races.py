"""Settings of the environment that hide races or change what is observed.

Each is known from a public source:

- ``CUDA_LAUNCH_BLOCKING``, ``CUDA_DEVICE_MAX_CONNECTIONS``: CUDA Programming Guide, "CUDA Environment Variables"
  (docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html).
- ``CUDA_INJECTION64_PATH``: the CUPTI samples ``profiling_injection`` and ``cupti_trace_injection``.
- ``AMD_SERIALIZE_KERNEL``, ``AMD_SERIALIZE_COPY``, ``HIP_LAUNCH_BLOCKING``, ``GPU_MAX_HW_QUEUES``: "HIP environment
  variables" (rocm.docs.amd.com/projects/HIP/en/latest/reference/env_variables.html).
- ``UR_L0_SERIALIZE``: "Level Zero UR Reference Document" (oneapi-src.github.io/unified-runtime/core/LEVEL_ZERO.html).
- ``PYTORCH_NO_CUDA_MEMORY_CACHING``, ``PYTORCH_ALLOC_CONF`` and its aliases:
  docs.pytorch.org/docs/stable/cuda_environment_variables.html and notes/cuda.rst, "Memory management"; PyTorch reads
  the first by presence (c10/cuda/CUDACachingAllocator.cpp).
- ``TORCH_CUDA_SANITIZER``: torch/cuda/_sanitizer.py, turned on by presence in torch/__init__.py. Its dispatch mode
  makes ``isTensorSubclassLike`` true (aten/src/ATen/TensorSubclassLikeUtils.h), so the engine's ``InputBuffer``
  accumulates with ``add`` instead of ``add_``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from harness.errors import UsageError

_DEFAULT_CUDA_CONNECTIONS = 8
_DEFAULT_HIP_QUEUES = 4


class Finding(NamedTuple):
    """A setting that is in force and should not be, or should be known of."""

    setting: str
    """As it stands in the environment: ``CUDA_LAUNCH_BLOCKING=1``."""
    effect: str
    """One sentence: what it hides or changes."""
    refuse: bool
    """Whether a run under it would prove nothing."""


class _Setting(NamedTuple):
    name: str
    devices: tuple[str, ...]
    """The device types that it concerns."""
    in_force: Callable[[str], bool]
    effect: str
    refuse: bool


def _present(value: str) -> bool:
    return True


def _nonempty(value: str) -> bool:
    return value != ""


def _number(value: str) -> int | None:
    try:
        return int(value.strip())
    except ValueError:
        return None


def _nonzero(value: str) -> bool:
    return _number(value) not in {None, 0}


def _exactly(*numbers: int) -> Callable[[str], bool]:
    return lambda value: _number(value) in numbers


def _between(lowest: int, highest: int) -> Callable[[str], bool]:
    return lambda value: (number := _number(value)) is not None and lowest <= number <= highest


def _asynchronous_backend(value: str) -> bool:
    options = [part.replace(" ", "") for part in value.split(",")]
    return any(option in {"backend:cudaMallocAsync", "backend:hipMallocAsync"} for option in options)


_GPU = ("cuda",)
_SYNCHRONOUS = (
    "the host waits for every launch before it makes the next, so nothing ever overlaps and no race can show."
)
_ONE_QUEUE = "all streams share one hardware queue, so a held launch holds every other stream and nothing overtakes it."
_FEW_QUEUES = "streams beyond that number share a hardware queue, so a held launch may hold another stream as well."
_NO_CACHE = (
    "memory is given back to the driver at every free, which waits for the device, and is never reused across streams: "
    "races on reused memory cannot happen, and others are hidden by the wait."
)
_ASYNCHRONOUS_ALLOCATOR = (
    "memory is reused by the driver's own allocator, which orders the streams concerned itself, so a missing "
    "record_stream cannot show."
)

_SETTINGS = [
    _Setting("CUDA_LAUNCH_BLOCKING", _GPU, _nonzero, _SYNCHRONOUS, True),
    _Setting("HIP_LAUNCH_BLOCKING", _GPU, _nonzero, _SYNCHRONOUS, True),
    _Setting("AMD_SERIALIZE_KERNEL", _GPU, _nonzero, "the host waits at every kernel, so kernels never overlap.", True),
    _Setting(
        "AMD_SERIALIZE_COPY", _GPU, _nonzero, "the host waits at every copy, so no copy races with anything.", True
    ),
    _Setting("UR_L0_SERIALIZE", ("xpu",), _exactly(2, 3), "every call into the driver blocks; nothing overlaps.", True),
    _Setting("CUDA_DEVICE_MAX_CONNECTIONS", _GPU, _exactly(1), _ONE_QUEUE, True),
    _Setting("CUDA_DEVICE_MAX_CONNECTIONS", _GPU, _between(2, _DEFAULT_CUDA_CONNECTIONS - 1), _FEW_QUEUES, False),
    _Setting("GPU_MAX_HW_QUEUES", _GPU, _exactly(1), _ONE_QUEUE, True),
    _Setting("GPU_MAX_HW_QUEUES", _GPU, _between(2, _DEFAULT_HIP_QUEUES - 1), _FEW_QUEUES, False),
    _Setting("PYTORCH_NO_CUDA_MEMORY_CACHING", _GPU, _present, _NO_CACHE, False),
    _Setting("PYTORCH_NO_HIP_MEMORY_CACHING", _GPU, _present, _NO_CACHE, False),
    *(
        _Setting(name, _GPU, _asynchronous_backend, _ASYNCHRONOUS_ALLOCATOR, False)
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    ),
    _Setting(
        "TORCH_CUDA_SANITIZER",
        ("cuda", "xpu", "sim"),
        _present,
        "its dispatch mode makes the autograd engine accumulate gradients out of place, so the run would test another "
        "program (any value turns it on, 0 too).",
        True,
    ),
    _Setting(
        "CUDA_INJECTION64_PATH",
        _GPU,
        _nonempty,
        "a tool is loaded into CUDA; those that collect metrics or check memory run kernels one after another.",
        False,
    ),
]


def find(environ: Mapping[str, str], device: str) -> list[Finding]:
    """The settings in ``environ`` that hide races on a device or change what is observed there.

    Args:
        environ: the environment, such as ``os.environ``.
        device: ``cuda``, ``cuda:1``, ``xpu`` or ``sim``.
    """
    device_type = device.partition(":")[0]
    return [
        Finding(f"{setting.name}={environ[setting.name]}", setting.effect, setting.refuse)
        for setting in _SETTINGS
        if device_type in setting.devices and setting.name in environ and setting.in_force(environ[setting.name])
    ]


def refuse(environ: Mapping[str, str], device: str) -> None:
    """Refuse to run where that would prove nothing.

    Raises:
        UsageError: a setting in force hides races.
    """
    refused = [finding for finding in find(environ, device) if finding.refuse]
    if refused:
        raise UsageError(" ".join(f"{finding.setting} is set: {finding.effect} Unset it." for finding in refused))
