"""The load of a run: its dimensions together, or in turn; measured alone before anything else runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import torch

from harness.errors import InfrastructureError
from harness.perturb.load import DEFAULT_MEMORY_MIB, MIXED, Wanted, dimensions_of, nvml, require_device
from harness.perturb.load.history import History
from harness.perturb.load.load import Load, LoadReport
from harness.perturb.load.mixed import Rotation

ALONE_S = 0.5
"""How long the load is measured alone."""
_SETTLING_S = 0.1
"""How long it runs before that: clocks rise, queues fill."""


def make(wanted: Wanted, device: torch.device, memory_bytes: float, native: Any) -> Load:
    """The load of one dimension, not started."""
    if wanted.dimension == "host":
        from harness.perturb.load.host import HostLoad

        return HostLoad(wanted.intensity)
    from harness.perturb.load.alloc import Allocations
    from harness.perturb.load.compute import Multiplications
    from harness.perturb.load.d2h import Downloads
    from harness.perturb.load.device_load import DeviceLoad, Work
    from harness.perturb.load.h2d import Uploads
    from harness.perturb.load.launch import Launches
    from harness.perturb.load.memory import Sweeps
    from harness.perturb.load.streams import ManyStreams

    works: dict[str, type[Work]] = {
        "compute": Multiplications,
        "memory": Sweeps,
        "h2d": Uploads,
        "d2h": Downloads,
        "alloc": Allocations,
        "launch": Launches,
        "streams": ManyStreams,
    }
    return DeviceLoad(
        wanted.dimension,
        works[wanted.dimension],
        device,
        intensity=wanted.intensity,
        memory_bytes=memory_bytes,
        native=native,
    )


class Loads:
    """The load of a run, from ``start`` until ``stop``; a context manager as well."""

    def __init__(
        self,
        wanted: Sequence[Wanted],
        device: torch.device,
        native: Any = None,
        *,
        seed: int = 0,
        memory_mib: float = DEFAULT_MEMORY_MIB,
    ) -> None:
        """Prepare nothing yet.

        Args:
            wanted: what ``parse_loads`` gave.
            device: where to run.
            native: the native instrument (``harness.observe.tap``), told to ignore the threads of the load; None
                without one.
            seed: of the turns of ``mixed``.
            memory_mib: how much memory of the device all of them may use.

        Raises:
            UsageError: the device has no use for such a load.
        """
        require_device(list(wanted), device.type)
        self._device = device
        self._seed = seed
        self._in_turn = any(each.dimension == MIXED for each in wanted)
        self._wanted = dimensions_of(list(wanted), device.type)
        memory_bytes = memory_mib * 2**20 / max(1, sum(each.dimension != "host" for each in self._wanted))
        self._loads = [make(each, device, memory_bytes, native) for each in self._wanted]
        self._alone: list[float | None] = [None] * len(self._loads)
        self._rotation: Rotation | None = None
        self._history = History(self._loads)
        self._is_running = False

    @property
    def stream_ids(self) -> list[int]:
        """The ids of all their streams."""
        return [stream_id for load in self._loads for stream_id in load.stream_ids]

    def start(self) -> None:
        """Measure the load alone, then keep it running; returns once it runs.

        Raises:
            InfrastructureError: it cannot run, for want of memory for example.
        """
        if self._is_running:
            return
        try:
            for load in self._loads:
                load.start()
            for group in [[load] for load in self._loads] if self._in_turn else [self._loads]:
                self._measure_alone(group)
        except BaseException:
            with contextlib.suppress(InfrastructureError):
                self.stop()
            raise
        for load in self._loads:
            load.forget()
        if self._in_turn:
            self._rotation = Rotation(self._loads, self._seed)
        self._is_running = True
        self._history.start()
        self.resume()

    def _measure_alone(self, group: Sequence[Load]) -> None:
        for load in group:
            load.resume()
        time.sleep(_SETTLING_S)
        for load in group:
            load.forget()
        time.sleep(ALONE_S)
        for load in group:
            self._alone[self._loads.index(load)] = load.rate()
        for load in group:
            load.pause()

    def resume(self) -> None:
        """Run again after :meth:`pause`; returns once it does."""
        if self._rotation is not None:
            self._rotation.resume()
        elif self._is_running:
            for load in self._loads:
                load.resume()

    def pause(self) -> None:
        """Rest until :meth:`resume`; nothing is queued when this returns, and the time is not counted."""
        if self._rotation is not None:
            self._rotation.pause()
        elif self._is_running:
            for load in self._loads:
                load.pause()

    def report(self) -> list[LoadReport]:
        """What each dimension achieved since the start, and what it achieves alone."""
        information = nvml.describe(self._device) if self._device.type == "cuda" else ""
        return [
            LoadReport(
                each.dimension,
                each.intensity,
                load.unit,
                load.rate(),
                alone,
                load.least_share,
                information=information,
                history=self._history.rates(position),
            )
            for position, (each, load, alone) in enumerate(zip(self._wanted, self._loads, self._alone, strict=True))
        ]

    def stop(self) -> None:
        """Stop; nothing of it is left when this returns.

        Raises:
            InfrastructureError: a load failed meanwhile, or does not end; the others have stopped.
        """
        self._is_running = False
        self._history.stop()
        if self._rotation is not None:
            self._rotation.stop()
            self._rotation = None
        failure: InfrastructureError | None = None
        for load in self._loads:
            try:
                load.stop()
            except InfrastructureError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def __enter__(self) -> Loads:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
