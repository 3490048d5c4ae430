"""What earlier sessions of a run have left, so that a session that resumes it goes on from there."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.campaign.reader import read_run
from harness.campaign.result import CaseResult
from harness.errors import UsageError
from harness.judge.verdict import Verdict

_SAME = ("device", "seed", "plan", "loads", "leave_out", "misdirect")
"""What the sessions of one run have in common, by its name in the header of a result file."""


@dataclass
class Earlier:
    """The repetitions that have ended, a bit each, and what they add up to."""

    results: dict[str, CaseResult] = field(default_factory=dict)
    _ended: dict[str, bytearray] = field(default_factory=dict)

    def has(self, nodeid: str, repetition: int) -> bool:
        """Whether this repetition of the case has ended."""
        bits = self._ended.get(nodeid, b"")
        return repetition // 8 < len(bits) and bool(bits[repetition // 8] >> repetition % 8 & 1)

    def end(self, nodeid: str) -> int:
        """The number after that of the last repetition that has ended."""
        bits = self._ended.get(nodeid, b"")
        return next((8 * index + bits[index].bit_length() for index in range(len(bits) - 1, -1, -1) if bits[index]), 0)

    def result(self, nodeid: str) -> CaseResult:
        """What the repetitions of a case add up to, to count on from."""
        return self.results.pop(nodeid, None) or CaseResult(nodeid)

    @classmethod
    def read(cls, directory: Path, session: str) -> Earlier:
        """What a run's folder has of other sessions than this one.

        A repetition that two sessions have run, which takes a file that could not be read meanwhile, counts once. One
        that the machine failed under has not ended: it is run again.
        """
        earlier = cls()
        run = read_run(directory)
        definitions = {definition.nodeid: definition for definition in run.cases.values()}
        for record in run:
            lost = record.verdict == Verdict.INFRA.value
            if lost or record.session == session or record.fresh or earlier.has(record.nodeid, record.repetition):
                continue
            result = earlier.results.get(record.nodeid)
            if result is None:
                result = earlier.results[record.nodeid] = CaseResult(record.nodeid)
                definition = definitions.get(record.nodeid)
                if definition is not None:
                    result.launches, result.cycle_length = definition.launches, definition.cycle_length
                    result.oracles, result.control = definition.oracles, definition.control
                    result.defect = definition.defect
            result.add(record)
            if record.message and not record.control:
                result.describe_failure(record.message, f"{record.verdict} under {record.plan}: {record.message}")
            bits = earlier._ended.setdefault(record.nodeid, bytearray())
            bits.extend(bytes(max(0, record.repetition // 8 + 1 - len(bits))))
            bits[record.repetition // 8] |= 1 << record.repetition % 8
        return earlier


def require_same_settings(directory: Path, header: dict[str, Any]) -> None:
    """Refuse to resume a run with other settings: what it counts would be two samples in one.

    Raises:
        UsageError: a setting differs.
    """
    for theirs in read_run(directory).headers.values():
        for name in _SAME:
            if name in theirs and theirs[name] != header[name]:
                raise UsageError(
                    f"{directory} was run with {_said(name, theirs[name])} and cannot be resumed with "
                    f"{_said(name, header[name])}: give the same options, or start a new run."
                )


def _said(name: str, value: object) -> str:
    option = {"loads": "--load"}.get(name, "--" + name.replace("_", "-"))
    if isinstance(value, list):
        value = ",".join(map(str, value)) or None
    return f"no {option}" if value is None else f"{option} {value}"
