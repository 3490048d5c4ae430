"""What any number of runs says of each case: repetitions, processes, plans, verdicts, and rates that mean something.

A rate is of a *stratum*: repetitions of one plan kind, one load and one kind of hold, in processes that were warm or in
fresh ones. Plans of different kinds are not one sample. Within a stratum the plans are chosen beforehand and equally
often, so the number of races spreads no wider than a binomial one of the mean rate, and the bound holds for that mean
(Hoeffding, 1956). Not in any stratum are repetitions that were added where the evidence was thin, and those of a case
that was stopped for its races: their number depends on what they showed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from harness.campaign.reader import Run
from harness.campaign.statistics import race_rate_interval
from harness.campaign.store import RepetitionRecord
from harness.judge.verdict import Verdict
from harness.perturb.plan import Plan

_KEPT_PLANS = 100_000
"""Of all cases together: beyond, plans are not told apart any more, so that memory stays bounded."""
_BASELINE = str(Plan())
_FAILED = (Verdict.RACE.value, Verdict.TIMEOUT.value)
_CONCLUSIVE = (Verdict.PASS.value, *_FAILED)


class Stratum(NamedTuple):
    """Repetitions that are one sample."""

    kind: str
    """``baseline``, ``single`` or ``set``."""
    load: str
    """As ``--load`` names it; empty without one."""
    hold: str
    """How launches are held, as ``--hold`` names it; empty for the baseline, which holds none."""
    fresh: bool

    def __str__(self) -> str:
        parts = [f"{self.kind} by {self.hold}" if self.hold else self.kind]
        parts.append(f"load {self.load}" if self.load else "no load")
        return ", ".join([*parts, "fresh process"] if self.fresh else parts)

    @classmethod
    def of(cls, record: RepetitionRecord) -> Stratum:
        """The stratum of a repetition."""
        kind = _kind(record.plan)
        return cls(kind, record.load, "" if kind == "baseline" else record.hold, record.fresh)


@dataclass(slots=True)
class Sample:
    """Conclusive repetitions of one stratum."""

    repetitions: int = 0
    races: int = 0
    """Of which raced or hung."""

    def interval(self) -> tuple[float, float]:
        """The one-sided 95 % Clopper-Pearson bounds on the rate, from below and from above."""
        return race_rate_interval(self.races, self.repetitions)


@dataclass(slots=True)
class CaseNumbers:
    """The repetitions of one case in all runs."""

    nodeid: str
    control: bool = False
    defect: bool = False
    verdicts: dict[str, int] = field(default_factory=dict)
    processes: set[tuple[str, str, str]] = field(default_factory=set)
    plans: set[str] = field(default_factory=set)
    strata: dict[Stratum, Sample] = field(default_factory=dict)
    adaptive: Sample = field(default_factory=Sample)
    """Repetitions that were added where the evidence was thin."""
    stopped: bool = False
    """Whether it was not repeated as often as planned because it had raced: then no rate is one of a fixed sample."""

    @property
    def repetitions(self) -> int:
        """How many repetitions have ended."""
        return sum(self.verdicts.values())

    @property
    def races(self) -> int:
        """How many of them raced or hung, adaptive ones included."""
        return sum(self.verdicts.get(verdict, 0) for verdict in _FAILED)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "case": self.nodeid,
            "control": self.control,
            "defect": self.defect,
            "repetitions": self.repetitions,
            "processes": len(self.processes),
            "plans": len(self.plans),
            "verdicts": self.verdicts,
            "stopped": self.stopped,
            "adaptive": {"repetitions": self.adaptive.repetitions, "races": self.adaptive.races},
            "strata": [
                {
                    **stratum._asdict(),
                    "repetitions": sample.repetitions,
                    "races": sample.races,
                    **({} if self.stopped else dict(zip(("lower", "upper"), sample.interval(), strict=True))),
                }
                for stratum, sample in sorted(self.strata.items())
            ],
        }


@dataclass
class Numbers:
    """What any number of runs says."""

    cases: dict[str, CaseNumbers] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """What could not be read."""
    _plans: int = 0

    def add(self, run: Run) -> None:
        """Count a run: one pass over its files."""
        directory = str(run.directory)
        for record in run:
            self._count(record, directory)
        stop_after = [int(header["max_races"]) for header in run.headers.values() if header.get("max_races")]
        if stop_after:
            for definition in run.cases.values():
                case = self.cases.get(definition.nodeid)
                if case is not None and case.races >= min(stop_after):
                    case.stopped = True
        self.problems += run.problems

    def _count(self, record: RepetitionRecord, directory: str) -> None:
        case = self.cases.get(record.nodeid)
        if case is None:
            case = self.cases[record.nodeid] = CaseNumbers(record.nodeid, record.control, record.defect)
        case.verdicts[record.verdict] = case.verdicts.get(record.verdict, 0) + 1
        case.processes.add((directory, record.session, record.worker))
        if record.plan not in case.plans and self._plans < _KEPT_PLANS:
            case.plans.add(record.plan)
            self._plans += 1
        if record.verdict not in _CONCLUSIVE:
            return
        sample = case.adaptive if record.adaptive else case.strata.setdefault(Stratum.of(record), Sample())
        sample.repetitions += 1
        sample.races += record.verdict in _FAILED

    @classmethod
    def of(cls, runs: Iterable[Run]) -> Numbers:
        """Read the runs."""
        numbers = cls()
        for run in runs:
            numbers.add(run)
        return numbers


def _kind(plan: str) -> str:
    # Plan.parse takes ten times as long, and there are millions.
    return "baseline" if plan == _BASELINE else "set" if "," in plan else "single"
