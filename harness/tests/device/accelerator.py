"""The device under test, as the conformance tests see it: the same on CUDA and on the simulator.

The tests say what is true on CUDA, and the simulator has to pass them as they are.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

from harness.backends import simulator
from harness.backends.real import RealBackend
from harness.backends.select import open_backend
from harness.perturb.schedule import Schedule, SubmissionOrder, VirtualTime

BUSY_MS = 50.0
"""How long a busy stream stays busy: longer than the host takes for all that a test enqueues meanwhile."""

PACKAGE_ROOT = Path(__file__).parents[3]


SCHEDULES: dict[str, Schedule] = {"submission": SubmissionOrder(), "virtual-time": VirtualTime()}
"""The schedules under which the simulator has to pass. The others let a stream go on when they like."""

_SIMULATED_CYCLES_PER_MS = 2e6


class Accelerator:
    """One kind of device. Tensors and streams are those of device 0 unless a test says otherwise."""

    def __init__(self, name: str, schedule: str | None = None) -> None:
        """Open the device.

        Args:
            name: ``sim``, ``cuda`` or ``cuda:N``, as ``--device`` means it here.
            schedule: on the simulator, which of :data:`SCHEDULES` decides when launches run. It stays in force.
        """
        torch.set_num_threads(1)
        self.name = name
        self.schedule = schedule
        self.backend = open_backend(name)
        self.type = self.backend.device.type
        self.device_count = self.backend.device_count
        self.sleep_takes_time = schedule != "submission"
        self._cycles_per_ms = _SIMULATED_CYCLES_PER_MS
        if isinstance(self.backend, RealBackend):
            self._cycles_per_ms = self.backend.calibrate_sleep_cycles_per_ms()
        if schedule is not None:
            simulator.set_schedule(SCHEDULES[schedule])

    @property
    def module(self) -> ModuleType:
        """The device's module: ``torch.cuda`` or ``torch.sim``."""
        return torch.get_device_module(self.type)  # type: ignore[no-any-return]

    def device(self, index: int = 0) -> torch.device:
        """One of the devices."""
        return torch.device(self.type, index)

    def full(self, value: float, size: int = 256, index: int = 0) -> torch.Tensor:
        """A tensor with that value in every element, complete when this returns."""
        tensor = torch.full((size,), value, device=self.device(index))
        self.backend.synchronize()
        return tensor

    def streams(self, count: int, index: int = 0) -> list[torch.Stream]:
        """Distinct pool streams of a device, each with memory at hand: an allocation from the driver can wait."""
        found = [torch.Stream(device=self.device(index)) for _ in range(count)]
        assert len({stream.stream_id for stream in found}) == count
        for stream in found:
            with stream:
                torch.empty(1, device=self.device(index))
        return found

    def default_stream(self, index: int = 0) -> torch.Stream:
        """The default stream of a device."""
        device_type = torch.accelerator.current_stream(index).device_type
        return torch.Stream(stream_id=0, device_index=index, device_type=device_type)

    @contextlib.contextmanager
    def busy(self, *streams: torch.Stream) -> Iterator[None]:
        """Keeps streams from going on with what is enqueued on them after this, until the host waits for it.

        A stream that nobody waits for stays busy to the end of the block, and at that end everything is complete. A
        sleep of :data:`BUSY_MS` keeps the stream busy, so a block must not do anything slow. Where a sleep takes no
        time, the simulator's scheduler holds it back instead.
        """
        self.keep_busy(*streams)
        try:
            yield
        finally:
            if not self.sleep_takes_time:
                self.backend.native.finish_repetition()  # type: ignore[attr-defined]
            self.backend.synchronize()

    def keep_busy(self, *streams: torch.Stream) -> None:
        """Like :meth:`busy`, for a process that ends before the streams have gone on."""
        self.backend.synchronize()
        if not self.sleep_takes_time:
            holds = [(stream.device_index, stream.stream_id, 0) for stream in streams]
            self.backend.native.begin_repetition(holds, False, False)  # type: ignore[attr-defined]
        for stream in streams:
            # Another object, since before torch 2.13 one and the same cannot be entered twice.
            with torch.Stream(
                stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
            ):
                self.sleep(BUSY_MS)

    def sleep(self, duration_ms: float) -> None:
        """Enqueues a sleep on the current stream."""
        self.module._sleep(int(duration_ms * self._cycles_per_ms))

    def run_script(self, script: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Runs a script in a process of its own, in which ``accelerator`` is this device."""
        prelude = f"""
            import torch
            from harness.tests.device.accelerator import Accelerator
            accelerator = Accelerator({self.name!r}, {self.schedule!r})
        """
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(script)],
            cwd=PACKAGE_ROOT,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
