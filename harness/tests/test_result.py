"""Counts of a case add up to the same whatever the workers that shared it; what travels between them stays the same."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import distribution
from harness.campaign.options import Options
from harness.campaign.result import KEPT_CAUSES, CaseResult, Cause
from harness.campaign.store import RepetitionRecord
from harness.distribution import WorkerInput, slice_items, split
from harness.judge.verdict import Verdict
from harness.perturb.plan import LaunchId, Plan
from harness.pytest_side.reporting import Recorder
from harness.pytest_side.run import Run

CASE = "test_x.py::test_x"
PLANS = ["baseline", "hold=fill:0", "hold=ambient:0", "hold=fill:0,ambient:0"]
REASONS = [f"reason {number}" for number in range(KEPT_CAUSES)]


def record(number: int, verdict: Verdict, plan: str = "baseline", *, aimed: bool = False, us: float = 1.0):
    by = ["values"] if verdict is Verdict.RACE else []
    return RepetitionRecord(CASE, number, plan, verdict.value, us, aimed=aimed, raced_by=by)


def control(*verdicts: str, cycle_length: int = 3, aimed: tuple[int, ...] = ()) -> CaseResult:
    """A control whose repetitions ended so: each character is a verdict's first letter (r, p, or i of inconclusive)."""
    result = CaseResult(CASE, control="Nothing orders them.", cycle_length=cycle_length)
    letters = {"r": Verdict.RACE, "p": Verdict.PASS, "i": Verdict.INCONCLUSIVE}
    for number, letter in enumerate("".join(verdicts)):
        result.add(record(number, letters[letter], aimed=number in aimed))
    return result


def there_and_back(result: CaseResult) -> CaseResult:
    """What the controller reads of what a worker sends."""
    return CaseResult.from_json(json.loads(json.dumps(result.to_json())))


# Adding.


def test_repetitions_are_counted_by_verdict_plan_and_cycle():
    result = CaseResult(CASE, control="Nothing orders them.", cycle_length=2)
    result.add(record(0, Verdict.PASS, us=5.0))
    result.add(record(1, Verdict.RACE, "hold=fill:0", aimed=True, us=9.0))
    result.add(record(2, Verdict.PASS, us=1.0))
    result.add(record(3, Verdict.PASS, "hold=fill:0", aimed=True, us=2.0))
    assert result.repetitions == 4
    assert (result.count(Verdict.PASS), result.count(Verdict.RACE), result.count(Verdict.TIMEOUT)) == (3, 1, 0)
    assert result.plans == {"baseline": [2, 0], "hold=fill:0": [2, 1]}
    assert result.cycles == [-1, 2]
    assert (result.aimed, result.aimed_seen) == (2, 1)
    assert result.durations_us == [17.0, 9.0]


def test_one_plan_for_all_repetitions_has_no_cycles():
    result = CaseResult(CASE)
    result.add(record(0, Verdict.PASS))
    assert result.cycles == []


@pytest.mark.parametrize("verdict", [Verdict.INCONCLUSIVE, Verdict.TIMEOUT, Verdict.INFRA])
def test_an_aim_that_proved_nothing_does_not_count(verdict):
    result = CaseResult(CASE)
    result.add(record(0, verdict, "hold=fill:0", aimed=True))
    assert (result.aimed, result.aimed_seen) == (0, 0)
    assert result.repetitions == 1


def test_launches_held_alone_and_the_thinnest_plan():
    result = CaseResult(CASE)
    assert (result.singles_covered(), result.thinnest_plan()) == (0, 0)
    plans = ["baseline"] * 3 + ["hold=fill:0"] * 4 + ["hold=fill:1"] * 2 + ["hold=fill:0,fill:1"]
    for number, plan in enumerate(plans):
        result.add(record(number, Verdict.PASS, plan))
    assert result.singles_covered() == 2
    assert result.thinnest_plan() == 2, "sets depend on the seed and do not count"


