"""What loads achieve over the time of a run, so that a report can show when they ran."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Sequence

from harness.perturb.load.load import Load

MOST_STRETCHES = 120
"""A run is cut into no more stretches of equal length than these."""
_SHORTEST_S = 0.5


class History:
    """Looks at loads twice a second, more rarely the longer the run is, from a thread of its own."""

    def __init__(self, loads: Sequence[Load]) -> None:
        """Look at nothing yet."""
        self._loads = loads
        self._lock = threading.Lock()
        self._length_s = _SHORTEST_S
        self._began = 0.0
        self._clock = 0.0
        self._looks: list[list[float]] = []
        """What each load had achieved at the end of each stretch."""
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Look from now on; what the loads have achieved until now is forgotten already."""
        self._began, self._clock = time.time(), time.monotonic()
        self._looks = [[load.amount() for load in self._loads]]
        self._stopping.clear()
        self._thread = threading.Thread(target=self._look, name="sidestream-load-history", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more; what was seen remains."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def rates(self, position: int) -> list[tuple[float, float, float]]:
        """What the load at this position achieved: begin (seconds since 1970), length in seconds, amount a second."""
        with self._lock:
            amounts = [look[position] for look in self._looks]
            pairs = itertools.pairwise(amounts)
            return [
                (self._began + number * self._length_s, self._length_s, max(0.0, after - before) / self._length_s)
                for number, (before, after) in enumerate(pairs)
            ]

    def _look(self) -> None:
        while not self._stopping.wait(self._clock + len(self._looks) * self._length_s - time.monotonic()):
            # A process of the load that somebody has ended has achieved nothing.
            with self._lock, contextlib.suppress(OSError):
                self._looks.append([load.amount() for load in self._loads])
                if len(self._looks) > MOST_STRETCHES:
                    self._looks = self._looks[::2]
                    self._length_s *= 2
