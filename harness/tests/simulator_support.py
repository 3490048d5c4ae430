"""What the simulator's tests share: the registered simulator and repetitions on it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from harness.backends import simulator

PACKAGE_ROOT = Path(__file__).parents[2]


def registered() -> ModuleType:
    """The simulator's native module, with everything that these tests assume about the process."""
    native = simulator.register()
    torch.set_num_threads(1)
    native.set_ignored_prefixes([str(Path(torch.__file__).parent), str(Path(contextlib.__file__))])
    return native


class Repetition:
    """What one repetition left: its raw entries and the outcomes of its holds."""

    entries: list[tuple[Any, ...]]
    outcomes: list[tuple[Any, ...]]

    def of_kind(self, *kinds: str) -> list[tuple[Any, ...]]:
        """The entries of these kinds, in order."""
        return [entry for entry in self.entries if entry[0] in kinds]

    def operations(self) -> list[str]:
        """The operations launched, in order."""
        return [entry[4] for entry in self.of_kind("launch")]


@contextlib.contextmanager
def repetition(
    native: ModuleType, holds: Sequence[tuple[torch.Stream, int]] = (), *, serial: bool = False, lines: bool = False
) -> Iterator[Repetition]:
    """Runs the block as the body of a repetition with the given launches held."""
    result = Repetition()
    wanted = [(stream.device_index, stream.stream_id, index) for stream, index in holds]
    native.begin_repetition(wanted, serial, lines)
    try:
        yield result
    finally:
        result.entries, result.outcomes = native.finish_repetition()


@contextlib.contextmanager
def preparing(native: ModuleType) -> Iterator[None]:
    """The block prepares inputs: what it enqueues is neither counted nor traced, and complete at its end."""
    native.set_preparing(True)
    try:
        yield
        for index in range(2):
            torch.accelerator.synchronize(index)
    finally:
        native.set_preparing(False)


def streams(count: int, device: int = 0) -> list[torch.Stream]:
    """Fresh streams of a device."""
    return [torch.Stream(device=f"sim:{device}") for _ in range(count)]


def same_stream(stream: torch.Stream) -> torch.Stream:
    """Another object for a stream: one object cannot be entered by two threads at once in torch 2.7."""
    return torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


class Twice(torch.autograd.Function):
    """A backward in Python, so that the device threads of the engine need the GIL."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def filled(size: int, value: float, device: int = 0) -> torch.Tensor:
    """A tensor with that value in every element."""
    return torch.full((size,), value, device=f"sim:{device}")


def run_script(script: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """Runs a script in a process of its own, on the simulator that this process has built."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=PACKAGE_ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
