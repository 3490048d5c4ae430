"""Compares many operators in several processes. An operator that ends its process, or hangs, has that as its result."""

from __future__ import annotations

import contextlib
import json
import queue
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from harness.backends.simulator.coverage import worker
from harness.backends.simulator.coverage.comparison import Result, failed
from harness.errors import InfrastructureError

PATIENCE_S = 900.0
"""How long one operator may take with all its samples."""

_ROOT = Path(__file__).resolve().parents[4]
_COMMAND = (sys.executable, "-m", worker.__name__)


class Task(NamedTuple):
    """An operator to compare: its name in the database, the dtype's name, how many samples at most (None: all)."""

    name: str
    dtype: str
    most_samples: int | None


def compare_all(
    tasks: Sequence[Task],
    processes: int,
    progress: Callable[[Result], None],
    patience_s: float = PATIENCE_S,
    command: Sequence[str] = _COMMAND,
) -> list[Result]:
    """Results in the order of the tasks.

    Args:
        tasks: what to compare.
        processes: how many processes share the work.
        progress: called with each result, from several threads but never at the same time.
        patience_s: how long one operator may take.
        command: starts a process that speaks as the module ``worker`` does.

    Raises:
        InfrastructureError: a process ended before it did any work.
    """
    results: dict[int, Result] = {}
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(tasks)):
        waiting.put(index)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def serve() -> None:
        process: _Process | None = None
        try:
            while not errors:
                try:
                    index = waiting.get_nowait()
                except queue.Empty:
                    break
                process = process or _Process(command, patience_s)
                result = process.compare(tasks[index])
                if not process.alive:
                    process = None
                with lock:
                    results[index] = result
                    progress(result)
        except BaseException as error:
            errors.append(error)
        finally:
            if process:
                process.close()

    threads = [threading.Thread(target=serve) for _ in range(min(processes, len(tasks)))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt as interrupt:
        errors.append(interrupt)
        raise
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(tasks))]


class _Process:
    def __init__(self, command: Sequence[str], patience_s: float) -> None:
        self._command = command
        self._patience_s = patience_s
        self._served = 0
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=_ROOT,
            text=True,
        )
        self.alive = True

    def compare(self, task: Task) -> Result:
        assert self._process.stdin is not None and self._process.stdout is not None
        hung = threading.Event()

        def cut() -> None:
            hung.set()
            self._process.kill()

        timer = threading.Timer(self._patience_s, cut)
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended; so does its output
                self._process.stdin.write(json.dumps(task) + "\n")
                self._process.stdin.flush()
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if line:
            self._served += 1
            return Result.from_json(json.loads(line))
        self.alive = False
        status = self._process.wait()
        self.close()
        if hung.is_set():
            return failed(task.name, task.dtype, f"it hangs: it took more than {self._patience_s:.0f} s")
        if status >= 0 and not self._served:
            raise InfrastructureError(
                f"A process that compares operators ended with status {status}; "
                f"'{shlex.join(self._command)}' shows why."
            )
        ended = signal.Signals(-status).name if status < 0 else f"status {status}"
        return failed(task.name, task.dtype, f"it ends the process ({ended})")

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
