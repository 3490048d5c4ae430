"""Cuts a repetition that hangs.

A hang in Python code, or in a call that a signal interrupts, is cut softly: an exception ends the repetition and the
process goes on. A hang in native code, with or without the GIL, is cut hard: a native thread that needs no GIL writes
the stacks of all threads and ends the process.
"""

from __future__ import annotations

import faulthandler
import signal
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import BinaryIO

DEFAULT_GRACE_S = 10.0
REARM_INTERVAL_S = 1.0
"""The timers are set at most this often: starting the timer thread takes longer than a repetition may."""
IDLE_S = 2.0
"""So long after the last repetition, at most, the timers are stopped if nobody called :meth:`Watchdog.rest`."""


class RepetitionTimeout(BaseException):
    """The repetition took longer than its limit. Not an ``Exception``, so that no case catches it by accident."""


class Watchdog:
    """Guards one repetition after the other, in one thread (softly only in the main thread, where Python runs signals).

    Uses ``SIGALRM``, the real-time interval timer and the timer of :mod:`faulthandler`; the process has each only once.
    They are given back by :meth:`rest`, or on their own when no repetition has run for a while.

    Attributes:
        limit_s: how long a repetition may take before it is cut softly.
        grace_s: how much longer before it is cut hard; up to ``REARM_INTERVAL_S`` more may pass.
    """

    def __init__(
        self,
        limit_s: float,
        stacks_path: Path | None,
        *,
        grace_s: float = DEFAULT_GRACE_S,
        descriptor: int | None = None,
    ) -> None:
        """Nothing is armed before the first repetition.

        Args:
            limit_s: how long a repetition may take.
            stacks_path: where a hard cut leaves the stacks of all threads; the file is empty unless there was one. With
                None they go to ``descriptor``.
            grace_s: how long the end of a repetition that was cut softly may take before the process is ended.
            descriptor: an open file descriptor, standard error by default.
        """
        self.limit_s = limit_s
        self.grace_s = grace_s
        self._stacks_path = stacks_path
        self._descriptor = 2 if descriptor is None else descriptor
        self._file: BinaryIO | None = None
        self._stacks = ""
        self._guard = _Guard(self)
        self._handler = self._on_alarm  # one object, so that it can be recognized as the installed one
        self._previous_handler: object = None
        self._previous_timer = (0.0, 0.0)
        self._previous_timer_read_at = 0.0
        self._installed = False
        self._armed = False
        # The state that the alarm looks at.
        self._active = False
        self._was_cut = False
        self._deadline = 0.0
        self._rearm_at = 0.0

    def guard(self) -> _Guard:
        """A context for one repetition, to be used as ``with watchdog.guard():``.

        It raises :class:`RepetitionTimeout` where the repetition is when its time is up.
        """
        return self._guard

    def stacks(self) -> str:
        """The stacks of all threads at the last soft cut."""
        return self._stacks

    def rest(self) -> None:
        """Stop the timers and restore the signal handler and the timer that were there before.

        Call it after the last of a row of repetitions, outside of :meth:`guard`; the next repetition arms anew.
        """
        self._rearm_at = 0.0
        if self._armed:
            self._armed = False
            faulthandler.cancel_dump_traceback_later()
        if self._installed:
            self._installed = False
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            if signal.getsignal(signal.SIGALRM) is self._handler:
                signal.signal(signal.SIGALRM, self._previous_handler)  # type: ignore[arg-type]
            delay, interval = self._previous_timer
            if delay > 0:
                elapsed = time.monotonic() - self._previous_timer_read_at
                signal.setitimer(signal.ITIMER_REAL, max(delay - elapsed, 1e-3), interval)

    def _arm(self, now: float) -> None:
        self._rearm_at = now + REARM_INTERVAL_S
        self._armed = True
        faulthandler.dump_traceback_later(
            self.limit_s + REARM_INTERVAL_S + self.grace_s,
            exit=True,
            file=self._descriptor if self._stacks_path is None else self._stacks_file(),
        )
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGALRM) is not self._handler:
            # Not installed yet, or replaced by someone since.
            self._previous_handler = signal.signal(signal.SIGALRM, self._handler)
            self._previous_timer = signal.getitimer(signal.ITIMER_REAL)
            self._previous_timer_read_at = now
            self._installed = True
        signal.setitimer(signal.ITIMER_REAL, min(self.limit_s, IDLE_S))

    def _on_alarm(self, signal_number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._active:
            self.rest()
        elif self._was_cut:
            signal.setitimer(signal.ITIMER_REAL, IDLE_S)  # it ends by itself, or by the hard cut
        elif now < self._deadline:
            signal.setitimer(signal.ITIMER_REAL, self._deadline - now)
        else:
            self._was_cut = True
            signal.setitimer(signal.ITIMER_REAL, IDLE_S)
            self._stacks = self._dump()
            raise RepetitionTimeout(f"the repetition took longer than {self.limit_s:g} s")

    def _stacks_file(self) -> BinaryIO:
        if self._file is None:
            if self._stacks_path is None:
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - lives as long as the watchdog
            else:
                self._stacks_path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._stacks_path.open("w+b", buffering=0)
        return self._file

    def _dump(self) -> str:
        file = self._stacks_file()
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read().decode(errors="replace")
        file.seek(0)
        file.truncate()
        return text


class _Guard:
    """The context of one repetition; a class of its own because it must cost next to nothing."""

    __slots__ = ("_watchdog",)

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog

    def __enter__(self) -> None:
        watchdog = self._watchdog
        now = time.monotonic()
        watchdog._deadline = now + watchdog.limit_s
        watchdog._active = True
        if now >= watchdog._rearm_at:
            watchdog._arm(now)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        watchdog = self._watchdog
        watchdog._active = False
        if watchdog._was_cut:
            watchdog._was_cut = False
            watchdog.rest()
