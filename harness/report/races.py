"""The races of a run that are kept in full: what was seen, and the timeline, one file each in ``races/``.

Such a file is a Chrome trace, for Perfetto, that also holds everything the HTML report says of the race. It is made
where the race was seen, since a repetition is not kept otherwise.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from harness.campaign.case import Case
from harness.campaign.options import Options
from harness.campaign.repetition import Repetition
from harness.campaign.result import KEPT_CAUSES
from harness.campaign.store import repetition_id
from harness.files import write_whole
from harness.judge.verdict import Verdict
from harness.observe.trace import SourceLine
from harness.report.failure import describe_failure, replay_command
from harness.report.perfetto import chrome_trace
from harness.report.source_lines import SourceLines
from harness.report.timeline import Timeline

FOLDER = "races"
"""Of a run's folder."""
_SUFFIX = ".trace.json"
_KEY = "sidestream"
_VERSION = 1
_LINES_AROUND = 2
_LONGEST_NAME = 60


@dataclass(frozen=True, slots=True)
class KeptRace:
    """One repetition that raced, as kept."""

    id: str
    nodeid: str
    repetition: int
    plan: str
    device: str
    reason: str
    """What repetitions that failed for the same reason have in common."""
    oracles: list[str]
    """Those that found something."""
    values: list[str]
    """What the value oracle found, a sentence each."""
    attribution: str | None
    disagreement: str | None
    replay: str
    text: str
    """As pytest shows it."""
    timeline: Timeline
    fault: str | None = None
    """What was done wrong on purpose, in words."""
    excerpts: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    """The code around the lines of the racing accesses, by ``file:line``: line numbers and text."""
    path: Path | None = None
    """Its file; set when it is read."""

    def to_json(self) -> dict[str, Any]:
        """Plain data, in the form of a Chrome trace."""
        data = {key: value for key, value in asdict(self).items() if key not in ("path", "timeline")}
        kept = {"version": _VERSION, **data, "timeline": self.timeline.to_json()}
        return chrome_trace(self.timeline, name=self.nodeid, extra={_KEY: kept})

    @classmethod
    def from_json(cls, data: dict[str, Any], path: Path | None = None) -> KeptRace:
        """What ``to_json`` made the data of.

        Raises:
            KeyError, TypeError: it is no such data, or of another version.
        """
        kept = dict(data[_KEY])
        if kept.pop("version") != _VERSION:
            raise KeyError("version")
        kept["timeline"] = Timeline.from_json(kept["timeline"])
        kept["excerpts"] = {
            where: [(int(n), str(text)) for n, text in each] for where, each in kept["excerpts"].items()
        }
        return cls(**kept, path=path)


class _Kept(NamedTuple):
    """What is kept of one reason."""

    oracles: int
    path: Path


class RaceKeeper:
    """Writes the races of one case, as one process sees them: one file for each distinct race, of the first few.

    A disk that fails never fails the test.
    """

    def __init__(self, directory: Path, options: Options, device: str) -> None:
        """``directory`` is that of the run, ``device`` the accelerator in words."""
        self.failure: str | None = None
        """The first error, as one sentence."""
        self._folder = directory / FOLDER
        self._options = options
        self._device = device
        self._kept: dict[str, _Kept] = {}

    def describe(self, case: Case, repetition: Repetition) -> str:
        """The text of a failed repetition; keeps it if it is a race that is not kept yet, or tells more of it."""
        if not self._is_new(repetition):
            return describe_failure(case, repetition, self._options, self._device)
        path = self._path(case, repetition)
        text = describe_failure(case, repetition, self._options, self._device, path)
        if not self._write(path, self._made(case, repetition, text)):
            return describe_failure(case, repetition, self._options, self._device)
        before = self._kept.get(repetition.reason)
        if before is not None:
            with contextlib.suppress(OSError):
                before.path.unlink()
        self._kept[repetition.reason] = _Kept(len(repetition.judgement.raced_by), path)
        return text

    def _is_new(self, repetition: Repetition) -> bool:
        if repetition.judgement.verdict is not Verdict.RACE:
            return False
        # As CaseResult keeps texts, so that each text that is shown has its file.
        known = self._kept.get(repetition.reason)
        if known is None:
            return len(self._kept) < KEPT_CAUSES
        return len(repetition.judgement.raced_by) > known.oracles

    def _path(self, case: Case, repetition: Repetition) -> Path:
        test = re.sub(r"[^\w.-]+", "-", case.nodeid.rpartition("::")[2]).strip("-")[:_LONGEST_NAME]
        return self._folder / f"{test}-{repetition_id(case.nodeid, repetition.number, fresh=case.fresh)}{_SUFFIX}"

    def _made(self, case: Case, repetition: Repetition, text: str) -> KeptRace:
        assert case.discovery is not None
        judgement, trace = repetition.judgement, repetition.recording.trace
        lines = SourceLines(trace, case.discovery)
        accesses = [access for race in judgement.races for access in (race.first, race.second)]
        found = [*map(lines.of, accesses), *(mismatch.line for mismatch in judgement.mismatches)]
        return KeptRace(
            id=repetition_id(case.nodeid, repetition.number, fresh=case.fresh),
            nodeid=case.nodeid,
            repetition=repetition.number,
            plan=str(repetition.plan),
            device=self._device,
            reason=repetition.reason,
            oracles=judgement.raced_by,
            values=[str(mismatch) for mismatch in judgement.mismatches],
            attribution=judgement.attribution,
            disagreement=judgement.disagreement,
            replay=replay_command(case.nodeid, repetition.plan, self._options),
            text=text,
            timeline=Timeline.of(trace, judgement.races, repetition.holds, device_of=case.device_of, line_of=lines.of),
            fault=None if self._options.fault is None else self._options.fault.in_words(),
            excerpts={str(line): _excerpt(line) for line in dict.fromkeys(found) if line is not None},
        )

    def _write(self, path: Path, race: KeptRace) -> bool:
        try:
            path.parent.mkdir(exist_ok=True)
            write_whole(path, json.dumps(race.to_json(), separators=(",", ":")))
        except OSError as error:
            self.failure = self.failure or f"a timeline could not be written to {path.parent}: {error.strerror}."
            return False
        return True


def _excerpt(line: SourceLine) -> list[tuple[int, str]]:
    numbers = range(max(1, line.line - _LINES_AROUND), line.line + _LINES_AROUND + 1)
    code = [(number, linecache.getline(line.file, number).rstrip()) for number in numbers]
    while code and not code[-1][1]:
        code.pop()
    while code and not code[0][1]:
        code.pop(0)
    indent = min((len(text) - len(text.lstrip()) for _, text in code if text), default=0)
    return [(number, text[indent:]) for number, text in code]


def read_races(directory: Path, problems: list[str]) -> Iterator[KeptRace]:
    """The races that a run has kept, of several of one reason the one that convinced most oracles.

    Args:
        directory: of the run.
        problems: what could not be read is added here, a sentence each.
    """
    found: dict[tuple[str, str], KeptRace] = {}
    for path in sorted((directory / FOLDER).glob(f"*{_SUFFIX}")):
        try:
            race = KeptRace.from_json(json.loads(path.read_bytes()), path)
        except (OSError, ValueError, KeyError, TypeError):
            problems.append(f"{path} is no race that this version of Sidestream has kept; it was skipped.")
            continue
        key = race.nodeid, race.reason
        if key not in found or len(race.oracles) > len(found[key].oracles):
            found[key] = race
    yield from found.values()
