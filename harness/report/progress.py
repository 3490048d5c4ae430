"""Progress in repetitions: a line now and then, since one item of pytest's may stand for hundreds of them."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

INTERVAL_ON_TERMINAL_S = 5.0
INTERVAL_IN_LOG_S = 30.0


class Progress:
    """Says every few seconds how many repetitions have ended, while there is something to wait for."""

    def __init__(self, say: Callable[[str], None], interval_s: float) -> None:
        self._say = say
        self._interval_s = interval_s
        self._started = self._said = time.monotonic()
        self._ended = 0
        self.total: int | None = None
        """How many repetitions are to come in all, where that is known."""

    def repetition(self) -> None:
        """One more has ended."""
        self.update(self._ended + 1)

    def update(self, ended: int) -> None:
        """So many have ended."""
        self._ended = ended
        now = time.monotonic()
        if not ended or now - self._said < self._interval_s:
            return
        self._said = now
        rate = ended / (now - self._started)
        line = f"{ended:,}" + (f" of {self.total:,}" if self.total else "") + f" repetitions, {rate:,.0f} a second"
        if self.total and rate:
            line += f", {max(0.0, (self.total - ended) / rate):,.0f} s to go"
        self._say(line)


class Ticker:
    """Calls ``tick`` in a thread of its own until stopped: the controller only waits for workers meanwhile."""

    def __init__(self, tick: Callable[[], None], interval_s: float) -> None:
        self._stop = threading.Event()
        self._tick = tick
        self._interval_s = interval_s
        self._thread = threading.Thread(target=self._run, name="sidestream-progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._tick()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()


class Tail:
    """Counts the repetitions in the result files of a run as they grow."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: dict[Path, int] = {}
        self._lines = 0

    def lines(self) -> int:
        """How many repetitions have been written by now."""
        for path in self._directory.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                grown = file.read()
            self._read[path] = self._read.get(path, 0) + len(grown)
            self._lines += grown.count(b'{"k":')
        return self._lines


def terminal_progress(reporter: pytest.TerminalReporter) -> Progress:
    """Progress as lines of pytest's own output, more often where somebody may be watching."""

    def say(line: str) -> None:
        reporter.ensure_newline()
        reporter.write_line(line)

    watched = sys.__stdout__ is not None and sys.__stdout__.isatty()
    return Progress(say, INTERVAL_ON_TERMINAL_S if watched else INTERVAL_IN_LOG_S)