def test_a_settled_result_takes_little_and_says_the_same():
    result = CaseResult(CASE, launches=2, cycle_length=4)
    plans = ["baseline", "hold=fill:0", "hold=fill:1", *(f"hold=fill:0,ambient:{number}" for number in range(300))]
    for number, plan in enumerate(2 * plans):
        result.add(record(number, Verdict.PASS, plan))
    before = result.distinct_plans(), result.singles_covered(), result.thinnest_plan(), result.unseen()
    size = len(json.dumps(result.to_json()))
    result.settle()
    result.settle()
    assert (result.distinct_plans(), result.singles_covered(), result.thinnest_plan(), result.unseen()) == before
    assert before[0] == 303
    assert sum(held for held, _ in result.plans.values()) == result.repetitions == 606
    assert len(json.dumps(result.to_json())) < size / 10
    assert there_and_back(result) == result


def test_what_is_kept_of_a_case_does_not_grow_with_its_repetitions():
    """But for a number a cycle; each slice sees a part of every cycle, and so no cycle is ever done with."""

    def after(repetitions: int) -> int:
        merged = CaseResult(CASE)
        for position in range(2):
            result = CaseResult(CASE, control="Nothing orders them.", launches=40, cycle_length=81)
            for number in range(position, repetitions, 2):
                result.add(record(number, Verdict.PASS, f"hold=fill:{number},ambient:{number + 1}"))
            merged.merge(result)
        assert sum(held for held, _ in merged.plans.values()) == repetitions
        assert len(merged.cycles) == -(-repetitions // 81)
        return len(json.dumps(merged.to_json()))

    assert after(20_000) < after(2_000) + 1_500


# Causes.


def test_a_cause_keeps_its_most_telling_description_and_counts_the_rest():
    result = CaseResult(CASE)
    for text, oracles in (("first", 1), ("second", 2), ("third", 2), ("fourth", 0)):
        result.describe_failure("reason", text, oracles)
    assert result.causes == {"reason": Cause("second", 2, repetitions=4)}


def test_only_the_first_causes_are_described():
    result = CaseResult(CASE)
    for number in range(KEPT_CAUSES + 2):
        result.describe_failure(f"reason {number}", f"text {number}")
    result.describe_failure("reason 0", "again")
    assert list(result.causes) == REASONS
    assert [cause.repetitions for cause in result.causes.values()] == [2, *[1] * (KEPT_CAUSES - 1)]


def test_merged_causes_keep_the_most_telling_description():
    first, second = CaseResult(CASE), CaseResult(CASE)
    first.describe_failure("reason", "less", 1)
    for _ in range(3):
        second.describe_failure("reason", "more", 2)
    second.describe_failure("other", "other", 1)
    first.merge(second)
    assert first.causes == {"reason": Cause("more", 2, 4), "other": Cause("other", 1, 1)}


# Merging.

repetition = st.tuples(
    st.sampled_from(Verdict),
    st.sampled_from(PLANS),
    st.booleans(),
    st.integers(0, 10**6),
    st.sampled_from(REASONS),
    st.integers(0, 2),
    st.integers(0, 3),
)


def new_result(control: str | None) -> CaseResult:
    return CaseResult(CASE, control=control, launches=3, cycle_length=4)


def counted(result: CaseResult, number: int, drawn: tuple[Any, ...]) -> None:
    verdict, plan, aimed, us, reason, oracles, _ = drawn
    result.add(record(number, verdict, plan, aimed=aimed, us=float(us)))
    result.hold_ms = max(result.hold_ms, us / 100)
    if verdict is not Verdict.PASS:
        result.describe_failure(reason, f"{reason} by {oracles}", oracles)


@settings(max_examples=150, database=None, derandomize=True, deadline=None)
@given(
    st.lists(repetition, max_size=25),
    st.sampled_from([None, "Nothing orders them."]),
    st.permutations(range(4)),
    st.booleans(),
)
def test_merged_slices_are_what_one_process_counts(drawn, control, order, through_json):
    whole = new_result(control)
    slices = [new_result(control) for _ in range(4)]
    for number, each in enumerate(drawn):
        counted(whole, number, each)
        counted(slices[each[-1]], number, each)
    merged = CaseResult(CASE)
    for position in order:
        merged.merge(there_and_back(slices[position]) if through_json else slices[position])
    assert merged == whole
    assert merged.unseen() == whole.unseen()


@settings(max_examples=50, database=None, derandomize=True, deadline=None)
@given(st.lists(repetition, max_size=10), st.sampled_from([None, "Nothing orders them."]))
def test_a_result_travels_as_json(drawn, control):
    result = new_result(control)
    for number, each in enumerate(drawn):
        counted(result, number, each)
    back = there_and_back(result)
    assert back == result
    assert all(isinstance(cause, Cause) for cause in back.causes.values())
    counted(back, 99, (Verdict.PASS, "baseline", False, 1, "", 0, 0))
    assert back.repetitions == result.repetitions + 1


def test_merging_takes_what_only_one_worker_knows():
    merged = CaseResult(CASE)
    merged.merge(CaseResult(CASE, control="docs/x.md", defect=True, launches=2, cycle_length=5, hold_ms=8.0))
    merged.merge(CaseResult(CASE, hold_ms=4.0))
    assert merged == CaseResult(CASE, control="docs/x.md", defect=True, launches=2, cycle_length=5, hold_ms=8.0)


def test_lines_alone_tell_a_defect_from_a_control():
    for defect in (False, True):
        result = CaseResult(CASE)
        result.add(RepetitionRecord(CASE, 0, "baseline", "race", 1.0, control=True, defect=defect))
        assert result.control is not None
        assert result.defect is defect


# Whether a run could have seen the race of a control.


@pytest.mark.parametrize(
    "result",
    [
        pytest.param(CaseResult(CASE, control="Nothing orders them.", cycle_length=3), id="nothing ran"),
        pytest.param(control("ppp", cycle_length=0), id="one plan for all repetitions"),
        pytest.param(control("ppr", "prp", aimed=(2, 4)), id="seen in every cycle"),
        pytest.param(control("ppr", "pp", aimed=(2,)), id="the last cycle is not whole"),
        pytest.param(control("pir", "ppr", aimed=(1, 2, 5)), id="an inconclusive aim"),
    ],
)
def test_nothing_speaks_against_a_control(result):
    assert result.unseen() is None


def test_a_case_that_is_no_control_has_no_race_to_see():
    result = control("ppp")
    result.control = None
    assert result.unseen() is None


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (control("ppp", "p"), "none of its 4 repetitions raced"),
        (control("pi"), "none of its 2 repetitions raced"),
        (
            control("ppr", "ppr", aimed=(1, 2, 5)),
            "only 2 of the 3 repetitions that held the racing access were seen to race",
        ),
        (
            control("rpr", cycle_length=0, aimed=(0, 1, 2)),
            "only 2 of the 3 repetitions that held the racing access were seen to race",
        ),
        (control("rpp", "ppp"), "1 whole cycles of plans passed without a race, the first of them cycle 1"),
        (control("ppp", "rpp", "ppp", "p"), "2 whole cycles of plans passed without a race, the first of them cycle 0"),
    ],
)
def test_a_control_that_was_not_seen_enough_says_why(result, why):
    assert result.unseen() == why


