"""What the dimensions of load have in common."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

LEAST_SECONDS = 0.05
"""A load that has run for less has not been measured."""


class Load(Protocol):
    """One dimension of load. It rests until it is resumed, and never outlives the process."""

    dimension: str
    unit: str
    """Of its rate: ``FLOP/s``, ``B/s``, ..."""
    least_share: float
    """Which share of what it achieves alone proves that it ran."""
    stream_ids: list[int]
    """The ids of its streams, so that no case is given one of them (``torch.Stream.stream_id``)."""

    def start(self) -> None:
        """Make it ready; it rests until :meth:`resume`.

        Raises:
            InfrastructureError: it cannot run, for want of memory for example.
        """
        ...

    def resume(self) -> None:
        """Run; returns once it does."""
        ...

    def pause(self) -> None:
        """Rest; returns once nothing of it is queued."""
        ...

    def stop(self) -> None:
        """End; nothing of it is left when this returns, within a second unless the device hangs.

        Raises:
            InfrastructureError: it failed meanwhile, or does not end.
        """
        ...

    def forget(self) -> None:
        """Count what it achieves from nothing again."""
        ...

    def amount(self) -> float:
        """What it has achieved so far, in its unit without the time: floating-point operations, bytes, ..."""
        ...

    def rate(self) -> float | None:
        """What it achieved a second of the time in which it was to run; None if that was too short to tell."""
        ...


class Meter:
    """Counts what a load achieves against the time in which it was to run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._amount = 0.0
        self._seconds = 0.0
        self._since: float | None = None

    def start(self) -> None:
        """Let time count from now on."""
        with self._lock:
            if self._since is None:
                self._since = time.perf_counter()

    def stop(self) -> None:
        """Let it not count until :meth:`start`."""
        with self._lock:
            if self._since is not None:
                self._seconds += time.perf_counter() - self._since
                self._since = None

    def add(self, amount: float) -> None:
        """Count what is complete."""
        with self._lock:
            self._amount += amount

    def forget(self) -> None:
        """Count from nothing again."""
        with self._lock:
            self._amount = self._seconds = 0.0
            if self._since is not None:
                self._since = time.perf_counter()

    def amount(self) -> float:
        """What it achieved."""
        with self._lock:
            return self._amount

    def rate(self) -> float | None:
        """What it achieved a second; None if it has not run long enough to tell."""
        with self._lock:
            running = 0.0 if self._since is None else time.perf_counter() - self._since
            seconds = self._seconds + running
            return self._amount / seconds if seconds >= LEAST_SECONDS else None


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What one dimension achieved beside the cases, and what it achieves alone."""

    dimension: str
    intensity: float
    unit: str
    achieved: float | None
    """None if it ran too briefly to tell."""
    alone: float | None
    least_share: float
    worker: str = ""
    """Which process it ran in."""
    information: str = ""
    """What the device said of itself meanwhile, as information; it proves nothing."""
    history: list[tuple[float, float, float]] = field(default_factory=list)
    """Over time: when a stretch began (seconds since 1970), its length in seconds, what was achieved a second in it."""

    @property
    def share(self) -> float | None:
        """The share of what it achieves alone; None if either is not known."""
        if self.achieved is None or not self.alone:
            return None
        return self.achieved / self.alone

    @property
    def is_delivered(self) -> bool:
        """Whether it is proved that the load ran."""
        return self.share is not None and self.share >= self.least_share

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> LoadReport:
        """What ``dataclasses.asdict`` made the data of."""
        return cls(**data)
