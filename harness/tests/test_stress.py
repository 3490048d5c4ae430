"""The loop with budgets: fixed samples, what is added where the evidence is thin, fresh processes, stops."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from harness.campaign.allocate import allocate
from harness.campaign.numbers import CaseNumbers, Sample, Stratum
from harness.campaign.reader import read_run
from harness.campaign.store import RepetitionRecord
from harness.tests.suite_runner import CONTROL, RACY, SAFE, WHOLE_DRILL, Ran, Suite, new_suite

# Each repetition draws whether it waits; the seed is fixed, and one process draws in order.
FLAKY = "import random\ndraw = random.Random(7).random\nruns = []\n" + SAFE.replace(
    "test_ordered", "test_flaky"
).replace(
    "        ambient.wait_stream(fill)\n",
    "        runs.append(1)\n        if len(runs) < 3 or draw() >= 0.2:\n            ambient.wait_stream(fill)\n",
)

INTERRUPTIONS = [
    pytest.param(number, to, id=f"{number.name}-{to}")
    for number, to in (
        (signal.SIGTERM, "the command"),
        (signal.SIGINT, "all"),
        (signal.SIGINT, "the command"),
        (signal.SIGTERM, "all"),
    )
]
STRESS = [sys.executable, "-m", "harness", "stress", "--device", "sim"]


@pytest.fixture
def suite(tmp_path) -> Suite:
    return new_suite(tmp_path)


def stress(suite: Suite, *arguments: str, timeout: float = 240) -> Ran:
    done = subprocess.run(
        [*STRESS, "--results", "run", *arguments],
        cwd=suite.folder,
        env=suite.environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout,
    )
    return Ran(done.returncode, done.stdout, suite.folder)


def records(folder: Path) -> list[RepetitionRecord]:
    return list(read_run(folder)) if folder.exists() else []


def numbers_of(suite: Suite) -> dict[str, dict[str, object]]:
    done = subprocess.run(
        [sys.executable, "-m", "harness", "numbers", "run", "--json"],
        cwd=suite.folder,
        env=suite.environment(),
        text=True,
        stdout=subprocess.PIPE,
        check=True,
    )
    return {case["case"].split("::")[1]: case for case in json.loads(done.stdout)["cases"]}


# Shares.


def known(repetitions: int, races: int = 0, *, control: bool = False) -> CaseNumbers:
    case = CaseNumbers("case", control, verdicts={"pass": repetitions - races, "race": races})
    case.strata[Stratum("single", "", "", False)] = Sample(repetitions, races)
    return case


def test_the_less_is_known_of_a_case_the_more_it_gets():
    cases = {"thin": known(10), "thick": known(1000), "raced": known(1000, 1), "control": known(10, control=True)}
    shares = allocate(cases, 1000).repetitions
    assert shares.keys() == {"thin", "thick", "raced"}
    assert shares["raced"] > shares["thin"] > 50 * shares["thick"] > 0
    assert allocate(cases, 1000, max_races=1).repetitions.keys() == {"thin", "thick"}
    assert allocate({}, 1000).total == allocate({"control": known(1, control=True)}, 10).total == 0


# As a user meets it.


def test_a_planted_flaky_race_is_found_and_its_rate_is_within_the_bounds(suite):
    suite.write(FLAKY + SAFE)
    ran = stress(suite, "--count", "500", "-n", "1")
    assert ran.code == 1, ran.output
    cases = numbers_of(suite)
    flaky = cases["test_flaky"]
    assert flaky["repetitions"] == 500 and cases["test_ordered"]["verdicts"] == {"pass": 500}
    strata = {each["kind"]: each for each in flaky["strata"]}  # type: ignore[attr-defined]
    assert strata.keys() == {"baseline", "single", "set"}
    for each in strata.values():
        assert each["lower"] <= 0.2 <= each["upper"], each
    assert sum(each["races"] for each in strata.values()) == flaky["verdicts"]["race"]  # type: ignore[index]


@pytest.mark.parametrize(("number", "to"), INTERRUPTIONS[: 4 if WHOLE_DRILL else 1])
def test_minutes_go_where_the_evidence_is_thin_until_they_are_interrupted(suite, tmp_path_factory, number, to):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "run"
    suite.write(FLAKY + SAFE + CONTROL.replace("test_unordered", "test_control"))
    process = subprocess.Popen(
        [*STRESS, "--count", "20", "-n", "1", "--minutes", "10", "--results", str(elsewhere)],
        cwd=suite.folder,
        env=suite.environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    # Until the second round has begun, so that the first one is whole.
    deadline = time.monotonic() + 120
    rounds: list[str] = []
    while len(rounds) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.2)
        kept = records(elsewhere)
        rounds = list(dict.fromkeys(record.session for record in kept if record.adaptive))
    if to == "all":
        os.killpg(process.pid, number)
    else:
        os.kill(process.pid, number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2, output
    assert "where the evidence was thin" in output
    assert "repetitions in" in output and "python -m harness numbers" in output
    kept = records(elsewhere)
    fixed, added = (
        Counter(record.nodeid.split("::")[1] for record in kept if record.session in sessions)
        for sessions in ({record.session for record in kept if not record.adaptive}, rounds[:1])
    )
    assert fixed == {"test_flaky": 20, "test_ordered": 20, "test_control": 20}
    assert added.keys() == {"test_flaky", "test_ordered"} and added["test_flaky"] > added["test_ordered"]
    assert len({(record.nodeid, record.repetition) for record in kept}) == len(kept)


def test_a_case_is_stopped_after_its_races_and_controls_go_on(suite):
    suite.write(RACY + SAFE + CONTROL.replace("test_unordered", "test_control"))
    ran = stress(suite, "--count", "30", "-n", "2", "--max-races", "4")
    assert ran.code == 1, ran.output
    counts = Counter(record.nodeid.split("::")[1] for record in records(suite.folder / "run"))
    # Of two workers one may be in a repetition when the other's races.
    assert 4 <= counts.pop("test_unordered") <= 5
    assert counts == {"test_ordered": 30, "test_control": 30}
    assert numbers_of(suite)["test_unordered"]["stopped"]


def test_until_a_race(suite):
    suite.write(RACY)
    ran = stress(suite, "--count", "30", "-n", "1", "--until-race", "--minutes", "5", timeout=100)
    assert ran.code == 1, ran.output
    assert len(records(suite.folder / "run")) == 1


def test_fresh_processes_are_told_apart_and_find_what_races_only_at_first(suite):
    suite.write(
        "runs = []\n"
        + SAFE.replace(
            "ambient.wait_stream(fill)",
            "runs.append(1)\n        if len(runs) > 1:\n            ambient.wait_stream(fill)",
        )
    )
    ran = stress(suite, "--count", "6", "-n", "1", "--fresh", "2")
    assert ran.code == 1, ran.output
    fresh = [record for record in records(suite.folder / "run") if record.fresh]
    assert [(record.repetition, record.plan) for record in fresh] == [(0, "baseline"), (1, "baseline")]
    assert len({record.session for record in fresh}) == 2
    raced = [record.fresh for record in records(suite.folder / "run") if record.verdict != "pass"]
    assert raced == [True, True]
    (case,) = numbers_of(suite).values()
    assert (case["repetitions"], case["processes"]) == (8, 3)


def test_cases_run_in_an_order_drawn_by_the_seed(suite):
    suite.write("".join(SAFE.replace("test_ordered", f"test_{number}") for number in range(8)))
    orders = []
    for seed in ("1", "1", "2"):
        ran = suite.run("--count", "2", "--shuffle", "--seed", seed, "-v")
        orders.append([line.split("::")[1].split()[0] for line in ran.output.splitlines() if "PASSED" in line])
    assert sorted(orders[0]) == [f"test_{number}" for number in range(8)]
    assert orders[0] == orders[1] != orders[2]


def test_what_is_not_reached_in_time_is_said(suite):
    suite.write(SAFE + SAFE.replace("test_ordered", "test_later"))
    ran = suite.run("--count", "1000000", "--minutes", "0.05")
    assert ran.code == 0, ran.output
    assert "1 case was not reached within --minutes." in ran.output


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--minutes", "0"], "give minutes above 0"),
        (["--max-races", "0"], "give a number from 1 on"),
        (["--further", "none.json"], "--further goes with --resume"),
        (["--fresh", "0", "--count", "5"], "leave --plan, --count and -n out"),
    ],
)
def test_budgets_that_make_no_sense_are_refused(suite, options, sentence):
    refused = suite.run(*options)
    assert refused.code == 4 and sentence in refused.output, refused.output


MEMORY = """
import resource, sys
from harness.campaign.result import CaseResult
from harness.campaign.store import RepetitionRecord
from harness.perturb.enumerate_plans import cycle_length, plan_for_repetition
from harness.perturb.plan import LaunchId
order = [LaunchId("side", index) for index in range(60)]
result = CaseResult("case", cycle_length=cycle_length(60), launches=60)
for number in range(1_000_000):
    plan = str(plan_for_repetition(number, order, 0)) if number % 7 == 0 or number < 1000 else "baseline"
    result.add(RepetitionRecord("case", number, plan, "pass", 1.0))
    if number == 20_000:
        early = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
merged = CaseResult("case")
merged.merge(CaseResult.from_json(result.to_json()))
print(merged.repetitions, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - early)
"""


def test_what_is_counted_of_a_million_repetitions_takes_no_memory():
    done = subprocess.run([sys.executable, "-c", MEMORY], stdout=subprocess.PIPE, text=True, check=True)
    repetitions, grown_kib = map(int, done.stdout.split())
    assert repetitions == 1_000_000
    assert grown_kib < 2048


def test_reading_a_million_repetitions_takes_no_memory(tmp_path):
    line = '{"k":"00000000","r":%d,"p":"hold=side:3","us":812}'
    with (tmp_path / "gw0.jsonl").open("w") as file:
        file.write('{"header":{"schema":2,"session":"one"}}\n{"case":"00000000","n":"case"}\n')
        file.writelines(line % number + "\n" for number in range(1_000_000))
    from harness.campaign.numbers import Numbers

    Numbers.of([read_run(tmp_path)])  # what is imported and cached
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    numbers = Numbers.of([read_run(tmp_path)])
    assert numbers.cases["case"].repetitions == 1_000_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2048
