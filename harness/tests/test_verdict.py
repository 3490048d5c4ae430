"""The verdict table: which oracle, which holds, whose fault."""

from __future__ import annotations

import pytest
import torch

from harness.judge.values import Mismatch, Observation, compare
from harness.judge.verdict import Verdict, judge
from harness.observe.holds import HoldState
from harness.observe.trace import Access, Launch, Record, Trace, Wait
from harness.perturb.plan import LaunchId

FILL = Launch(LaunchId("fill", 0), "aten::fill_", None, None, (Access(0, 0, 4, True),))
USE = Launch(LaunchId("ambient", 0), "aten::mul", None, None, (Access(0, 0, 4, False),))
ORDERED: Trace = [FILL, Record("fill", 1), Wait("ambient", 1), USE]
UNORDERED: Trace = [FILL, USE]
WITHOUT_ACCESSES: Trace = [entry._replace(accesses=()) if isinstance(entry, Launch) else entry for entry in ORDERED]


def wrong_value() -> Mismatch:
    mismatch = compare(Observation("gradient", None, torch.tensor(1.0), torch.tensor(2.0)))
    assert mismatch is not None
    return mismatch


P, F, R, M = HoldState.PENDING, HoldState.FORCED, HoldState.RAN, HoldState.MISSING


@pytest.mark.parametrize(
    ("trace", "wrong", "states", "verdict", "raced_by"),
    [
        (ORDERED, False, [], "pass", []),
        (ORDERED, False, [P], "pass", []),
        (ORDERED, False, [F], "pass", []),
        (ORDERED, False, [P, F], "pass", []),
        (ORDERED, False, [R], "inconclusive", []),
        (ORDERED, False, [M], "inconclusive", []),
        (ORDERED, False, [P, R], "inconclusive", []),
        (ORDERED, True, [P], "race", ["values"]),
        (ORDERED, True, [R], "race", ["values"]),
        (UNORDERED, False, [], "race", ["happens-before"]),
        (UNORDERED, False, [M], "race", ["happens-before"]),
        (UNORDERED, True, [P], "race", ["values", "happens-before"]),
        (None, False, [P], "pass", []),
        (None, False, [R], "inconclusive", []),
        (None, True, [P], "race", ["values"]),
        ([], False, [], "pass", []),
    ],
)
def test_verdict(trace: Trace | None, wrong: bool, states: list[HoldState], verdict: str, raced_by: list[str]) -> None:
    judgement = judge(trace, [wrong_value()] if wrong else [], states)
    assert judgement.verdict.value == verdict
    assert judgement.raced_by == raced_by
    assert (judgement.attribution is None) == (verdict != "race")


def test_unordered_access_is_a_wait_that_was_not_issued() -> None:
    for mismatches in ([], [wrong_value()]):
        judgement = judge(UNORDERED, mismatches, [P])
        assert judgement.attribution is not None and judgement.attribution.startswith("no wait was issued")
        assert judgement.disagreement is None
        assert [race.first for race in judgement.races] == [FILL]


def test_wrong_value_of_ordered_accesses_points_below_pytorch() -> None:
    judgement = judge(ORDERED, [wrong_value()], [P])
    assert judgement.attribution is not None and judgement.attribution.startswith("issued and not honoured")
    assert judgement.disagreement is not None and "ordered" in judgement.disagreement


@pytest.mark.parametrize("trace", [None, [], WITHOUT_ACCESSES])
def test_wrong_value_that_no_trace_of_accesses_explains(trace: Trace | None) -> None:
    judgement = judge(trace, [wrong_value()], [P])
    assert judgement.attribution is not None and judgement.attribution.startswith("unknown")
    assert judgement.disagreement is None


def test_verdicts_and_states_print_as_their_words() -> None:
    assert [str(verdict) for verdict in Verdict] == ["pass", "race", "timeout", "infra", "inconclusive"]
    assert [f"{state}" for state in HoldState] == ["pending", "forced", "ran", "expired", "missing"]
    assert Verdict("race") is Verdict.RACE
