"""Compares every operator of the database and writes the table, or compares some and says what became of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from harness.backends import simulator
from harness.backends.simulator.coverage import database, table, workers
from harness.backends.simulator.coverage.comparison import Result
from harness.backends.simulator.coverage.workers import Task
from harness.errors import UsageError

TABLE = Path(simulator.__file__).parent / "OPERATORS.md"

PROGRESS_INTERVAL_S = 5.0

Announce = Callable[[str], None]


def survey(processes: int, announce: Announce) -> table.Table:
    """All samples of float32 and one of float64, of every operator.

    Args:
        processes: how many processes share the work.
        announce: receives progress sentences.

    Raises:
        UsageError: a package that PyTorch's test utilities import is not installed, or the simulator cannot be built.
        InfrastructureError: the processes cannot work at all.
    """
    names = list(database.operators())
    tasks = [Task(name, "float32", None) for name in names] + [Task(name, "float64", 1) for name in names]
    results = _compare(tasks, processes, announce)
    return table.Table.of(results[: len(names)], results[len(names) :], torch.__version__.partition("+")[0])


def compare_some(names: Sequence[str], dtype: str, processes: int, announce: Announce) -> list[Result]:
    """All samples of some operators.

    Raises:
        UsageError: the database has no such operator; else as :func:`survey`.
    """
    for name in names:
        if name not in database.operators():
            raise UsageError(
                f"PyTorch's database of operators has no '{name}'; the names are those in {TABLE.name}, such as 'add'."
            )
    return _compare([Task(name, dtype, None) for name in names], processes, announce)


def _compare(tasks: Sequence[Task], processes: int, announce: Announce) -> list[Result]:
    simulator.build(announce)
    done = failures = 0
    reported = time.monotonic()

    def progress(result: Result) -> None:
        nonlocal done, failures, reported
        done += 1
        failures += bool(result.forward.failure or result.backward.failure)
        if time.monotonic() >= reported + PROGRESS_INTERVAL_S:
            reported = time.monotonic()
            announce(f"Made {done} of {len(tasks)} comparisons, {failures} failed; the last was of {result.name}")

    return workers.compare_all(tasks, processes, progress)
