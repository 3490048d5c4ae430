"""How the processes of a run end: none outlives the one that started it, and SIGTERM is as good as Ctrl-C."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import IO

from harness.exit_codes import ExitCode, of_process

_PR_SET_PDEATHSIG = 1
_INTERRUPTED_S = 30.0
"""How long a child may take to end after an interrupt before it is told again."""


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


def preexec_dies_with_this_process() -> Callable[[], None]:
    """A ``preexec_fn`` for a child that is not to outlive this process."""
    parent = os.getpid()
    return lambda: die_with_parent(parent)


class Terminated(KeyboardInterrupt):
    """The process was asked to end (SIGTERM), by a batch system or a container that stops, say."""


def interrupt_when_terminated() -> Callable[[], None]:
    """Let SIGTERM interrupt this process as Ctrl-C does, unless somebody else handles it or this is no main thread.

    Returns:
        What makes it as it was before.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return lambda: None
    signal.signal(signal.SIGTERM, _terminate)
    return _forget


def _terminate(signal_number: int, frame: FrameType | None) -> None:
    raise Terminated("terminated (SIGTERM)")


def _forget() -> None:
    if signal.getsignal(signal.SIGTERM) is _terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def run_child(command: Sequence[str], *, stdout: int | IO[str] | None = None) -> int:
    """Run a command that ends when this process does, and give its exit status.

    After an interrupt the child has a moment to end with a summary. Ctrl-C in a terminal has reached it as well, and
    SIGTERM is passed on.

    Raises:
        KeyboardInterrupt: this process was interrupted; the child has ended.
    """
    process = subprocess.Popen(command, stdout=stdout, preexec_fn=preexec_dies_with_this_process())
    try:
        return process.wait()
    except KeyboardInterrupt as interrupt:
        if isinstance(interrupt, Terminated):
            process.terminate()
        try:
            process.wait(_INTERRUPTED_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.wait()
        raise


def run_pytest(arguments: Sequence[str], *, stdout: int | IO[str] | None = None) -> ExitCode:
    """Run pytest in a process of its own that ends when this one does; once interrupted, it ends with its summary."""
    try:
        return of_process(run_child([sys.executable, "-m", "pytest", *arguments], stdout=stdout))
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
