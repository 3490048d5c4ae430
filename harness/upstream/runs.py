"""The runs that the study of a test consists of, their log, and which one comes next.

The log is a file of JSON lines: each run when it starts and when it ends. A run without a wait may take the process
down; the next process reads the log and goes on where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ALONE = "alone"
"""Without the tap: whether the test passes at all."""
COMPLETE = "complete"
AGAIN = "again"
"""Complete once more: what is not issued the same way twice cannot be left out."""
TRACED = "traced"
"""Complete, with the trace that shows which synchronizations the others imply."""
WARM_UP = "warm-up"
"""Without the tap, where another process has begun the study: kernels are loaded at their first launch."""

UNTAPPED = (ALONE, WARM_UP)
WHOLE = (ALONE, WARM_UP, COMPLETE, AGAIN)
"""Runs in which the test must pass, or leaving something out shows nothing."""

PASSED = "passed"
FAILED = "failed"
SKIPPED = "skipped"
DIED = "died"
"""The process ended in the run, or the device was unusable after it."""


@dataclass(frozen=True, slots=True)
class Issued:
    """One synchronization of a complete run."""

    id: str
    """As ``SynchronizationId`` prints it."""
    kind: str
    issuer: str
    where: str
    """With its node and line, for people."""
    by_framework: bool
    """Whether the test framework issued it, and not the test: no line of a test or its helpers is on the stack."""
    proof: str | None = None
    """Of a traced run: why the others imply its order."""


@dataclass(frozen=True, slots=True)
class RunKey:
    """Which run of a test."""

    nodeid: str
    what: str
    """One of the runs above, or the synchronization that is left out."""
    attempt: int = 1


@dataclass(slots=True)
class Run:
    """What became of a run."""

    key: RunKey
    outcome: str = DIED
    reason: str = ""
    """Why the test failed, or was skipped; one line."""
    left_out: bool = False
    """Whether the synchronization that was to be left out was issued, and left out."""
    issued: list[Issued] = field(default_factory=list)
    """In the order of issue; only of complete runs."""

    @property
    def kills(self) -> bool:
        """Whether the test failed since something was missing."""
        return self.left_out and self.outcome in (FAILED, DIED)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Run:
        """What ``to_json`` made the data of."""
        issued = [Issued(**each) for each in data["issued"]]
        return cls(**{**data, "key": RunKey(**data["key"]), "issued": issued})


class Log:
    """The log of a study, which one process writes at a time."""

    def __init__(self, path: Path) -> None:
        """Read what is there."""
        self._path = path
        self.nodeids: list[str] | None = None
        """Of the tests that were collected; None before that."""
        self.unusable: str | None = None
        """Why there is nothing to study."""
        self.finished = False
        self.runs: dict[str, list[Run]] = {}
        """Those that ended, by test, in order."""
        self.flying: RunKey | None = None
        """The run that has started and not ended."""
        self._read = 0
        self.refresh()

    def refresh(self) -> None:
        """Take in what another process has written since."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # still being written
                self._read += len(line)
                self._take(json.loads(line))

    def _take(self, entry: dict[str, Any]) -> None:
        if "started" in entry:
            self.flying = RunKey(**entry["started"])
        elif "ended" in entry:
            run = Run.from_json(entry["ended"])
            self.runs.setdefault(run.key.nodeid, []).append(run)
            self.flying = None
        elif "collected" in entry:
            self.nodeids = entry["collected"]
        elif "unusable" in entry:
            self.unusable = entry["unusable"]
        elif "finished" in entry:
            self.finished = True

    def write(self, **entry: Any) -> None:
        """Add a line: ``collected``, ``unusable``, ``started``, ``ended`` or ``finished``."""
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        self.refresh()


def judged(runs: list[Run]) -> list[Issued]:
    """The synchronizations that can be left out one by one, once the complete runs are there."""
    found = {run.key.what: run.issued for run in runs}
    again = {each.id for each in found.get(AGAIN, [])}
    return [each for each in found.get(COMPLETE, []) if each.id in again and not each.by_framework]


def next_run(nodeid: str, runs: list[Run], repetitions: int) -> RunKey | None:
    """Which run the study of a test needs next; None if it is complete.

    Args:
        nodeid: of the test.
        runs: its runs so far.
        repetitions: how often each synchronization is left out at most, until the test fails of it.
    """
    if any(run.key.what in WHOLE and run.outcome != PASSED for run in runs):
        return None
    done = {run.key.what for run in runs}
    for what in (ALONE, COMPLETE, AGAIN):
        if what not in done:
            return RunKey(nodeid, what)
    wanted = judged(runs)
    if wanted and TRACED not in done:
        return RunKey(nodeid, TRACED)
    for each in wanted:
        tries = [run for run in runs if run.key.what == each.id]
        if len(tries) < repetitions and not any(run.kills for run in tries):
            return RunKey(nodeid, each.id, len(tries) + 1)
    return None
