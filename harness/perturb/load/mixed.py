"""The load ``mixed``: one dimension after the other for a moment each, with quiet moments between them.

Bursts expose more than a constant load does. Which comes when is decided by a seed.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence

from harness.perturb.load.load import Load

_QUIET_SHARE = 0.25
_SHORTEST_S, _LONGEST_S = 0.05, 0.4
_TICK_S = 0.01


def phases(count: int, seed: int) -> Iterator[tuple[int | None, float]]:
    """Which of so many loads runs, None for none, and for how many seconds; without end.

    Each runs once before any runs again, in an order of its own each time.
    """
    generator = random.Random(seed)
    while True:
        for position in generator.sample(range(count), count):
            if generator.random() < _QUIET_SHARE:
                yield None, generator.uniform(_SHORTEST_S, _LONGEST_S)
            yield position, generator.uniform(_SHORTEST_S, _LONGEST_S)


class Rotation:
    """Lets loads run in turn, from a thread of its own, while it is not paused."""

    def __init__(self, loads: Sequence[Load], seed: int) -> None:
        """The loads have been started and rest."""
        self._loads = loads
        self._phases = phases(len(loads), seed)
        self._lock = threading.Lock()
        self._is_paused = True
        self._running: Load | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._rotate, name="sidestream-load-mixed", daemon=True)
        self._thread.start()

    def resume(self) -> None:
        """Go on with the phase that was interrupted."""
        with self._lock:
            self._is_paused = False
            if self._running is not None:
                self._running.resume()

    def pause(self) -> None:
        """Let the load of this phase rest, and the time of the phase stand still."""
        with self._lock:
            self._is_paused = True
            if self._running is not None:
                self._running.pause()

    def stop(self) -> None:
        """Change nothing any more."""
        self._stopping.set()
        self._thread.join()

    def _rotate(self) -> None:
        for position, seconds in self._phases:
            with self._lock:
                self._running = None if position is None else self._loads[position]
                if self._running is not None and not self._is_paused:
                    self._running.resume()
            left_s = seconds
            while left_s > 0:
                if self._stopping.wait(_TICK_S):
                    return
                if not self._is_paused:
                    left_s -= _TICK_S
            with self._lock:
                if self._running is not None and not self._is_paused:
                    self._running.pause()
                self._running = None
