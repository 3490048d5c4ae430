"""The canary: green where both oracles find every planted race, red as soon as something on the way is broken."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import harness.campaign.repetition
import harness.judge.verdict
from harness.campaign.planted_races import PLANTED
from harness.campaign.store import ResultWriter
from harness.doctor import canary
from harness.errors import InfrastructureError
from harness.exit_codes import ExitCode
from harness.judge.happens_before import Race
from harness.observe.instrument import Instrument
from harness.observe.synchronizations import Fault
from harness.observe.trace import Launch, Trace
from harness.perturb.plan import Plan
from harness.report.outcome import outcome_of
from harness.tests.simulator_support import PACKAGE_ROOT, registered

BOTH = ["values", "happens-before"]


@pytest.fixture(autouse=True)
def simulator_as_it_was():
    yield
    registered()  # the other tests' ignored prefixes


def test_every_planted_race_is_found_and_no_other() -> None:
    findings = canary.hunt("sim")
    assert [finding.name for finding in findings] == [planted.name for planted in PLANTED]
    assert all(finding.oracles == BOTH and finding.problem is None for finding in findings), findings
    assert all(finding.plan.startswith("hold=") for finding in findings), "only a hold shows the value"
    assert canary.exit_code_of(findings) is ExitCode.CLEAN


def blind_happens_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(harness.judge.verdict, "find_races", lambda trace: [])


def blind_values(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(harness.campaign.repetition, "compare", lambda observation: None)


def no_hold(patch: pytest.MonkeyPatch) -> None:
    begin = Instrument.begin
    patch.setattr(Instrument, "begin", lambda self, plan, **settings: begin(self, Plan(), **settings))


@pytest.mark.parametrize(
    ("break_it", "seen_by"), [(blind_happens_before, ["values"]), (blind_values, ["happens-before"]), (no_hold, None)]
)
def test_it_is_red_where_an_oracle_is_blind(
    break_it: Callable[[pytest.MonkeyPatch], None], seen_by: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    findings = canary.hunt("sim")
    assert canary.exit_code_of(findings) is ExitCode.RACE
    for finding in findings:
        assert finding.missed is not None and finding.alarm is None
        if seen_by is not None:
            assert finding.oracles == seen_by
            (other,) = set(BOTH) - set(seen_by)
            assert f"not seen by {other} in" in finding.missed and f"only by {seen_by[0]}" in finding.missed


def test_it_is_red_where_nothing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Instrument.begin

    def complete(self: Instrument, plan: Plan, fault: Fault | None = None, **settings: object) -> None:
        begin(self, plan, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(Instrument, "begin", complete)
    findings = canary.hunt("sim")
    assert [finding.missed is not None for finding in findings] == [planted.racy is None for planted in PLANTED]
    assert canary.exit_code_of(findings) is ExitCode.RACE


def test_it_is_red_where_a_race_is_seen_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def every_trace_races(trace: Trace) -> list[Race]:
        launch = next(entry for entry in trace if isinstance(entry, Launch))
        return [Race(launch, launch, "read after write", 0, 0, 4, reused=False, pinned=False, hold=None)]

    monkeypatch.setattr(harness.judge.verdict, "find_races", every_trace_races)
    findings = canary.hunt("sim")
    assert canary.exit_code_of(findings) is ExitCode.RACE
    for finding in findings:
        assert finding.missed is None
        assert (
            finding.alarm == "the repaired form has no race, and it ended with race by happens-before under baseline."
        )


def test_it_is_red_where_the_outcome_is_green_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "harness.doctor.canary.outcome_of",
        lambda result: dataclasses.replace(outcome_of(result), exit_code=ExitCode.CLEAN),
    )
    findings = canary.hunt("sim")
    assert {finding.missed for finding in findings} == {
        "both oracles saw it, and the run would have been green all the same."
    }


def test_results_that_are_not_kept_are_no_race_and_not_green(monkeypatch: pytest.MonkeyPatch) -> None:
    write = ResultWriter.write
    monkeypatch.setattr(ResultWriter, "write", lambda self, record: record.repetition and write(self, record))
    with pytest.raises(InfrastructureError, match=r"\d+ of \d+ repetitions could be read back"):
        canary.hunt("sim")


def test_holds_that_do_nothing_are_inconclusive() -> None:
    finding = canary.Finding("a wait", ["values", "happens-before"], inconclusive="no hold took effect.")
    assert canary.exit_code_of([canary.Finding("a wait"), finding]) is ExitCode.INCONCLUSIVE
    assert canary.exit_code_of([canary.Finding("a wait", missed="x"), finding]) is ExitCode.RACE


# As a user, or a machine, meets it.


def command(*arguments: str, root: Path = PACKAGE_ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "harness", "canary", "--device", "sim", *arguments],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )


def test_the_command_is_red_in_a_copy_with_a_broken_oracle(tmp_path: Path) -> None:
    done = command("--json")
    assert done.returncode == 0, done.stderr
    races = json.loads(done.stdout)["races"]
    assert [race["oracles"] for race in races] == [BOTH] * len(PLANTED)
    shutil.copytree(
        PACKAGE_ROOT / "harness", tmp_path / "harness", ignore=shutil.ignore_patterns("tests", "__pycache__")
    )
    judge = tmp_path / "harness" / "judge" / "happens_before.py"
    source = judge.read_text()
    assert source.count("def find_races(") == 1
    judge.write_text(source + "\n\ndef find_races(trace):\n    return []\n")
    done = command(root=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.count("problem") == len(PLANTED)
    assert f"0 of {len(PLANTED)} planted races found on sim" in done.stdout
