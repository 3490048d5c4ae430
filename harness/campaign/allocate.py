"""Which cases get the repetitions that there is time left for: those about which the least is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.campaign.numbers import CaseNumbers
from harness.campaign.statistics import race_rate_bound

_OF_A_RACED_CASE = 2.0
"""Times what a case gets of which nothing is known: one that races is worth a better rate, and more descriptions."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """How many further repetitions each case gets."""

    repetitions: dict[str, int]

    @property
    def total(self) -> int:
        """Of all cases together."""
        return sum(self.repetitions.values())


def allocate(cases: Mapping[str, CaseNumbers], total: int, max_races: int | None = None) -> Allocation:
    """Share out repetitions by the width of what is not known: the bound on a rate of which no race was seen.

    Args:
        cases: what is known. Controls get none: that they race is known.
        total: how many repetitions to share out; rounding may give a few more.
        max_races: a case with so many races gets none.
    """
    weights = {}
    for nodeid, case in cases.items():
        if case.control or (max_races is not None and case.races >= max_races):
            continue
        known = sum(sample.repetitions for sample in case.strata.values()) + case.adaptive.repetitions
        weights[nodeid] = _OF_A_RACED_CASE if case.races else race_rate_bound(0, known)
    whole = sum(weights.values())
    return Allocation({nodeid: max(1, round(total * weight / whole)) for nodeid, weight in weights.items()})
