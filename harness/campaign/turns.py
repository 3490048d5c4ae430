"""Turns: workers that share one GPU run their repetitions one after another.

Kernels of two processes do not run side by side on a GPU (without MPS); the driver slices its time between them. A hold
of one process would then stretch the repetitions of the others, and be stretched in turn. So the processes take turns,
and overlap only in what they do on the host.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_POLITENESS_S = 1e-4
"""How long a process stays away after a turn, since the kernel gives a lock to whoever asks first."""


class Turns:
    """Access to a GPU, in turn with the other processes that name the same file; without a file, always."""

    def __init__(
        self,
        path: Path | None,
        *,
        length_s: float = 0.0,
        on_begin: Callable[[], None] = lambda: None,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the file.

        Args:
            path: the file that the processes share; the lock on it is gone with the process that holds it.
            length_s: how long a turn lasts at least, where beginning one costs something.
            on_begin: called when a turn begins.
            on_end: called when a turn ends.
        """
        self._descriptor = None if path is None else os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self._length_s = length_s
        self._on_begin = on_begin
        self._on_end = on_end
        self._began_at: float | None = None

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """A stretch of this process' turn; the turn may go on after it, until :meth:`end`."""
        if self._descriptor is None:
            yield
            return
        if self._began_at is None:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            self._began_at = time.monotonic()
            self._on_begin()
        yield
        if time.monotonic() - self._began_at >= self._length_s:
            self.end()
            time.sleep(_POLITENESS_S)

    def end(self) -> None:
        """Let the others have their turn."""
        if self._descriptor is not None and self._began_at is not None:
            self._began_at = None
            self._on_end()
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """End the turn and close the file."""
        self.end()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
