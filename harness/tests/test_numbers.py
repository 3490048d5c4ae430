"""What results add up to, and the comparison of two builds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, fisher_exact
from typer.testing import CliRunner

from harness.__main__ import app
from harness.campaign.compare import Change, compare
from harness.campaign.numbers import Numbers, Stratum
from harness.campaign.reader import find_runs
from harness.campaign.statistics import Counts, adjusted, exact_test, race_rate_interval, repetitions_to_tell
from harness.campaign.store import CaseDefinition, RepetitionRecord, ResultWriter
from harness.exit_codes import ExitCode

BASELINE = Stratum("baseline", "", "", False)
SINGLE = Stratum("single", "", "scheduler", False)


def written(
    folder: Path,
    races: int,
    repetitions: int,
    *,
    case: str = "suites/test_a.py::test_one",
    worker: str = "main",
    plan: str = "baseline",
    control: str | None = None,
    header: dict[str, object] | None = None,
    **fields: object,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    writer = ResultWriter(folder, worker, {"session": "one", "hold": "scheduler", "loads": [], **(header or {})})
    writer.define(CaseDefinition(case, 2, 5, control=control))
    for number in range(repetitions):
        verdict = "race" if number < races else "pass"
        writer.write(RepetitionRecord(case, number, plan, verdict, 9.0, **fields))  # type: ignore[arg-type]
    writer.close()
    return folder


def numbers_of(*folders: Path) -> Numbers:
    return Numbers.of(find_runs(folders))


# Statistics.


@pytest.mark.parametrize(("races", "repetitions"), [(1, 500), (100, 500), (500, 500)])
def test_both_bounds_are_where_the_count_becomes_improbable(races, repetitions):
    lower, upper = race_rate_interval(races, repetitions)
    assert binom.sf(races - 1, repetitions, lower) == pytest.approx(0.05)
    assert races == repetitions or binom.cdf(races, repetitions, upper) == pytest.approx(0.05)


def test_without_a_race_the_rate_may_be_nothing():
    lower, upper = race_rate_interval(0, 500)
    assert lower == 0.0 and upper == pytest.approx(0.00597, abs=1e-5)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40), st.integers(0, 40))
def test_in_one_stratum_the_test_is_that_of_fisher(races_a, passes_a, races_b, passes_b):
    p_value = exact_test([Counts(races_a, races_a + passes_a, races_b, races_b + passes_b)])
    assert p_value == pytest.approx(fisher_exact([[races_a, passes_a], [races_b, passes_b]]).pvalue)


def test_strata_of_different_weights_are_no_difference():
    """Simpson's paradox: A ran the plan that races more often than B did, and each plan races equally in both."""
    strata = [Counts(180, 200, 45, 50), Counts(0, 50, 0, 200)]
    assert exact_test([Counts(180, 250, 45, 250)]) < 1e-6
    assert exact_test(strata) == 1.0


def test_without_repetitions_nothing_differs():
    assert exact_test([]) == exact_test([Counts(0, 0, 0, 0)]) == 1.0


def test_how_many_would_tell():
    needed = repetitions_to_tell(Counts(0, 500, 1, 500), 0.05)
    assert needed is not None and 2500 <= needed <= 3000
    assert exact_test([Counts(0, needed, round(needed / 500), needed)]) < 0.05
    assert repetitions_to_tell(Counts(5, 500, 5, 500), 0.05) is None
    assert repetitions_to_tell(Counts(0, 10**6, 1, 10**6), 0.05, most=10**5) is None


def test_the_false_discovery_rate_is_that_of_benjamini_and_hochberg():
    assert adjusted([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.04, 0.04])
    assert adjusted([]) == []


# Numbers.


def test_what_a_case_adds_up_to(tmp_path):
    written(tmp_path / "a", 0, 10)
    written(tmp_path / "a", 1, 20, worker="gw1", plan="hold=fill:0")
    written(tmp_path / "b", 2, 30, plan="hold=fill:1", header={"loads": ["compute"]})
    written(tmp_path / "b", 0, 4, worker="gw1", fresh=True)
    written(tmp_path / "b", 3, 5, worker="gw2", adaptive=True)
    (case,) = numbers_of(tmp_path).cases.values()
    assert (case.repetitions, len(case.processes), len(case.plans)) == (69, 5, 3)
    assert case.verdicts == {"pass": 63, "race": 6}
    samples = {stratum: (sample.races, sample.repetitions) for stratum, sample in case.strata.items()}
    assert samples == {
        BASELINE: (0, 10),
        SINGLE: (1, 20),
        SINGLE._replace(load="compute"): (2, 30),
        BASELINE._replace(fresh=True): (0, 4),
    }
    assert (case.adaptive.races, case.adaptive.repetitions) == (3, 5)


def test_a_hang_counts_as_a_race_and_what_is_inconclusive_as_nothing(tmp_path):
    folder = written(tmp_path, 0, 0)
    writer = ResultWriter(folder, "gw1", {})
    for number, verdict in enumerate(("timeout", "inconclusive", "infra", "pass")):
        writer.write(RepetitionRecord("case", number, "baseline", verdict, 1.0))
    writer.close()
    sample = numbers_of(tmp_path).cases["case"].strata[BASELINE]
    assert (sample.races, sample.repetitions) == (1, 2)


