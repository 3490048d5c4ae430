"""The results of a run on disk: append-only JSON lines, one file a process, in the directory of the run.

``<worker>.jsonl`` starts with a header line, ``{"header": {...}}``, and then holds one line a repetition, with these
keys (those with their default value are left out):

====== ======================================== =======
key    meaning                                  default
====== ======================================== =======
``n``  node id of the case
``r``  which repetition, from 0
``p``  the plan, as ``str(plan)``
``v``  the verdict
``us`` duration in microseconds
``a``  1 if the plan was aimed at a known race  0
``c``  1 if the case is a control or a defect   0
``d``  1 if the case is a defect of PyTorch     0
``by`` the oracles that found something         []
``h``  the states of the holds                  ""
``m``  the message of a repetition that did not ""
       pass
====== ======================================== =======

A line is written by a single ``write`` to a descriptor in append mode, so a crash loses at most the repetition in
flight. ``<worker>.now`` says which one that is; it is overwritten in place and empty (blank) between repetitions.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from harness.errors import UsageError

KEPT_RUNS = 20
_BLOCK_BYTES = 512
"""The file of the repetition in flight grows by this and never shrinks: overwriting it leaves nothing behind."""

_encode = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(slots=True)
class RepetitionRecord:
    """What is kept of one repetition."""

    nodeid: str
    repetition: int
    plan: str
    verdict: str
    duration_us: float
    aimed: bool = False
    raced_by: list[str] = field(default_factory=list)
    """Names of the oracles that found something."""
    holds: str = ""
    """The state of each hold of the plan, separated by commas."""
    message: str = ""
    """Why it did not pass."""
    control: bool = False
    """Whether the case is a control, so that its races are what it is for; also a registered defect is one."""
    defect: bool = False
    """Whether it is a registered defect of PyTorch."""
    worker: str = ""
    """Which process ran it; set when a run is read, from the name of the file."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """The repetition that a process was running when it died."""

    worker: str
    nodeid: str
    repetition: int
    plan: str

    def __str__(self) -> str:
        return f"{self.worker} died in {self.nodeid}, repetition {self.repetition} under {self.plan}"


class ResultWriter:
    """Appends the results of one process; a disk that fails never fails the test.

    Args:
        directory: the directory of the run.
        worker: name of this process in the run (``gw0``, ``main``).
        header: what holds for all its repetitions (device, seed); written once, as the first line.
    """

    def __init__(self, directory: Path, worker: str, header: dict[str, Any]) -> None:
        self.records = 0
        """How many records were given to this writer."""
        self.lost = 0
        """How many of them could not be written."""
        self.failure: str | None = None
        """The first error, as one sentence."""
        self._path = directory / f"{worker}.jsonl"
        self._results: int | None = None
        self._now: int | None = None
        self._torn = False
        self._size = 0
        self._is_flying = False
        try:
            self._results = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._now = os.open(directory / f"{worker}.now", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._size = os.fstat(self._now).st_size
            # What a killed predecessor of the same name left may end in the middle of a line.
            self._torn = os.fstat(self._results).st_size > 0
        except OSError as error:
            self._fail("results", error)
        self._append(_encode({"header": header}))

    def write(self, record: RepetitionRecord) -> None:
        """Append one repetition."""
        line: dict[str, Any] = {
            "n": record.nodeid,
            "r": record.repetition,
            "p": record.plan,
            "v": record.verdict,
            "us": round(record.duration_us),
        }
        if record.aimed:
            line["a"] = 1
        if record.control:
            line["c"] = 1
        if record.defect:
            line["d"] = 1
        if record.raced_by:
            line["by"] = record.raced_by
        if record.holds:
            line["h"] = record.holds
        if record.message:
            line["m"] = record.message
        self.records += 1
        if not self._append(_encode(line)):
            self.lost += 1

    def in_flight(self, nodeid: str, repetition: int, plan: str) -> None:
        """Say which repetition runs now, for whoever finds this process dead."""
        self._is_flying = True
        self._overwrite(_encode({"n": nodeid, "r": repetition, "p": plan}).encode())

    def clear_in_flight(self) -> None:
        """Say that no repetition runs now."""
        if self._is_flying:
            self._is_flying = False
            self._overwrite(b"")

    def close(self) -> None:
        """Close the files; ``failure`` then also tells of results that were deleted while the run was writing them."""
        self.clear_in_flight()
        with contextlib.suppress(OSError):
            if self._results is not None and os.fstat(self._results).st_nlink == 0:
                self.lost = self.records
                self.failure = self.failure or f"{self._path} was deleted during the run; its results are lost."
        for descriptor in (self._results, self._now):
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self._results = self._now = None

    def _append(self, text: str) -> bool:
        if self._results is None:
            return False
        line = (f"\n{text}\n" if self._torn else f"{text}\n").encode()
        try:
            written = os.write(self._results, line)
            self._torn = False
            while written < len(line):  # A full disk takes a part first and reports the error next.
                self._torn = True
                written += os.write(self._results, line[written:])
                self._torn = written < len(line)
        except OSError as error:
            self._fail("results", error)
            return False
        return True

    def _overwrite(self, text: bytes) -> None:
        if self._now is None:
            return
        if len(text) > self._size:
            self._size = -(-len(text) // _BLOCK_BYTES) * _BLOCK_BYTES
        try:
            os.pwrite(self._now, text.ljust(self._size), 0)
        except OSError as error:
            self._fail("the repetition in flight", error)

    def _fail(self, what: str, error: OSError) -> None:
        if self.failure is None:
            self.failure = (
                f"{what} could not be written to {self._path.parent} ({error.strerror or error}): the counts of this "
                "run are complete, the files there are not."
            )


class Run:
    """The results in one directory, read as they are asked for.

    Iterating gives every readable record, file by file; ``headers``, ``in_flight`` and ``problems`` first read to the
    end where that has not happened yet.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._headers: dict[str, dict[str, Any]] = {}
        self._in_flight: list[InFlight] = []
        self._problems: list[str] = []
        self._is_read = False

    def __iter__(self) -> Iterator[RepetitionRecord]:
        headers: dict[str, dict[str, Any]] = {}
        in_flight: list[InFlight] = []
        problems: list[str] = []
        for path in sorted(self.directory.glob("*.jsonl")):
            worker = path.stem
            last: RepetitionRecord | None = None
            corrupt = 0
            truncated = False
            try:
                with path.open("rb") as lines:
                    for raw in lines:
                        if not raw.strip():
                            continue
                        try:
                            line = json.loads(raw)
                            if "header" in line:
                                headers[worker] = dict(line["header"])
                                continue
                            last = _record(line, worker)
                        except (ValueError, KeyError, TypeError):
                            if raw.endswith(b"\n"):
                                corrupt += 1
                            else:
                                truncated = True
                            continue
                        yield last
            except OSError as error:
                problems.append(f"{path} could not be read to its end ({error.strerror or error}).")
            problems += _describe_damage(path, corrupt, truncated)
            flying = _read_in_flight(path.with_suffix(".now"), worker)
            if flying and (last is None or (last.nodeid, last.repetition) != (flying.nodeid, flying.repetition)):
                in_flight.append(flying)
        self._headers, self._in_flight, self._problems, self._is_read = headers, in_flight, problems, True

    @property
    def headers(self) -> dict[str, dict[str, Any]]:
        """The header of each worker."""
        self._read()
        return self._headers

    @property
    def in_flight(self) -> list[InFlight]:
        """The repetitions that were running when their process died (or that are running now)."""
        self._read()
        return self._in_flight

    @property
    def problems(self) -> list[str]:
        """What could not be read, one sentence a file."""
        self._read()
        return self._problems

    def _read(self) -> None:
        if not self._is_read:
            for _ in self:
                pass


