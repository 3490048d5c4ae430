"""The results of a run on disk: append-only JSON lines, one file a process, in the directory of the run.

``docs/results.md`` describes the files; ``harness/campaign/reader.py`` reads them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 2
"""The version of the files. A reader refuses files of a newer one."""
_BLOCK_BYTES = 512
"""The file of the repetition in flight grows by this and never shrinks: overwriting it leaves nothing behind."""
_REPETITIONS_A_DEFINITION = 200
"""How often a case is defined again, so that no damaged line takes more than these with it."""

_encode = json.JSONEncoder(separators=(",", ":")).encode


PASS = "pass"
"""The verdict that is left out."""


def usual_holds(plan: str) -> str:
    """The states of the holds of a plan that are left out: every launch was still pending."""
    return "" if plan == "baseline" else ",".join(["pending"] * (1 + plan.count(",")))


def case_key(nodeid: str) -> str:
    """The short name of a case in the files: the same in every process, run and machine."""
    return hashlib.sha256(nodeid.encode()).hexdigest()[:8]


def repetition_id(nodeid: str, repetition: int, *, fresh: bool = False) -> str:
    """What names a repetition in its run: ``0c8b7a51-3``, or ``0c8b7a51-f3`` for one in a fresh process."""
    return f"{case_key(nodeid)}-{'f' if fresh else ''}{repetition}"


@dataclass(slots=True)
class CaseDefinition:
    """What a result file says once of all repetitions of a case."""

    nodeid: str
    launches: int = 0
    """How many launches the body has; 0 where that is not known."""
    cycle_length: int = 0
    """How many plans a cycle has; 0 where one plan was given for all repetitions."""
    oracles: int = 1
    """How many oracles judge."""
    control: str | None = None
    """For a control, the sentence of the contract that makes it unsafe; for a defect, the file that describes it."""
    defect: bool = False
    """Whether it is a registered defect of PyTorch."""

    def to_json(self) -> dict[str, Any]:
        """Its line; what is unknown or false is left out."""
        line = {
            "case": case_key(self.nodeid),
            "n": self.nodeid,
            "launches": self.launches,
            "cycle": self.cycle_length,
            "oracles": self.oracles,
            "control": self.control,
            "defect": int(self.defect),
        }
        return {key: value for key, value in line.items() if value or (key == "control" and value is not None)}

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> CaseDefinition:
        """The definition that ``to_json`` made the line of.

        Raises:
            KeyError, TypeError: it is no such line.
        """
        control = line.get("control")
        return cls(
            str(line["n"]),
            int(line.get("launches", 0)),
            int(line.get("cycle", 0)),
            int(line.get("oracles", 1)),
            None if control is None else str(control),
            bool(line.get("defect", 0)),
        )


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
    adaptive: bool = False
    """Whether it was added where the evidence was thin, so that it is no part of a sample of fixed size."""
    fresh: bool = False
    """Whether it was the first time that its process ran the case."""
    control: bool = False
    """Whether the case is a control, so that its races are what it is for; also a registered defect is one."""
    defect: bool = False
    """Whether it is a registered defect of PyTorch."""
    worker: str = ""
    """Which process ran it; set when a run is read, from the name of the file."""
    session: str = ""
    """Which session of the run; set when it is read."""
    load: str = ""
    """The load beside it, as ``--load`` names it; set when it is read."""
    hold: str = ""
    """How launches were held, as ``--hold`` names it; set when it is read."""
    ended_s: float | None = field(default=None, compare=False)
    """When it ended, in seconds since the epoch; set when it is read, and None where the file does not tell."""

    @property
    def id(self) -> str:
        """What names it in its run: ``python -m harness replay`` takes it."""
        return repetition_id(self.nodeid, self.repetition, fresh=self.fresh)


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
        self._definition = CaseDefinition("")
        self._since_definition = 0
        try:
            self._results = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._now = os.open(directory / f"{worker}.now", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._size = os.fstat(self._now).st_size
            # What a killed predecessor of the same name left may end in the middle of a line.
            self._torn = os.fstat(self._results).st_size > 0
        except OSError as error:
            self._fail("results", error)
        self._append(_encode({"header": {"schema": SCHEMA, **header}}))

    def define(self, definition: CaseDefinition) -> None:
        """Say what holds for all repetitions of a case, before the first of them."""
        self._definition = definition
        self._since_definition = 0
        self._append(_encode({**definition.to_json(), "t": round(time.time(), 1)}))

    def write(self, record: RepetitionRecord) -> None:
        """Append one repetition."""
        if record.nodeid != self._definition.nodeid:
            self.define(CaseDefinition(record.nodeid, control="" if record.control else None, defect=record.defect))
        elif self._since_definition >= _REPETITIONS_A_DEFINITION:
            self.define(self._definition)
        self._since_definition += 1
        line: dict[str, Any] = {
            "k": case_key(record.nodeid),
            "r": record.repetition,
            "p": record.plan,
            "us": round(record.duration_us),
        }
        for key, value, default in (
            ("v", record.verdict, PASS),
            ("a", int(record.aimed), 0),
            ("x", int(record.adaptive), 0),
            ("f", int(record.fresh), 0),
            ("by", record.raced_by, []),
            ("h", record.holds, usual_holds(record.plan)),
            ("m", record.message, ""),
        ):
            if value != default:
                line[key] = value
        self.records += 1
        if not self._append(_encode(line)):
            self.lost += 1

    def say(self, line: dict[str, Any]) -> None:
        """Append a line that is no repetition: the environment of the run."""
        self._append(_encode(line))

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
