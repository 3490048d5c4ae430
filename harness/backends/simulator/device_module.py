"""The device module ``torch.sim``: what PyTorch and its users expect of ``torch.<device type>``.

Each function means what its namesake in ``torch.cuda`` means. :mod:`harness.backends.simulator.registration` gives it
the native extension and registers it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import ModuleType, TracebackType

import torch
from torch import Event as Event
from torch import Stream as Stream

_DeviceLike = torch.device | str | int | None

_native: ModuleType

_initialized = True
"""``torch.utils.checkpoint`` keeps the state of the random generators of devices that are in use alone."""

_SEED_MASK = 0xFFFF_FFFF_FFFF_FFFF
_initialized = True
"""For ``torch.utils.checkpoint``, which leaves the random numbers of a device alone that is not in use yet."""


def bind(native: ModuleType) -> None:
    """Gives the module its native side."""
    global _native
    _native = native


def is_available() -> bool:
    """Always: it needs no hardware."""
    return True


def is_initialized() -> bool:
    """Always: registering it is all the initialization there is."""
    return True


def init() -> None:
    """Nothing is left to initialize."""


def _lazy_init() -> None:
    pass


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    """Two."""
    return int(_native.device_count())


def current_device() -> int:
    """Index of the calling thread's current device."""
    return int(_native.current_device())


def set_device(device: _DeviceLike) -> None:
    """Makes a device current in the calling thread."""
    _native.exchange_device(_index(device))


def _exchange_device(device: int) -> int:
    return int(_native.exchange_device(device))


def _maybe_exchange_device(device: int) -> int:
    return int(_native.exchange_device(device))


class device:
    """Makes a device current for a ``with`` block."""

    def __init__(self, device: _DeviceLike) -> None:
        self._wanted = _index(device)
        self._previous = -1

    def __enter__(self) -> None:
        self._previous = _exchange_device(self._wanted)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _exchange_device(self._previous)


def get_device_name(device: _DeviceLike = None) -> str:
    """A name for people to read."""
    return f"simulated accelerator {_index(device)}"


def synchronize(device: _DeviceLike = None) -> None:
    """Waits for all work on a device."""
    torch.accelerator.synchronize(_index(device))


def current_stream(device: _DeviceLike = None) -> torch.Stream:
    """The calling thread's current stream on a device."""
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: _DeviceLike = None) -> torch.Stream:
    """A device's default stream, which is in no implicit order with its other streams."""
    index = _index(device)
    device_type = current_stream(index).device_type
    return torch.Stream(stream_id=0, device_index=index, device_type=device_type)


def set_stream(stream: torch.Stream) -> None:
    """Makes a stream, and its device, current in the calling thread."""
    torch.accelerator.set_stream(stream)


def stream(stream: torch.Stream) -> torch.Stream:
    """A context manager that makes the stream current; ``torch.Stream`` is one itself."""
    return stream


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The types that autocast may compute in, as on CUDA. Reentrant checkpoints ask for them as well."""
    return [torch.float16, torch.bfloat16]


def manual_seed(seed: int) -> None:
    """Seeds the current device's generator."""
    _native.manual_seed(current_device(), seed & _SEED_MASK)


def manual_seed_all(seed: int) -> None:
    """Seeds every device's generator."""
    for index in range(device_count()):
        _native.manual_seed(index, seed & _SEED_MASK)


def seed() -> None:
    """Seeds the current device's generator with a number that nobody chose."""
    manual_seed(int.from_bytes(os.urandom(8), "little"))


def seed_all() -> None:
    """Seeds every device's generator with one number that nobody chose."""
    manual_seed_all(int.from_bytes(os.urandom(8), "little"))


def initial_seed() -> int:
    """The seed of the current device's generator."""
    return int(_native.initial_seed(current_device()))


def get_rng_state(device: _DeviceLike = None) -> torch.Tensor:
    """State of a device's generator (bytes, on the host)."""
    return torch.frombuffer(bytearray(_native.get_rng_state(_index(device))), dtype=torch.uint8)


def set_rng_state(state: torch.Tensor, device: _DeviceLike = None) -> None:
    """Sets the state of a device's generator."""
    _native.set_rng_state(_index(device), bytes(state.tolist()))


def get_rng_state_all() -> list[torch.Tensor]:
    """State of every device's generator."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(states: Iterable[torch.Tensor]) -> None:
    """Sets the states of the devices' generators, from device 0 on."""
    for index, state in enumerate(states):
        set_rng_state(state, index)


def memory_stats(device: _DeviceLike = None) -> dict[str, int]:
    """Bytes by name: ``allocated_bytes.all.current`` (``.peak``, ``.allocated``, ``.freed``), ``active_bytes``, ..."""
    return dict(_native.memory_statistics(_index(device)))


def memory_allocated(device: _DeviceLike = None) -> int:
    """Bytes of live blocks, rounded up to the allocator's size classes (512 bytes)."""
    return memory_stats(device)["allocated_bytes.all.current"]


def max_memory_allocated(device: _DeviceLike = None) -> int:
    """The most that :func:`memory_allocated` has been since the last :func:`reset_peak_memory_stats`."""
    return memory_stats(device)["allocated_bytes.all.peak"]


def memory_reserved(device: _DeviceLike = None) -> int:
    """Bytes of live and cached blocks."""
    return memory_stats(device)["reserved_bytes.all.current"]


def max_memory_reserved(device: _DeviceLike = None) -> int:
    """The most that :func:`memory_reserved` has been since the last :func:`reset_peak_memory_stats`."""
    return memory_stats(device)["reserved_bytes.all.peak"]


def reset_peak_memory_stats(device: _DeviceLike = None) -> None:
    """Lets the peaks start again from what there is now."""
    _native.reset_peak_memory_statistics(_index(device))


def reset_accumulated_memory_stats(device: _DeviceLike = None) -> None:
    """Lets the sums of all allocations and frees start again from zero."""
    _native.reset_accumulated_memory_statistics(_index(device))


def mem_get_info(device: _DeviceLike = None) -> tuple[int, int]:
    """Free and total bytes of a device's memory, which is the host's."""
    _index(device)
    free_bytes, total_bytes = _native.memory_info()
    return free_bytes, total_bytes


def empty_cache() -> None:
    """Gives cached memory back to the system; waits for all work first, as ``cudaFree`` does."""
    _native.empty_cache()


def _sleep(cycles: int) -> None:
    """Occupies the current stream: a launch that touches no memory. The simulated device does not spend the cycles.

    Under the virtual-time schedule the stream's clock advances by a microsecond for every 2,000 of them.
    """
    _native.sleep(cycles)


def _index(device: _DeviceLike) -> int:
    """The index that a device means; the current device's for None and for a device without an index."""
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index