def read_run(directory: Path) -> Run:
    """The results of a run, whatever state its processes left them in.

    Raises:
        UsageError: there is no such directory.
    """
    if not directory.is_dir():
        raise UsageError(f"{directory} is no run directory: there is no such folder.")
    return Run(directory)


def new_run_directory(root: Path) -> Path:
    """Make ``root/.sidestream/runs/<UTC time>-<process id>`` and delete all but the runs written to last.

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
            directory = runs / f"{datetime.now(timezone.utc):%Y%m%dT%H%M%S.%fZ}-{os.getpid()}"
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
    _prune(runs, directory)
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


def _prune(runs: Path, newest: Path) -> None:
    """Keeps the runs that were written to last, so that a long run survives many short ones that start after it."""
    ages = []
    with contextlib.suppress(OSError):
        for run in runs.iterdir():
            if run != newest and run.is_dir() and not run.is_symlink():
                with contextlib.suppress(OSError):
                    ages.append((max(path.stat().st_mtime for path in (run, *run.iterdir())), run))
    for _, run in sorted(ages, reverse=True)[KEPT_RUNS - 1 :]:
        shutil.rmtree(run, ignore_errors=True)


def _record(line: dict[str, Any], worker: str) -> RepetitionRecord:
    return RepetitionRecord(
        nodeid=line["n"],
        repetition=line["r"],
        plan=line["p"],
        verdict=line["v"],
        duration_us=line["us"],
        aimed=bool(line.get("a", 0)),
        control=bool(line.get("c", 0)),
        defect=bool(line.get("d", 0)),
        raced_by=line.get("by", []),
        holds=line.get("h", ""),
        message=line.get("m", ""),
        worker=worker,
    )


def _describe_damage(path: Path, corrupt: int, truncated: bool) -> list[str]:
    damage = []
    if corrupt:
        damage.append(f"{corrupt} unreadable {'line was' if corrupt == 1 else 'lines were'} skipped")
    if truncated:
        damage.append("its last line is cut off")
    return [f"{path}: {' and '.join(damage)}; everything else was read."] if damage else []


def _read_in_flight(path: Path, worker: str) -> InFlight | None:
    try:
        line = json.loads(path.read_bytes())
        return InFlight(worker, line["n"], line["r"], line["p"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
