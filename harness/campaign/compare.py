"""Whether one build races more often than another: a test for each case, and what it would take to tell."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from harness.campaign.numbers import CaseNumbers, Numbers
from harness.campaign.statistics import Counts, adjusted, exact_test, race_rate_bound, repetitions_to_tell
from harness.exit_codes import ExitCode

SIGNIFICANCE = 0.05
"""The false discovery rate over the cases."""


class Change(str, Enum):
    """What became of a case from A to B."""

    REGRESSION = "regression"
    """It races more often in B, beyond chance."""
    IMPROVEMENT = "improvement"
    """It races less often in B, beyond chance."""
    CANNOT_TELL = "cannot tell"
    """It raced more often in B, but that may be chance; or no outcome of so few repetitions could tell."""
    NO_REGRESSION = "no regression seen"
    """It raced no more often in B, with repetitions enough that it could have shown."""


@dataclass(slots=True)
class Comparison:
    """One case in both builds, by the strata that both have run."""

    nodeid: str
    counts: Counts
    """Of all common strata together."""
    p_value: float
    change: Change
    control: bool = False
    """Whether it is to race: a control, or a registered defect. Then a change is for your information."""
    adjusted_p: float = 1.0
    needed: int | None = None
    """How many repetitions of each build would tell; None where that is not the question or not known."""
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "case": self.nodeid,
            "races_a": self.counts.races_a,
            "repetitions_a": self.counts.repetitions_a,
            "races_b": self.counts.races_b,
            "repetitions_b": self.counts.repetitions_b,
            "p": self.p_value,
            "adjusted_p": self.adjusted_p,
            "change": self.change.value,
            "needed": self.needed,
            "control": self.control,
            "note": self.note,
        }


@dataclass
class Comparisons:
    """All cases of two builds."""

    cases: list[Comparison] = field(default_factory=list)
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    no_common_stratum: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> ExitCode:
        """1 for a regression of a safe case, 6 if one cannot be told, 5 if there was nothing to compare."""
        changes = {case.change for case in self.cases if not case.control}
        if Change.REGRESSION in changes:
            return ExitCode.RACE
        if Change.CANNOT_TELL in changes or self.no_common_stratum:
            return ExitCode.INCONCLUSIVE
        return ExitCode.CLEAN if self.cases else ExitCode.NOTHING_RAN


def compare(a: Numbers, b: Numbers, significance: float = SIGNIFICANCE) -> Comparisons:
    """Compare B with A, case by case.

    Args:
        a: the build to compare with.
        b: the build in question.
        significance: the false discovery rate over the cases (Benjamini and Hochberg).
    """
    result = Comparisons(only_a=sorted(a.cases.keys() - b.cases), only_b=sorted(b.cases.keys() - a.cases))
    tested: list[tuple[Comparison, list[Counts]]] = []
    for nodeid in sorted(a.cases.keys() & b.cases):
        strata = _common_strata(a.cases[nodeid], b.cases[nodeid])
        if not strata:
            result.no_common_stratum.append(nodeid)
            continue
        case = Comparison(nodeid, _pooled(strata), exact_test(strata), Change.NO_REGRESSION)
        case.control = b.cases[nodeid].control
        if a.cases[nodeid].stopped or b.cases[nodeid].stopped:
            case.note = "stopped for its races, so the rates are too high"
        tested.append((case, strata))
    for (case, strata), p_value in zip(tested, adjusted([case.p_value for case, _ in tested]), strict=True):
        case.adjusted_p = p_value
        _decide(case, strata, significance)
        result.cases.append(case)
    return result


def _common_strata(a: CaseNumbers, b: CaseNumbers) -> list[Counts]:
    common = [key for key in a.strata if key in b.strata]
    pairs = [(a.strata[key], b.strata[key]) for key in common]
    return [Counts(one.races, one.repetitions, other.races, other.repetitions) for one, other in pairs]


def _pooled(strata: list[Counts]) -> Counts:
    return Counts(
        sum(each.races_a for each in strata),
        sum(each.repetitions_a for each in strata),
        sum(each.races_b for each in strata),
        sum(each.repetitions_b for each in strata),
    )


def _direction(strata: list[Counts]) -> float:
    """Above 0 where B raced more often than chance would share out the races of each stratum."""
    excess = 0.0
    for each in strata:
        share = each.repetitions_b / (each.repetitions_a + each.repetitions_b)
        excess += each.races_b - share * (each.races_a + each.races_b)
    return excess


def _decide(case: Comparison, strata: list[Counts], significance: float) -> None:
    direction = _direction(strata)
    if case.adjusted_p < significance and direction:
        case.change = Change.REGRESSION if direction > 0 else Change.IMPROVEMENT
        return
    if direction > 0:
        case.change = Change.CANNOT_TELL
        # Where one case in many differs, its p-value has to be smaller by as much as the adjustment takes.
        factor = case.adjusted_p / case.p_value if case.p_value else 1.0
        case.needed = repetitions_to_tell(case.counts, significance / max(1.0, factor))
        return
    everything = [Counts(each.races_a, each.repetitions_a, each.repetitions_b, each.repetitions_b) for each in strata]
    if case.counts.races_a < case.counts.repetitions_a and exact_test(everything) >= significance:
        case.change = Change.CANNOT_TELL
        case.needed = repetitions_to_tell(Counts(0, 1, 1, 1), significance)
        case.note = "too few repetitions: not even a race in each of B's would have told"
    elif not case.counts.races_b:
        case.note = f"B races in less than {race_rate_bound(0, case.counts.repetitions_b):.2%}"
