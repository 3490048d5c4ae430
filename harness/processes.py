"""No process of a run outlives the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when the thread that started it ends, whatever else it is doing; Linux only.

    Args:
        parent: process id of the parent, if known; this process is killed at once if it is another one's child by now.
    """
    if not sys.platform.startswith("linux"):
        return
    expected = os.getppid() if parent is None else parent
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != expected:  # it had died before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)
