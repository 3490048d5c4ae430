"""One repetition's verdict: what the two oracles found, and whose fault it is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from harness.judge.happens_before import Race, find_races
from harness.judge.values import Mismatch
from harness.observe.holds import HoldState
from harness.observe.trace import Launch, Trace

NO_WAIT_ISSUED = "no wait was issued: PyTorch or the case left it out."
NOT_HONOURED = (
    "issued and not honoured: the order is there in the trace, so look below PyTorch (runtime, driver, hardware), "
    "or at the case's expected value."
)
UNKNOWN = "unknown: no accesses are in the trace, so whether the wait was issued cannot be told."


class Verdict(str, Enum):
    """What became of one repetition."""

    PASS = "pass"
    RACE = "race"
    """A wrong value, or an unordered access."""
    TIMEOUT = "timeout"
    """It hung and was cut."""
    INFRA = "infra"
    """The machine, the driver or the toolchain failed."""
    INCONCLUSIVE = "inconclusive"
    """Nothing was found, but a hold did not take effect, so nothing is proved."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict and what it rests on."""

    verdict: Verdict
    races: list[Race]
    """What happens-before found; empty without a trace."""
    mismatches: list[Mismatch]
    """What the value oracle found."""
    disagreement: str | None
    """A finding of its own: the oracles contradict each other. That happens-before sees a race which no value shows is
    no contradiction, because only the right hold makes a race visible."""
    attribution: str | None
    """For a race: whose fault it is."""

    @property
    def raced_by(self) -> list[str]:
        """The oracles that found something."""
        found = {"values": self.mismatches, "happens-before": self.races}
        return [oracle for oracle, what in found.items() if what]


def judge(trace: Trace | None, mismatches: list[Mismatch], hold_states: Iterable[HoldState]) -> Judgement:
    """Judge one repetition.

    Args:
        trace: what was enqueued, or None where none was taken (the fully synchronized run). It holds no accesses where
            somebody else's profiler listened to a real device's allocator.
        mismatches: what the value oracle found.
        hold_states: one for each hold of the plan; none for the baseline.
    """
    races = find_races(trace) if trace else []
    if races:
        return Judgement(Verdict.RACE, races, mismatches, None, NO_WAIT_ISSUED)
    if mismatches:
        if trace is None or not any(isinstance(entry, Launch) and entry.accesses for entry in trace):
            return Judgement(Verdict.RACE, races, mismatches, None, UNKNOWN)
        disagreement = "a value is wrong, but happens-before finds every access ordered."
        return Judgement(Verdict.RACE, races, mismatches, disagreement, NOT_HONOURED)
    proved = all(state.proved for state in hold_states)
    return Judgement(Verdict.PASS if proved else Verdict.INCONCLUSIVE, races, mismatches, None, None)
