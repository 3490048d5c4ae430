"""What the repetitions of one case add up to; mergeable, since several workers share a case."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from harness.campaign.store import RepetitionRecord
from harness.judge.verdict import Verdict
from harness.perturb.plan import Plan

KEPT_CAUSES = 3
"""How many causes of failure are described for one case; repetitions with other causes are only counted."""


_BASELINE = str(Plan())
_KEPT_PLANS = 400
_FURTHER_SETS = "further sets"
"""Sets of held launches are ever new: beyond so many plans a case's sets are counted together."""

_RACED = -1
"""In place of a cycle's count: one of its repetitions raced."""

_SENTENCE_UNKNOWN = "documented as unsafe"
"""For a control that is known from its result lines only, because its run was cut off."""


@dataclass(slots=True)
class Cause:
    """Repetitions of a case that failed for one reason, and the most telling description of one of them."""

    text: str
    oracles: int
    """How many oracles the described repetition convinced."""
    repetitions: int = 1


@dataclass(slots=True)
class CaseResult:
    """Counts over the repetitions of one case."""

    nodeid: str
    control: str | None = None
    """For a control, the sentence of the contract that makes it unsafe; for a defect, the file that describes it."""
    defect: bool = False
    """Whether it is a registered defect of PyTorch: like a control, but safe by its contract."""
    launches: int = 0
    """How many launches the body has; each is held alone in every cycle of plans."""
    cycle_length: int = 0
    """How many plans a cycle has; 0 where one plan was given for all repetitions."""
    verdicts: dict[str, int] = field(default_factory=dict)
    plans: dict[str, list[int]] = field(default_factory=dict)
    """For each plan: conclusive repetitions, of which raced."""
    settled_sets: int = 0
    """How many sets of held launches are no longer told apart in ``plans``; see :meth:`settle`."""
    cycles: list[int] = field(default_factory=list)
    """For each cycle of plans of a control: its repetitions as long as none raced, then -1.

    A number a cycle is what remains of a run of any length; everything else is bounded.
    """
    oracles: int = 1
    """How many oracles judge: an aimed repetition of a control must convince each of them."""
    aimed: int = 0
    """Conclusive repetitions whose plan held the racing access of a control."""
    aimed_seen: int = 0
    hold_ms: float = 0.0
    """The longest sleep that held a launch, on a real device."""
    durations_us: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Sum and maximum."""
    causes: dict[str, Cause] = field(default_factory=dict)
    """Why repetitions failed, by what tells one reason from another (the racing accesses, say)."""

    @property
    def repetitions(self) -> int:
        """How many repetitions have ended."""
        return sum(self.verdicts.values())

    def count(self, verdict: Verdict) -> int:
        """How many repetitions ended with this verdict."""
        return self.verdicts.get(verdict.value, 0)

    def add(self, record: RepetitionRecord) -> None:
        """Count one repetition."""
        if record.control and self.control is None:
            self.control, self.defect = _SENTENCE_UNKNOWN, record.defect
        raced = record.verdict == Verdict.RACE.value
        self.verdicts[record.verdict] = self.verdicts.get(record.verdict, 0) + 1
        # What is inconclusive is no evidence for its plan.
        conclusive = record.verdict in (Verdict.RACE.value, Verdict.PASS.value)
        self._add_plan(record.plan, int(conclusive), int(raced))
        if self.cycle_length and self.control is not None:
            self._add_cycle(record.repetition // self.cycle_length, _RACED if raced else 1)
        if record.aimed and conclusive:
            self.aimed += 1
            self.aimed_seen += raced and len(record.raced_by) >= self.oracles
        self.durations_us[0] += record.duration_us
        self.durations_us[1] = max(self.durations_us[1], record.duration_us)

    def _add_plan(self, plan: str, repetitions: int, raced: int) -> None:
        if plan not in self.plans and len(self.plans) >= _KEPT_PLANS and _is_set(plan):
            plan = _FURTHER_SETS
        entry = self.plans.setdefault(plan, [0, 0])
        entry[0] += repetitions
        entry[1] += raced

    def _add_cycle(self, cycle: int, repetitions: int) -> None:
        self.cycles.extend([0] * (cycle + 1 - len(self.cycles)))
        raced = _RACED in (self.cycles[cycle], repetitions)
        self.cycles[cycle] = _RACED if raced else self.cycles[cycle] + repetitions

    def describe_failure(self, reason: str, text: str, oracles: int = 0) -> None:
        """Count a failed repetition, and keep its description if it tells more than what is kept of its reason."""
        self._add_cause(reason, Cause(text, oracles))

    def _add_cause(self, reason: str, cause: Cause) -> None:
        known = self.causes.get(reason)
        if known is not None:
            if cause.oracles > known.oracles:
                known.text, known.oracles = cause.text, cause.oracles
            known.repetitions += cause.repetitions
        elif len(self.causes) < KEPT_CAUSES:
            self.causes[reason] = cause

    def merge(self, other: CaseResult) -> None:
        """Add what another worker counted of the same case."""
        self.control = self.control or other.control
        self.defect = self.defect or other.defect
        self.launches = max(self.launches, other.launches)
        self.cycle_length = max(self.cycle_length, other.cycle_length)
        self.verdicts = dict(Counter(self.verdicts) + Counter(other.verdicts))
        for plan, (repetitions, raced) in other.plans.items():
            self._add_plan(plan, repetitions, raced)
        for cycle, repetitions in enumerate(other.cycles):
            self._add_cycle(cycle, repetitions)
        self.oracles = max(self.oracles, other.oracles)
        self.aimed += other.aimed
        self.aimed_seen += other.aimed_seen
        self.hold_ms = max(self.hold_ms, other.hold_ms)
        self.durations_us = [
            self.durations_us[0] + other.durations_us[0],
            max(self.durations_us[1], other.durations_us[1]),
        ]
        for reason, cause in other.causes.items():
            self._add_cause(reason, replace(cause))

    def settle(self) -> None:
        """Tell the sets of held launches no longer apart, once no other result is to be merged into this one.

        They are most of what a result takes, and a run keeps that of every case until its end.
        """
        sets = [plan for plan in self.plans if _is_set(plan)]
        if len(sets) < 2:
            return
        counts = [self.plans.pop(plan) for plan in sets]
        self.plans[_FURTHER_SETS] = [sum(column) for column in zip(*counts, strict=True)]
        self.settled_sets += len(sets) - 1

    def distinct_plans(self) -> int:
        """How many plans ran; beyond the first few hundred, sets of held launches count as one."""
        return len(self.plans) + self.settled_sets

    def singles_covered(self) -> int:
        """How many launches were held alone at least once."""
        return sum(1 for plan, (n, _) in self.plans.items() if n and plan != _BASELINE and not _is_set(plan))

    def thinnest_plan(self) -> int:
        """The fewest repetitions that any plan without a choice of the seed (baseline, one launch held) got.

        0 as long as not every launch was held.
        """
        if self.cycle_length and self.singles_covered() < self.launches:
            return 0
        return min((n for plan, (n, _) in self.plans.items() if not _is_set(plan)), default=0)

    def unseen(self) -> str | None:
        """Why this run could not have seen the race of a control or a defect; None for other cases, or if it did."""
        if self.control is None or not self.repetitions:
            return None
        # The user's plan need not hold what races, and how often the race shows without is the question there.
        if self.cycle_length and not self.count(Verdict.RACE):
            return f"none of its {self.repetitions} repetitions raced"
        if self.aimed_seen < self.aimed:
            oracles = "" if self.oracles == 1 else " by both oracles"
            seen = f"only {self.aimed_seen} of the {self.aimed} repetitions that held the racing access"
            return f"{seen} were seen to race{oracles}"
        if not self.cycle_length:
            return None
        if not self.aimed and self.launches and self.singles_covered() == self.launches:
            return "no repetition held an access that is known to race, although each launch was held"
        blind = [cycle for cycle, repetitions in enumerate(self.cycles) if repetitions == self.cycle_length]
        if blind:
            return f"{len(blind)} whole cycles of plans passed without a race, the first of them cycle {blind[0]}"
        return None

    @property
    def is_seen(self) -> bool:
        """Whether each aimed repetition of a control, and at least one, convinced each oracle that can see its race."""
        return 0 < self.aimed == self.aimed_seen

    def to_json(self) -> dict[str, Any]:
        """Plain data, for the way from a worker to the controller."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CaseResult:
        """The result that ``to_json`` gave the data of."""
        causes = {reason: Cause(**cause) for reason, cause in data["causes"].items()}
        return cls(**{**data, "causes": causes})


def _is_set(plan: str) -> bool:
    return plan == _FURTHER_SETS or "," in plan
