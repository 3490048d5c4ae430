"""The lab: what a case gets. Named streams, prepared inputs, poisoned tensors, staged observations.

A case enqueues; the lab compares after the body has been enqueued. That is what lets the same body run held, traced
or with a wait left out. One repetition ends where the next begins: the lab forgets everything but its streams and its
buffers.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

import torch

from harness.backends.select import Backend
from harness.errors import UsageError
from harness.judge.values import Observation
from harness.observe.instrument import Instrument, Recording, ignored_prefixes
from harness.observe.trace import SourceLine
from harness.perturb.plan import Plan

ELEMENTS = 256
"""Elements of a prepared tensor: enough that a partly stale read can be told from a wholly stale one."""

_DRAWS = 128
"""How many streams to ask for before giving up on one more distinct stream (CUDA hands out 32 a priority, in turn)."""


class StreamPool:
    """Distinct streams of each device, drawn once a process and lent to one lab after another.

    ``torch.Stream`` handles come from a pool and can alias (32 a priority on CUDA, 4 hardware queues on some ROCm;
    pytorch/pytorch#173729): two names for one stream would turn a case of two streams into a case of one.
    """

    def __init__(self, device_type: str, reserved: Collection[int] = ()) -> None:
        """``reserved`` are the ids of streams that the load uses."""
        self._device_type = device_type
        self._reserved = frozenset(reserved)
        self._streams: dict[int, list[torch.Stream]] = {}
        self._defaults: dict[int, torch.Stream] = {}

    def default(self, device: int) -> torch.Stream:
        """The default stream of a device; call it first where no other stream is current."""
        if device not in self._defaults:
            self._defaults[device] = torch.accelerator.current_stream(device)
        return self._defaults[device]

    def get(self, device: int, position: int) -> torch.Stream:
        """The ``position``-th distinct stream of a device.

        Raises:
            UsageError: the device has fewer distinct streams.
        """
        streams = self._streams.setdefault(device, [])
        for _ in range(_DRAWS):
            if len(streams) > position:
                break
            drawn = torch.Stream(f"{self._device_type}:{device}")
            taken = {stream.stream_id for stream in streams} | {self.default(device).stream_id}
            taken |= self._reserved
            if drawn.stream_id not in taken:
                streams.append(drawn)
        if len(streams) > position:
            return streams[position]
        raise UsageError(
            f"this case names {position + 1} streams on {self._device_type}:{device}, which has only {len(streams)} "
            "distinct ones: torch.Stream handles would alias, and the case would not test what it says."
        )


_Kept = TypeVar("_Kept")


@dataclass(slots=True)
class _Staged:
    """An observation whose copy has been enqueued."""

    observed: torch.Tensor
    sink: torch.Tensor
    expected: torch.Tensor
    line: SourceLine


def _another_object(stream: torch.Stream) -> torch.Stream:
    return type(stream)(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=int(stream.device_type)
    )


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def _devices(count: int) -> str:
    return "is only device 0" if count == 1 else f"are devices 0 to {count - 1}"


class Lab:
    """What a case works with; the fixture ``lab``."""

    def __init__(self, backend: Backend, instrument: Instrument, pool: StreamPool) -> None:
        self._backend = backend
        self._instrument = instrument
        self._pool = pool
        self._streams: dict[str, torch.Stream] = {}
        self._device_of: dict[str, int] = {}
        self._sinks: list[torch.Tensor] = []
        self._staged: list[_Staged] = []
        self._kept: list[object] = []
        self._observations = 0
        self._prepared_at = 0.0
        self.unprepared_ms = 0.0
        """How long the last repetition took from the end of its preparations to the end of its work: what a hold has
        to outlast."""
        self._constants: dict[tuple[str, torch.Size, torch.dtype], torch.Tensor] = {}
        self._ignored = tuple(ignored_prefixes())
        instrument.names.clear()
        self._defaults = [pool.default(device) for device in range(backend.device_count)]
        for device, default in enumerate(self._defaults):
            instrument.names.assign("default" if device == 0 else f"default.{device}", (device, default.stream_id))

    # What a case uses.

    @property
    def device(self) -> torch.device:
        """The accelerator under test: device 0 of its kind, as this process sees it."""
        return self._backend.device

    def stream(self, name: str, device: int = 0) -> torch.Stream:
        """The stream of that name, made at its first use; ``with lab.stream("fill") as fill:`` makes it current.

        Distinct names are distinct streams. ``default`` is the default stream. Each call gives an object of its own:
        until torch 2.9 one cannot be made current while it is current already, be it in another thread.

        Args:
            name: what reports and plans call it.
            device: index of the device.

        Raises:
            UsageError: there is no such device, or it has no further distinct stream, or the name would not be
                readable in a plan.
        """
        if device not in range(self._backend.device_count):
            raise UsageError(
                f"stream {name!r} is to be on device {device}, and there {_devices(self._backend.device_count)}: a "
                "case that needs more says so with @pytest.mark.devices(count)."
            )
        if name == "default":
            return _another_object(self._defaults[device])
        stream = self._streams.get(name)
        if stream is None:
            if not re.fullmatch(r"[\w.-]+", name):
                raise UsageError(
                    f"{name!r} cannot name a stream: plans are written with names of letters, digits, _ . and -."
                )
            if re.fullmatch(r"(stream\d+|default)(\.\d+)?", name):
                raise UsageError(f"{name!r} cannot name a stream: reports call streams without a name so.")
            position = sum(1 for other in self._streams.values() if other.device.index == device)
            stream = self._pool.get(device, position)
            self._streams[name] = stream
            self._device_of[name] = device
            self._instrument.names.assign(name, (device, stream.stream_id))
        elif self._device_of[name] != device:
            raise UsageError(
                f"stream {name!r} is on device {self._device_of[name]}: give the one on device {device} another name."
            )
        return _another_object(stream)

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Prepare inputs: what runs inside is neither held nor traced, and is complete when the block ends.

        Complete on the default streams and on those that the lab has named by then.
        """
        with self._instrument.preparing():
            yield
            self._synchronize()
        self._prepared_at = time.perf_counter()

    def product(self, left: float, right: float) -> tuple[torch.Tensor, torch.Tensor]:
        """A leaf filled with ``left`` and its product with ``right``, ready and synchronized.

        The multiplication, and so its autograd node and the leaf's, belong to the stream that is current.

        Returns:
            (leaf, product), each float32 of shape (256,).
        """
        with self.preparing():
            leaf = torch.full((ELEMENTS,), left, device=self.device, requires_grad=True)
            product = leaf * torch.full((ELEMENTS,), right, device=self.device)
        self._kept += [leaf, product]
        return leaf, product

    def poisoned(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor shaped like another that is NaN until the case has really written it.

        Its memory belongs to the stream that is current. The lab does not keep it: a case may give it up.
        """
        with self.preparing():
            return torch.full_like(like, float("nan"), requires_grad=False)

    def keep(self, thing: _Kept) -> _Kept:
        """Keep a tensor, or what holds tensors (a module, say), alive until all work of the repetition is complete.

        The variables of the function that observes are kept as it is; what other functions make, or what a variable
        held before, is freed at once. If another stream than the one it was allocated on may still use it then, that is
        a race of its own ("freed while in use").
        """
        self._kept.append(thing)
        return thing

    def observe(self, tensor: torch.Tensor | None, expected: float | torch.Tensor) -> None:
        """Copy a tensor on the current stream, without host synchronization; the harness compares it later, bit by bit.

        A tensor on the host is copied at once, by the host: the case reads it here. One on the device is overwritten
        after the repetition, with NaN (other types than floating-point ones with -1): its memory is used again in the
        next one, where a stale read must not find the value that was right this time.

        Args:
            tensor: what the case would use here.
            expected: its value; a number means a tensor full of it.

        Raises:
            UsageError: there is no tensor (a gradient that backward never made).
        """
        frame = self._caller()
        line = SourceLine(frame.f_code.co_filename, frame.f_lineno)
        # The frame keeps the body's variables: that they die when the body returns is no part of the pattern.
        self._kept.append(frame)
        if tensor is None:
            raise UsageError(
                f"{line}: there is nothing to observe, the tensor is None (a gradient that was not made?)."
            )
        observed = tensor.detach()
        position = len(self._staged)
        if position == len(self._sinks) or not _alike(self._sinks[position], observed):
            # Made once a case, outside what is traced, so that observing does not disturb the allocator under test.
            with self.preparing():
                self._sinks[position:] = [torch.empty_like(observed, memory_format=torch.contiguous_format)]
        sink = self._sinks[position]
        sink.copy_(observed, non_blocking=True)
        self._staged.append(_Staged(observed, sink, self._constant(expected, observed), line))

    # What the campaign uses.

    def begin(self, plan: Plan, **settings: Any) -> None:
        """Start a repetition; the settings are those of ``Instrument.begin``."""
        self._staged.clear()
        self._prepared_at = time.perf_counter()
        self._instrument.begin(plan, **settings)

    def finish(self) -> tuple[Recording, list[Observation]]:
        """End the repetition; all work is complete afterwards."""
        recording = self._instrument.finish()
        self.unprepared_ms = (time.perf_counter() - self._prepared_at) * 1e3
        self._observations = len(self._staged)
        # What the body enqueued without PyTorch's knowledge, on streams that it has from the lab.
        self._synchronize()
        observations = [
            Observation(f"observation {number}", staged.line, staged.expected.cpu(), staged.sink.cpu())
            for number, staged in enumerate(self._staged)
        ]
        self._spoil_observed()
        # Only now: what the case observed or was given must not be freed, and its memory reused, while it runs.
        self._kept.clear()
        self._staged.clear()
        return recording, observations

    def _spoil_observed(self) -> None:
        for observed in (staged.observed for staged in self._staged):
            if observed.device.type != self.device.type:
                continue
            # An expanded tensor has many elements in one place, where a write would be refused.
            once = observed[tuple(slice(1) if stride == 0 else slice(None) for stride in observed.stride())]
            once.fill_(float("nan") if once.is_floating_point() or once.is_complex() else -1)
        if self._staged:
            torch.accelerator.current_stream().synchronize()

    def _synchronize(self) -> None:
        # Not the whole device: that would wait for the load as well.
        for stream in (*self._streams.values(), *self._defaults):
            stream.synchronize()

    @property
    def observations(self) -> int:
        """How many observations the last repetition staged."""
        return self._observations

    def stream_names(self) -> list[str]:
        """Every stream name that a plan may use here."""
        return self._instrument.names.names()

    def _constant(self, expected: float | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        if isinstance(expected, torch.Tensor):
            return expected
        key = (repr(expected), like.shape, like.dtype)  # as text, since 0.0 and -0.0 are equal but not the same bits
        if key not in self._constants:
            self._constants[key] = torch.full(like.shape, expected, dtype=like.dtype)
        return self._constants[key]

    def _caller(self) -> FrameType:
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(self._ignored):
            frame = frame.f_back
        return frame
