"""One repetition: a body run under one plan, observed and judged."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from harness.campaign.lab import Lab
from harness.judge.happens_before import describe
from harness.judge.values import Mismatch, compare
from harness.judge.verdict import Judgement, judge
from harness.observe.holds import HoldOutcome
from harness.observe.instrument import Recording
from harness.perturb.plan import Plan


@dataclass(slots=True)
class Repetition:
    """What became of one repetition."""

    number: int
    plan: Plan
    recording: Recording
    judgement: Judgement
    duration_us: float

    @property
    def holds(self) -> list[HoldOutcome]:
        """What became of each hold of the plan."""
        return self.recording.holds

    @property
    def reason(self) -> str:
        """What repetitions that failed for the same reason have in common: the racing accesses, say."""
        judgement = self.judgement
        if judgement.races:
            return "; ".join(f"{race.kind} {describe(race.first)} {describe(race.second)}" for race in judgement.races)
        if judgement.mismatches:
            return f"a wrong value, {len(judgement.mismatches)} observations"
        return judgement.verdict.value


def run_repetition(
    lab: Lab,
    body: Callable[[], object],
    number: int,
    plan: Plan,
    *,
    with_happens_before: bool,
    **settings: Any,
) -> Repetition:
    """Run a body once and judge it.

    Args:
        lab: the lab that the body works with.
        body: enqueues the case.
        number: which repetition this is, from 0.
        plan: what to hold.
        with_happens_before: whether the trace holds accesses, so that happens-before can judge it.
        settings: those of ``Instrument.begin``. What replays a run under another schedule than submission order is
            ``recording.schedule.schedule``.

    Raises:
        Exception: whatever the body raised, after all work that it had enqueued is complete.
    """
    started = time.perf_counter()
    lab.begin(plan, **settings)
    try:
        body()
    except BaseException:
        # Chained to the body's own error if the work enqueued so far fails as well.
        lab.finish()
        raise
    recording, observations = lab.finish()
    mismatches: list[Mismatch] = [found for found in map(compare, observations) if found is not None]
    trace = recording.trace if with_happens_before else None
    judgement = judge(trace, mismatches, [hold.state for hold in recording.holds])
    return Repetition(number, plan, recording, judgement, (time.perf_counter() - started) * 1e6)
