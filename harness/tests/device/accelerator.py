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

from harness.backends.real import RealBackend
from harness.backends.select import SimulatedBackend, open_backend

BUSY_MS = 50.0
"""How long a busy stream of a real device stays busy: longer than the host takes for all that a test enqueues."""

PACKAGE_ROOT = Path(__file__).parents[3]


class Accelerator:
    """One kind of device. Tensors and streams are those of device 0 unless a test says otherwise."""

    def __init__(self, name: str) -> None:
        """Open the device.

        Args:
            name: ``sim``, ``cuda`` or ``cuda:N``, as ``--device`` means it here.
        """
        torch.set_num_threads(1)
        self.name = name
        self.backend = open_backend(name)
        self.type = self.backend.device.type
        self.device_count = self.backend.device_count
        self._cycles_per_ms = 0.0
        if isinstance(self.backend, RealBackend):
            self._cycles_per_ms = self.backend.calibrate_sleep_cycles_per_ms()

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

        A stream that nobody waits for stays busy to the end of the block, and at that end everything is complete. On a
        real device a sleep of :data:`BUSY_MS` keeps the stream busy, so a block must not do anything slow; on the
        simulator a launch that the scheduler holds back.
        """
        self.keep_busy(*streams)
        try:
            yield
        finally:
            if isinstance(self.backend, SimulatedBackend):
                self.backend.native.finish_repetition()
            else:
                self.backend.synchronize()

    def keep_busy(self, *streams: torch.Stream) -> None:
        """Like :meth:`busy`, for a process that ends before the streams have gone on."""
        self.backend.synchronize()
        if isinstance(self.backend, SimulatedBackend):
            holds = [(stream.device_index, stream.stream_id, 0) for stream in streams]
            self.backend.native.begin_repetition(holds, False, False)
        self._sleep(streams, int(BUSY_MS * self._cycles_per_ms))

    def _sleep(self, streams: tuple[torch.Stream, ...], cycles: int) -> None:
        for stream in streams:
            # Another object, since before torch 2.13 one and the same cannot be entered twice.
            with torch.Stream(
                stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
            ):
                self.module._sleep(cycles)

    def run_script(self, script: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Runs a script in a process of its own, in which ``accelerator`` is this device."""
        prelude = f"""
            import torch
            from harness.tests.device.accelerator import Accelerator
            accelerator = Accelerator({self.name!r})
        """
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(script)],
            cwd=PACKAGE_ROOT,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