def test_an_aimed_repetition_must_convince_every_oracle():
    result = CaseResult(CASE, control="Nothing orders them.", cycle_length=1, oracles=2)
    result.add(record(0, Verdict.RACE, "hold=fill:0", aimed=True))
    only = "only 0 of the 1 repetitions that held the racing access were seen to race by both oracles"
    assert result.unseen() == only


def test_a_control_of_which_no_held_launch_races_is_unseen():
    result = control("rr", cycle_length=2)
    result.launches = 1
    result.add(record(2, Verdict.RACE, "hold=fill:0"))
    assert result.unseen() == "no repetition held an access that is known to race, although each launch was held"


def test_a_cycle_is_blind_only_as_a_whole():
    slices = [CaseResult(CASE, control="Nothing orders them.", cycle_length=4) for _ in range(2)]
    for number, verdict in enumerate([Verdict.PASS, Verdict.RACE] * 4):
        slices[number % 2].add(record(number, verdict))
    assert slices[0].unseen() == "none of its 4 repetitions raced"
    slices[0].merge(slices[1])
    assert slices[0].unseen() is None


# On the way to a worker.


@pytest.mark.parametrize(
    "options",
    [
        Options(),
        Options(device="cuda", seed=7, plan=Plan(), hold="gate", hold_ms=2.5, loads=("compute",), limit_s=3.0),
        Options(plan=Plan((LaunchId("fill", 0), LaunchId("a:b", 12))), max_races=1, turns="/tmp/gpu.turns"),
    ],
)
def test_what_a_worker_is_told_travels_as_json(options):
    given = WorkerInput(options, "/tmp/run", {"CUDA_VISIBLE_DEVICES": "1,0"})
    assert WorkerInput.from_json(json.loads(json.dumps(given.to_json()))) == given


