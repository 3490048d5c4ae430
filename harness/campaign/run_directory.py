"""Directories of runs: a new one for each run, the last of which are kept; or one that the user chose."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

from harness.errors import UsageError

KEPT_RUNS = 20
LONG_RUN_MINUTES = 10
"""Runs of so many minutes are counted apart, so that no number of short ones pushes them out."""
_NAME_TIME = "%Y%m%dT%H%M%S.%fZ"


def new_run_directory(root: Path, announce: Callable[[str], None]) -> Path:
    """Make ``root/.sidestream/runs/<UTC time>-<process id>``, and delete older runs.

    The 20 runs that were written to last are kept, and the 20 last ones of ten minutes or more.

    Args:
        root: where ``.sidestream`` is.
        announce: receives a sentence that names what was deleted.

    Raises:
        UsageError: it cannot be made.
    """
    home = root / ".sidestream"
    runs = home / "runs"
    try:
        runs.mkdir(parents=True, exist_ok=True)
        ignore = home / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n")
        while True:
            directory = runs / f"{datetime.now(timezone.utc):{_NAME_TIME}}-{os.getpid()}"
            try:
                directory.mkdir()
                break
            except FileExistsError:
                time.sleep(1e-5)
    except OSError as error:
        raise UsageError(
            f"results cannot be written under {home} ({error.strerror or error}): make it writable, or run from a "
            "folder that is."
        ) from error
    deleted = _prune(runs, directory)
    if deleted:
        few = len(deleted) == 1
        what = f"run {deleted[0].name}" if few else f"{len(deleted)} runs, {deleted[0].name} to {deleted[-1].name},"
        announce(
            f"Deleted {what} from {runs}: the last {KEPT_RUNS} are kept, and the last {KEPT_RUNS} of "
            f"{LONG_RUN_MINUTES} minutes or more. --results names a folder that stays."
        )
    return directory


def use_run_directory(directory: Path) -> Path:
    """Make a directory that the user chose for one run; nothing in it is ever deleted.

    Raises:
        UsageError: it cannot be made, or holds the results of another run.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        taken = next(directory.glob("*.jsonl"), None)
    except OSError as error:
        raise UsageError(
            f"results cannot be written to {directory} ({error.strerror or error}): choose another directory."
        ) from error
    if taken is not None:
        raise UsageError(f"{directory} holds the results of another run ({taken.name}): choose a new directory.")
    return directory


def resumed_run_directory(directory: Path) -> Path:
    """A directory whose run is to be continued.

    Raises:
        UsageError: it holds no results.
    """
    if next(directory.glob("*.jsonl"), None) is None:
        raise UsageError(f"{directory} holds no results, so there is nothing to resume: name the folder of a run.")
    return directory


def claim(directory: Path) -> int | None:
    """Keep other sessions from adding to a run as long as this process lives.

    Returns:
        A file descriptor, whose closing ends the claim; None where no file can be made, which the results say anyway.

    Raises:
        UsageError: another session adds to it.
    """
    try:
        file = os.open(directory / "session.lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise UsageError(
            f"another session is adding to {directory}: wait for its end, or end it, and resume the run then."
        ) from None
    except OSError:  # a file system without locks
        os.close(file)
        return None
    return file


def last_run_directory(root: Path) -> Path:
    """The run in ``root/.sidestream/runs`` that started last.

    Raises:
        UsageError: there is none.
    """
    found = run_directories(root)
    if not found:
        raise UsageError(f"there is no run in {root / '.sidestream' / 'runs'}: name the folder of one.")
    return found[-1]


def run_directories(root: Path) -> list[Path]:
    """The runs in ``root/.sidestream/runs`` that have results, in the order in which they started."""
    runs = root / ".sidestream" / "runs"
    return sorted(path for path in runs.glob("*") if next(path.glob("*.jsonl"), None) is not None)


def _prune(runs: Path, newest: Path) -> list[Path]:
    """Delete runs that are neither among the last ones nor among the last long ones, by when they were written to.

    Returns:
        What was deleted, in the order in which it started.
    """
    ages: list[tuple[float, Path]] = []
    with contextlib.suppress(OSError):
        for run in runs.iterdir():
            if run != newest and run.is_dir() and not run.is_symlink():
                with contextlib.suppress(OSError):
                    ages.append((max(path.stat().st_mtime for path in (run, *run.iterdir())), run))
    last = [run for _, run in sorted(ages, reverse=True)]
    kept = {*last[: KEPT_RUNS - 1], *[run for run in last if _minutes(run) >= LONG_RUN_MINUTES][:KEPT_RUNS]}
    deleted = sorted(run for run in last if run not in kept)
    for run in deleted:
        shutil.rmtree(run, ignore_errors=True)
    return deleted


def _minutes(run: Path) -> float:
    """How long a run took, from the start that its folder is named after to its last result."""
    try:
        ended = max(path.stat().st_mtime for path in run.glob("*.jsonl"))
        began = datetime.strptime(run.name.rpartition("-")[0], _NAME_TIME).replace(tzinfo=timezone.utc)
    except (OSError, ValueError):  # not ours, or without any result
        return 0.0
    return (ended - began.timestamp()) / 60.0