def test_a_case_that_was_stopped_for_its_races_has_no_rate(tmp_path):
    written(tmp_path, 3, 10, header={"max_races": 3})
    written(tmp_path, 0, 10, case="other", worker="gw1", header={"max_races": 3})
    numbers = numbers_of(tmp_path)
    assert {name: case.stopped for name, case in numbers.cases.items()} == {
        "suites/test_a.py::test_one": True,
        "other": False,
    }
    stopped = numbers.cases["suites/test_a.py::test_one"].to_json()["strata"]
    assert "upper" not in stopped[0] and "upper" in numbers.cases["other"].to_json()["strata"][0]


# Comparison.


@pytest.mark.parametrize(
    ("a", "b", "change", "code"),
    [
        ((0, 500), (25, 500), Change.REGRESSION, ExitCode.RACE),
        ((0, 500), (1, 500), Change.CANNOT_TELL, ExitCode.INCONCLUSIVE),
        ((0, 500), (0, 500), Change.NO_REGRESSION, ExitCode.CLEAN),
        ((25, 500), (0, 500), Change.IMPROVEMENT, ExitCode.CLEAN),
        ((3, 500), (1, 500), Change.NO_REGRESSION, ExitCode.CLEAN),
        ((0, 3), (0, 3), Change.CANNOT_TELL, ExitCode.INCONCLUSIVE),
    ],
)
def test_two_builds(tmp_path, a, b, change, code):
    written(tmp_path / "a", *a)
    written(tmp_path / "b", *b)
    found = compare(numbers_of(tmp_path / "a"), numbers_of(tmp_path / "b"))
    assert ([case.change for case in found.cases], found.exit_code) == ([change], code)


def test_one_chance_finding_among_many_cases_is_none(tmp_path):
    for number in range(40):
        case = f"suites/test_a.py::test_{number}"
        written(tmp_path / "a", 0, 500, case=case, worker=f"gw{number}")
        written(tmp_path / "b", 6 if number == 7 else 0, 500, case=case, worker=f"gw{number}")
    found = compare(numbers_of(tmp_path / "a"), numbers_of(tmp_path / "b"))
    (told,) = [case for case in found.cases if case.change is not Change.NO_REGRESSION]
    assert told.p_value < 0.05 < told.adjusted_p
    assert told.change is Change.CANNOT_TELL and told.needed is not None and told.needed > 500


def test_only_what_both_have_run_is_compared(tmp_path):
    written(tmp_path / "a", 0, 500)
    written(tmp_path / "b", 0, 500)
    written(tmp_path / "b", 500, 500, worker="gw1", plan="hold=fill:0")
    written(tmp_path / "b", 9, 9, worker="gw2", case="suites/test_a.py::test_new")
    found = compare(numbers_of(tmp_path / "a"), numbers_of(tmp_path / "b"))
    assert [case.change for case in found.cases] == [Change.NO_REGRESSION]
    assert found.only_b == ["suites/test_a.py::test_new"]
    none = compare(numbers_of(written(tmp_path / "c", 0, 9, plan="hold=fill:0")), numbers_of(tmp_path / "a"))
    assert (none.no_common_stratum, none.exit_code) == (["suites/test_a.py::test_one"], ExitCode.INCONCLUSIVE)


def test_a_control_is_for_your_information(tmp_path):
    written(tmp_path / "a", 0, 500, control="unsafe")
    written(tmp_path / "b", 25, 500, control="unsafe")
    found = compare(numbers_of(tmp_path / "a"), numbers_of(tmp_path / "b"))
    assert ([case.change for case in found.cases], found.exit_code) == ([Change.REGRESSION], ExitCode.CLEAN)


# The commands.


def test_the_commands(tmp_path):
    a, b = written(tmp_path / "a", 0, 500), written(tmp_path / "b", 25, 500)
    c = written(tmp_path / "c", 1, 500)
    (b / "gw9.jsonl").write_text("?\n")
    run = CliRunner(env={"COLUMNS": "165"}).invoke
    worse = run(app, ["compare", str(a), str(b)])
    assert worse.exit_code == 1 and "B races more often than A: 1 regression." in worse.stdout
    assert "gw9.jsonl: 1 unreadable line was skipped" in worse.stdout
    unknown = run(app, ["compare", str(a), str(c)])
    assert unknown.exit_code == 6
    assert "cannot tell; not enough repetitions to tell, about 2,800 of each would be needed" in unknown.stdout
    assert json.loads(run(app, ["compare", str(a), str(b), "--json"]).stdout)["cases"][0]["change"] == "regression"
    shown = run(app, ["numbers", str(b)])
    assert shown.exit_code == 0 and "25/500 3.50% to 6.91%" in shown.stdout
    empty = tmp_path / "empty"
    empty.mkdir()
    writer = ResultWriter(empty, "main", {})
    writer.say({"environment": {}})
    writer.close()
    nothing = run(app, ["numbers", str(empty)])
    assert nothing.exit_code == 5 and "There is no repetition." in nothing.stdout
    assert run(app, ["numbers", str(empty), "--json"]).exit_code == 5
    (case,) = json.loads(run(app, ["numbers", str(a), "--json"]).stdout)["cases"]
    assert case["strata"][0]["upper"] == pytest.approx(0.00597, abs=1e-5)