def test_a_worker_takes_its_environment(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    WorkerInput(Options(), "/tmp/run", {"CUDA_VISIBLE_DEVICES": "1,0"}).apply_to_environment()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,0"


@pytest.mark.parametrize(
    ("nodeid", "parts"),
    [
        (CASE, (CASE, 0, 1)),
        (f"{CASE}@slice-1-of-3", (CASE, 0, 3)),
        (f"{CASE}[a-b]@slice-12-of-12", (f"{CASE}[a-b]", 11, 12)),
        (f"{CASE}[@slice-1-of-2]", (f"{CASE}[@slice-1-of-2]", 0, 1)),
        (f"{CASE}[@slice-1-of-2]@slice-2-of-2", (f"{CASE}[@slice-1-of-2]", 1, 2)),
    ],
)
def test_the_name_of_a_slice_says_whose_it_is(nodeid, parts):
    assert split(nodeid) == parts


@pytest.mark.parametrize(
    ("workers", "count", "slices"), [(4, 100, 4), (4, 3, 3), (4, 1, 1), (1, 100, 1), (4, None, 1), (2, 2, 2)]
)
def test_a_case_has_a_slice_for_every_worker_that_it_can_use(request, monkeypatch, workers, count, slices):
    item = request.node
    monkeypatch.setattr(item, "fixturenames", [*item.fixturenames, "lab"])
    items = [item]
    slice_items(items, workers, lambda item: count)
    assert [split(each.nodeid) for each in items] == [(item.nodeid, position, slices) for position in range(slices)]
    assert [each.name for each in items] == [item.name] * slices
    assert all(each.own_markers == item.own_markers and each.callspec is item.callspec for each in items)
    assert split(item.nodeid)[2] == 1, "the case itself keeps its name"


def test_a_test_without_the_lab_is_not_sliced(request):
    items = [request.node]
    slice_items(items, 4, lambda item: 100)
    assert items == [request.node]


# On the way back.


def report(position: int, when: str = "call", outcome: str = "passed", slices: int = 2, **attributes: object) -> Any:
    """A report of a slice, as it comes from a worker."""
    report = pytest.TestReport(
        f"{CASE}@slice-{position + 1}-of-{slices}",
        ("test_x.py", 1, "test_x"),
        {},
        outcome,  # type: ignore[arg-type]
        attributes.pop("longrepr", None),  # type: ignore[arg-type]
        when,  # type: ignore[arg-type]
        duration=0.5,
    )
    report.__dict__.update(attributes)
    return report


def controller() -> distribution.Controller:
    return distribution.Controller(
        SimpleNamespace(),  # type: ignore[arg-type]
        SimpleNamespace(options=Options()),  # type: ignore[arg-type]
    )


def taken(controller: distribution.Controller, *reports: Any) -> list[Any]:
    """What is forwarded to pytest of these reports; each worker is named after its slice."""
    forwarded: list[Any] = []
    for each in reports:
        forwarded += controller._take(f"worker {split(each.nodeid)[1]}", each)
    return forwarded


def result_of(*verdicts: Verdict) -> dict[str, Any]:
    result = CaseResult(CASE, cycle_length=3, launches=1)
    for number, verdict in enumerate(verdicts):
        result.add(record(number, verdict))
        if verdict is not Verdict.PASS:
            result.describe_failure("reason", "the description")
    return result.to_json()


def all_phases(position: int, *verdicts: Verdict, **attributes: Any) -> list[Any]:
    return [
        report(position, "setup"),
        report(position, "call", sidestream=result_of(*verdicts), **attributes),
        report(position, "teardown"),
    ]


def test_a_whole_case_is_passed_on_at_once():
    whole = report(0, "setup")
    whole.nodeid = CASE
    assert taken(controller(), whole) == [whole]
    assert whole.node == "worker 0"


def test_reports_of_slices_wait_for_the_last_and_become_one_a_phase():
    taking = controller()
    first, second = all_phases(0, Verdict.PASS, Verdict.PASS), all_phases(1, Verdict.PASS)
    assert taken(taking, *first, *second[:2]) == []
    merged = taken(taking, second[2])
    assert [(each.nodeid, each.when, each.outcome) for each in merged] == [
        (CASE, when, "passed") for when in ("setup", "call", "teardown")
    ]
    assert [each.duration for each in merged] == [1.0, 1.0, 1.0]
    assert {each.node for each in merged} == {"worker 0"}
    assert CaseResult.from_json(merged[1].sidestream).repetitions == 3
    (kept,) = taking._cases.values()
    assert kept.complete and not [*kept.setups, *kept.calls, *kept.teardowns, *kept.recovered]


def test_slices_that_each_look_right_may_fail_together():
    merged = taken(controller(), *all_phases(0, Verdict.PASS, Verdict.RACE), *all_phases(1, Verdict.PASS))
    assert [each.outcome for each in merged] == ["passed", "failed", "passed"]
    assert merged[1].longrepr == "race: of 3 repetitions 1 raced\n\nthe description"


def test_the_worst_report_of_a_phase_stands_for_it():
    merged = taken(
        controller(),
        *all_phases(0, Verdict.PASS),
        *all_phases(1, Verdict.PASS, outcome="failed", longrepr="a traceback"),
    )
    assert [each.outcome for each in merged] == ["passed", "failed", "passed"]
    assert merged[1].longrepr == "a traceback"


def test_a_case_that_was_not_set_up_everywhere_was_not_called():
    skipped = [report(1, "setup", "skipped"), report(1, "teardown")]
    merged = taken(controller(), *all_phases(0, Verdict.PASS), *skipped)
    assert [(each.when, each.outcome) for each in merged] == [("setup", "skipped"), ("teardown", "passed")]


@pytest.mark.parametrize("worker", ["main", "controller", "gw0"])
def test_no_process_keeps_the_counts_with_the_report_that_pytest_keeps(worker, tmp_path):
    report = pytest.TestReport(CASE, ("test_x.py", 0, "test_x"), {}, "passed", None, "call")
    vars(report)["sidestream"] = control("rpp").to_json()
    run = Run(Options(), tmp_path, worker)
    Recorder(run).pytest_runtest_logreport(report)
    assert not hasattr(report, "sidestream")
    assert list(run.results) == ([] if worker == "gw0" else [CASE]), "a worker sends it away and forgets it"
