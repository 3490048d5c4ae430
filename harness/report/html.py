"""The report of any number of runs as one HTML file that needs nothing else: no network, no script, no other file.

What is shown is prepared here; ``templates/report.html.j2`` lays it out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import harness
from harness.campaign.numbers import CaseNumbers, Numbers
from harness.campaign.reader import Run
from harness.campaign.statistics import race_rate_interval
from harness.campaign.store import RepetitionRecord, case_key
from harness.errors import UsageError
from harness.files import write_whole
from harness.judge.verdict import Verdict
from harness.perturb.load.load import LoadReport
from harness.report.drawing import STYLE, draw
from harness.report.load import rate as rate_in_words
from harness.report.outcome import counted
from harness.report.races import KeptRace, read_races
from harness.report.rates import Rates
from harness.report.timeline import MissingArrow
from harness.report.twins import TWINS

_TEMPLATE = "report.html.j2"
_MOST_DRAWN = 3
"""Of the races of one repetition; the rest are sentences."""
_MOST_MESSAGES = 3
"""Of a case, why repetitions did not pass."""
_MOSTLY = 0.5


@dataclass(frozen=True, slots=True)
class _Meaning:
    """What a verdict says, in the manner of JCStress: whether it may happen, and what it is."""

    expectation: str
    words: str


_SAFE = {
    Verdict.PASS: _Meaning("acceptable", "Every value was right and every access ordered."),
    Verdict.RACE: _Meaning("forbidden", "A wrong value, or two accesses that nothing orders."),
    Verdict.TIMEOUT: _Meaning("forbidden", "It hung and was cut."),
    Verdict.INFRA: _Meaning("no evidence", "The machine, the driver or the toolchain failed."),
    Verdict.INCONCLUSIVE: _Meaning("no evidence", "A hold did not take effect."),
}
_UNSAFE = {
    **_SAFE,
    Verdict.PASS: _Meaning("acceptable", "The race had no consequence under this plan."),
    Verdict.RACE: _Meaning("required", "The race that the case is there to show."),
}


@dataclass
class Report:
    """What the runs hold, read."""

    numbers: Numbers = field(default_factory=Numbers)
    rates: Rates = field(default_factory=Rates)
    races: list[KeptRace] = field(default_factory=list)
    messages: dict[str, list[RepetitionRecord]] = field(default_factory=dict)
    """Of each case, repetitions that did not pass, one for each of the first few reasons."""
    loads: list[LoadReport] = field(default_factory=list)
    twins: list[dict[str, Any]] = field(default_factory=list)
    """What ``write_twins_json`` wrote, of each run that has it."""
    environments: list[dict[str, Any]] = field(default_factory=list)
    settings: list[dict[str, Any]] = field(default_factory=list)
    """The options of each run."""
    directories: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, runs: Iterable[Run]) -> Report:
        """Read the runs."""
        report = cls()
        for run in runs:
            report._add(run)
        report.problems = list(dict.fromkeys([*report.numbers.problems, *report.problems]))
        return report

    def _add(self, run: Run) -> None:
        self.numbers.add(run)
        for record in run:
            self.rates.add(record)
            if record.message or record.verdict != Verdict.PASS.value:
                self._keep_message(record)
        self.directories.append(run.directory)
        self.races += read_races(run.directory, self.problems)
        self.environments += [each for each in run.environments if each not in self.environments]
        for header in run.headers.values():
            settings = {key: value for key, value in header.items() if key not in ("schema", "session")}
            if settings not in self.settings:
                self.settings.append(settings)
        self.problems += [f"{lost}." for lost in run.in_flight]
        self._add_loads(run.directory)
        self._add_twins(run.directory)

    def _keep_message(self, record: RepetitionRecord) -> None:
        kept = self.messages.setdefault(record.nodeid, [])
        reasons = {(each.verdict, each.message) for each in kept}
        if len(kept) < _MOST_MESSAGES and (record.verdict, record.message) not in reasons:
            kept.append(record)

    def _add_loads(self, directory: Path) -> None:
        for path in sorted(directory.glob("*.load.json")):
            try:
                self.loads += map(LoadReport.from_json, json.loads(path.read_bytes()))
            except (OSError, ValueError, TypeError):
                self.problems.append(f"{path} could not be read, so what its process' load achieved is not shown.")

    def _add_twins(self, directory: Path) -> None:
        path = directory / TWINS
        if not path.exists():
            return
        try:
            data = json.loads(path.read_bytes())
            self.twins.append({"summary": dict(data["summary"]), "cases": list(data["cases"]), **data})
        except (OSError, ValueError, TypeError, KeyError):
            self.problems.append(f"{path} could not be read, so its twins are not shown.")


def write_html(path: Path, report: Report) -> None:
    """Write the report.

    Raises:
        UsageError: the file cannot be written.
    """
    text = to_html(report, path.absolute().parent)
    try:
        write_whole(path, text)
    except OSError as error:
        raise UsageError(f"--html {path}: {error.strerror}; name another file.") from None


def to_html(report: Report, folder: Path) -> str:
    """The report as text.

    Args:
        report: what to show.
        folder: where it will be, since files are named as seen from there.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("harness.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    kept: dict[str, list[KeptRace]] = {}
    for race in report.races:
        kept.setdefault(race.nodeid, []).append(race)
    cases = [
        _case(case, report.messages.get(case.nodeid, []), kept.get(case.nodeid, []))
        for case in report.numbers.cases.values()
    ]
    return environment.get_template(_TEMPLATE).render(
        version=harness.__version__,
        made=f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        title=_title(report),
        lead=_lead(report),
        figures=_figures(report),
        races=[_race(race, folder) for race in sorted(report.races, key=lambda race: race.nodeid)],
        files=_by_file(cases),
        untimed=bool(report.numbers.cases) and not report.rates.spans(),
        rates=_rates(report.rates),
        loads=[_load(load) for load in report.loads],
        information=sorted({load.information for load in report.loads if load.information}),
        twins=[_twins(each) for each in report.twins],
        environments=[dict(_flat(each)) for each in report.environments],
        settings=[dict(_flat(each)) for each in report.settings],
        directories=[str(each) for each in report.directories],
        problems=report.problems,
        drawing_style=STYLE,
    )


# The whole.


def _kinds(report: Report) -> tuple[list[CaseNumbers], list[CaseNumbers], list[CaseNumbers]]:
    cases = list(report.numbers.cases.values())
    return (
        [case for case in cases if not case.control],
        [case for case in cases if case.control and not case.defect],
        [case for case in cases if case.defect],
    )


def _title(report: Report) -> str:
    safe, *_ = _kinds(report)
    raced = sum(bool(case.races) for case in safe)
    if not report.numbers.cases:
        return "Twins" if report.twins else "Nothing ran"
    return f"{raced} of {counted(len(safe), 'safe case')} raced" if raced else "No safe case raced"


def _lead(report: Report) -> list[str]:
    safe, controls, defects = _kinds(report)
    lines = []
    if safe:
        repetitions, races = sum(case.repetitions for case in safe), sum(case.races for case in safe)
        raced = f"{races:,}" if races else "none"
        lines.append(f"{counted(repetitions, 'repetition')} of safe cases, of which {raced} raced or hung.")
    for cases, noun in ((controls, "control"), (defects, "case of known defects of PyTorch")):
        if cases:
            seen = sum(bool(case.verdicts.get(Verdict.RACE.value)) for case in cases)
            plural = "cases of known defects of PyTorch" if cases is defects else None
            lines.append(
                f"{seen:,} of {counted(len(cases), noun, plural)} {'was' if seen == 1 else 'were'} seen to race."
            )
    if report.numbers.cases and not controls and not defects:
        lines.append("No control ran, so nothing shows that this run could have seen a race.")
    for settings in report.settings:
        for key, done in (("leave_out", "left out"), ("misdirect", "misdirected")):
            if settings.get(key):
                lines.append(f"{settings[key]} was {done} on purpose, in every repetition.")
    undelivered = sorted({load.dimension for load in report.loads if not load.is_delivered})
    if undelivered:
        lines.append(
            f"Not delivered: load {', '.join(undelivered)}. The run proves nothing about cases under that load."
        )
    return list(dict.fromkeys(lines))


def _figures(report: Report) -> list[tuple[str, str]]:
    cases = report.numbers.cases.values()
    processes = set().union(*(case.processes for case in cases))
    figures = [
        ("cases", f"{len(cases):,}"),
        ("repetitions", f"{sum(case.repetitions for case in cases):,}"),
        ("distinct races kept", f"{len(report.races):,}"),
        ("processes", f"{len(processes):,}"),
    ]
    devices = list(dict.fromkeys(str(each.get("device", "")) for each in report.settings))
    torch = list(dict.fromkeys(str(each.get("torch", "")) for each in report.settings))
    if not cases:
        figures = []
    return [*figures, ("device", ", ".join(filter(None, devices))), ("torch", ", ".join(filter(None, torch)))]


# Races.


def _race(race: KeptRace, folder: Path) -> dict[str, Any]:
    missing = race.timeline.missing
    return {
        "anchor": f"race-{race.id}",
        "case_anchor": f"case-{case_key(race.nodeid)}",
        "nodeid": race.nodeid,
        "id": race.id,
        "plan": race.plan,
        "device": race.device,
        "oracles": " and ".join(race.oracles),
        "heading": _heading(race),
        "found": [_found(race, number, each) for number, each in enumerate(missing[:_MOST_DRAWN])],
        "further": [each.sentence for each in missing[_MOST_DRAWN:]],
        "drawing": "" if missing else _safe(draw(race.timeline)),
        "wrong": race.values,
        "fault": race.fault,
        "attribution": race.attribution,
        "disagreement": race.disagreement,
        "replay": race.replay,
        "trace": None if race.path is None else os.path.relpath(race.path, folder),
        "text": race.text,
    }


def _heading(race: KeptRace) -> str:
    return race.timeline.missing[0].kind if race.timeline.missing else "wrong value"


def _found(race: KeptRace, number: int, missing: MissingArrow) -> dict[str, Any]:
    timeline = race.timeline
    accesses = []
    for role, place in (("first", missing.first), ("second", missing.second)):
        item = timeline.items[place]
        lane = timeline.lanes[item.lane]
        accesses.append(
            {
                "role": role,
                "title": item.title,
                "launch": None if item.index is None else f"{lane.name}:{item.index}",
                "lane": "the host" if lane.is_host else f"stream {lane.name}",
                "node": item.node,
                "line": item.line,
                "held": item.hold is not None,
                "excerpt": [
                    {"number": at, "code": code, "here": item.line is not None and item.line.endswith(f":{at}")}
                    for at, code in race.excerpts.get(item.line or "", [])
                ],
            }
        )
    return {
        "kind": missing.kind,
        "cure": missing.cure,
        "headline": missing.headline,
        "sentence": missing.sentence[:1].upper() + missing.sentence[1:],
        "bytes": f"bytes {missing.start:,} to {missing.stop:,} of block {missing.block}",
        "accesses": accesses,
        "drawing": _safe(draw(timeline, number)),
    }


def _safe(markup: str) -> Any:
    """Markup of our own, which has escaped what others wrote."""
    from markupsafe import Markup

    return Markup(markup)


# Cases.


def _case(case: CaseNumbers, messages: Sequence[RepetitionRecord], races: Sequence[KeptRace]) -> dict[str, Any]:
    meanings = _UNSAFE if case.control else _SAFE
    outcomes = [
        {
            "verdict": verdict.value,
            "count": case.verdicts[verdict.value],
            "share": case.verdicts[verdict.value] / case.repetitions,
            "expectation": meaning.expectation,
            "words": meaning.words,
        }
        for verdict, meaning in meanings.items()
        if case.verdicts.get(verdict.value)
    ]
    status, mood = _status(case)
    return {
        "anchor": f"case-{case_key(case.nodeid)}",
        "nodeid": case.nodeid,
        "name": case.nodeid.partition("::")[2] or case.nodeid,
        "kind": "known defect" if case.defect else "control" if case.control else "safe",
        "status": status,
        "mood": mood,
        "repetitions": case.repetitions,
        "added": case.adaptive.repetitions,
        "processes": len(case.processes),
        "plans": len(case.plans),
        "outcomes": outcomes,
        "strata": list(_strata(case)),
        "stopped": case.stopped,
        "races": [{"anchor": f"race-{race.id}", "id": race.id, "kind": _heading(race)} for race in races],
        # What became of a race is told where it is drawn.
        "messages": [
            {"id": each.id, "verdict": each.verdict, "plan": each.plan, "text": _first_line(each.message)}
            for each in messages
            if each.message and not case.control and not (races and each.verdict == Verdict.RACE.value)
        ],
    }


def _first_line(text: str) -> str:
    """The first line of a text."""
    return text.splitlines()[0] if text else ""


def _status(case: CaseNumbers) -> tuple[str, str]:
    """What is to be said of a case in two words, and whether that is ``bad``, ``good`` or ``unclear``."""
    raced = case.verdicts.get(Verdict.RACE.value, 0)
    if case.control:
        return ("raced, as it must", "good") if raced else ("did not race", "bad")
    if raced:
        return "raced", "bad"
    if case.verdicts.get(Verdict.TIMEOUT.value):
        return "hung", "bad"
    if case.verdicts.get(Verdict.INFRA.value):
        return "repetitions lost", "unclear"
    if case.verdicts.get(Verdict.INCONCLUSIVE.value, 0) > _MOSTLY * case.repetitions:
        return "inconclusive", "unclear"
    return "no race seen", "good"


def _strata(case: CaseNumbers) -> Iterator[dict[str, str]]:
    for stratum, sample in sorted(case.strata.items()):
        lower, upper = race_rate_interval(sample.races, sample.repetitions)
        bounds = f"below {upper:.2%}" if not sample.races else f"{lower:.2%} to {upper:.2%}"
        yield {
            "name": str(stratum),
            "seen": f"{sample.races:,} of {sample.repetitions:,}",
            "bounds": "none: stopped for its races" if case.stopped else bounds,
        }


def _by_file(cases: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cases by file, within a file those first that need attention."""
    files: dict[str, list[dict[str, Any]]] = {}
    for case in sorted(cases, key=lambda case: case["nodeid"]):
        files.setdefault(case["nodeid"].partition("::")[0], []).append(case)
    moods = ("bad", "unclear", "good")
    made = []
    for path, found in files.items():
        found.sort(key=lambda case: moods.index(case["mood"]))
        bad = sum(case["mood"] != "good" for case in found)
        made.append({"path": path, "cases": found, "attention": bad, "count": counted(len(found), "case")})
    return sorted(made, key=lambda file: not file["attention"])


# Rates, load, twins, environment.


def _rates(rates: Rates) -> dict[str, Any] | None:
    spans = rates.spans()
    if not spans:
        return None
    most = max(span.repetitions for span in spans) / rates.length_s
    width = 100 / len(spans)
    return {
        "bars": [
            {
                "x": round(number * width, 3),
                "width": round(width * 0.86, 3),
                "height": round(100 * span.repetitions / rates.length_s / most, 2) if most else 0,
                "races": span.races,
                "words": f"{span.repetitions / rates.length_s:,.1f} repetitions/s, {counted(span.races, 'race')}",
            }
            for number, span in enumerate(spans)
        ],
        "most": f"{most:,.0f} repetitions/s",
        "length": duration(len(spans) * rates.length_s),
        "span": duration(rates.length_s),
        "total": sum(span.repetitions for span in spans),
        "races": sum(span.races for span in spans),
    }


def duration(seconds: float) -> str:
    """A length of time with its unit: ``40 s``, ``12 min``, ``3.5 h``."""
    if seconds < 10:
        return f"{seconds:g} s"
    if seconds < 120:
        return f"{seconds:,.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:,.0f} min"
    return f"{seconds / 3600:,.1f} h"


def _load(load: LoadReport) -> dict[str, Any]:
    share = load.share
    most = max([load.alone or 0.0, *(achieved for _, _, achieved in load.history)])
    width = 100 / max(1, len(load.history))
    return {
        "bars": [
            {
                "x": round(number * width, 3),
                "width": round(width, 3),
                "height": round(100 * achieved / most, 2) if most else 0,
                "words": f"{rate_in_words(achieved, load.unit)} from {duration(round(number * length_s, 1))} on",
            }
            for number, (_, length_s, achieved) in enumerate(load.history)
        ],
        "length": duration(round(sum(length_s for _, length_s, _ in load.history), 1)),
        "most": rate_in_words(most, load.unit),
        "dimension": load.dimension,
        "intensity": f"{load.intensity:g}",
        "worker": load.worker,
        "achieved": "too brief to tell" if load.achieved is None else rate_in_words(load.achieved, load.unit),
        "alone": "unknown" if load.alone is None else rate_in_words(load.alone, load.unit),
        "share": None if share is None else f"{share:.0%}",
        "width": 0 if share is None else round(min(100.0, 100 * share), 1),
        "least": round(100 * load.least_share, 1),
        "delivered": load.is_delivered,
    }


def _twins(data: dict[str, Any]) -> dict[str, Any]:
    summary = data["summary"]
    total = max(1, summary["twins"])
    survivors = [
        {"nodeid": case["nodeid"], "where": twin["where"], "note": twin["note"], "plan": twin["plan"]}
        for case in data["cases"]
        for twin in case["twins"]
        if twin["outcome"] == "survived"
    ]
    names = ("killed", "redundant", "survived")
    return {
        "device": data.get("device", ""),
        "total": summary["twins"],
        "parts": [(name, summary[name], round(100 * summary[name] / total, 2)) for name in names],
        "rates": [
            ("by either oracle", summary["kill_rate"]),
            ("by values", summary["kill_rate_values"]),
            ("by happens-before", summary["kill_rate_happens_before"]),
        ],
        "issuers": [each for each in data.get("issuers", []) if each["twins"]],
        "survivors": survivors,
    }


def _flat(data: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            for number, each in enumerate(value):
                yield from _flat(each, f"{prefix}{key}[{number}].")
        elif value not in (None, [], ""):
            yield prefix + key, ", ".join(map(str, value)) if isinstance(value, list) else str(value)
