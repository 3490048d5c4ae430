"""A run that goes on where it was stopped: nothing that has ended is lost or run again."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from harness.campaign.reader import read_run
from harness.campaign.resume import Earlier, require_same_settings
from harness.campaign.run_directory import claim
from harness.campaign.store import CaseDefinition, RepetitionRecord, ResultWriter
from harness.errors import UsageError
from harness.tests.suite_runner import RACY, Suite, new_suite

SETTINGS = {"device": "sim", "seed": 0, "plan": None, "loads": [], "leave_out": None, "misdirect": None}


def written(directory: Path, session: str, *numbers: int, worker: str = "main", **fields: object) -> None:
    writer = ResultWriter(directory, worker, {**SETTINGS, "session": session})
    writer.define(CaseDefinition("case", 2, 5, 2))
    for number in numbers:
        writer.write(RepetitionRecord("case", number, "baseline", "pass", 1.0, **fields))  # type: ignore[arg-type]
    writer.close()


def test_what_other_sessions_have_ended(tmp_path):
    written(tmp_path, "first", 0, 1, 17)
    written(tmp_path, "second", 3, worker="gw1")
    written(tmp_path, "third", 4)
    earlier = Earlier.read(tmp_path, "third")
    assert [number for number in range(40) if earlier.has("case", number)] == [0, 1, 3, 17]
    assert (earlier.end("case"), earlier.end("other"), earlier.has("other", 0)) == (18, 0, False)
    result = earlier.result("case")
    assert (result.repetitions, result.launches, result.cycle_length, result.oracles) == (4, 2, 5, 2)


def test_a_repetition_counts_once_and_one_in_a_fresh_process_is_none_of_them(tmp_path):
    written(tmp_path, "first", 0, 1)
    written(tmp_path, "second", 1, 2, worker="gw0")
    written(tmp_path, "second", 3, worker="gw1", fresh=True)
    earlier = Earlier.read(tmp_path, "third")
    assert earlier.result("case").repetitions == 3
    assert not earlier.has("case", 3)


def test_a_repetition_that_the_machine_failed_under_is_run_again(tmp_path):
    writer = ResultWriter(tmp_path, "main", {**SETTINGS, "session": "first"})
    for number, verdict in enumerate(("pass", "infra", "timeout")):
        writer.write(RepetitionRecord("case", number, "baseline", verdict, 1.0))
    writer.close()
    earlier = Earlier.read(tmp_path, "second")
    assert [earlier.has("case", number) for number in range(3)] == [True, False, True]
    assert earlier.result("case").verdicts == {"pass": 1, "timeout": 1}


def test_other_settings_are_refused(tmp_path):
    written(tmp_path, "first", 0)
    require_same_settings(tmp_path, SETTINGS)
    with pytest.raises(UsageError, match="was run with --seed 0 and cannot be resumed with --seed 1"):
        require_same_settings(tmp_path, {**SETTINGS, "seed": 1})
    with pytest.raises(UsageError, match="was run with no --load and cannot be resumed with --load compute,alloc"):
        require_same_settings(tmp_path, {**SETTINGS, "loads": ["compute", "alloc"]})


# As a user meets it.


@pytest.fixture
def suite(tmp_path) -> Suite:
    return new_suite(tmp_path)


def ran(suite: Suite) -> Counter[tuple[str, int]]:
    return Counter((record.nodeid.split("::")[1], record.repetition) for record in read_run(suite.folder / "run"))


def test_a_run_that_is_resumed_adds_what_is_missing(suite):
    suite.run("--count", "5", "--results", "run")
    more = suite.run("--count", "12", "--resume", "run", "-n", "2")
    assert more.code == 0, more.output
    assert "12 repetitions in" in more.output
    assert ran(suite) == Counter({("test_ordered", number): 1 for number in range(12)})
    again = suite.run("--count", "12", "--resume", "run")
    assert again.code == 0, again.output
    assert "12 repetitions in" in again.output
    assert ran(suite) == Counter({("test_ordered", number): 1 for number in range(12)})
    environments = read_run(suite.folder / "run").environments
    assert len(environments) == 3 and environments[0]["torch_revision"]


def test_the_last_run_is_the_one_to_resume(suite):
    suite.run("--count", "5")
    assert "9 repetitions in" in suite.run("--count", "9", "--resume").output


def test_a_race_of_an_earlier_session_fails_the_run(suite):
    suite.write(RACY)
    suite.run("--count", "6", "--results", "run")
    again = suite.run("--count", "6", "--resume", "run")
    assert again.code == 1, again.output
    assert "race: of 6 repetitions 6 raced" in again.output


def test_other_options_are_a_usage_error(suite):
    suite.run("--count", "5", "--results", "run")
    refused = suite.run("--count", "5", "--resume", "run", "--seed", "3")
    assert refused.code == 4, refused.output
    assert "cannot be resumed with --seed 3" in refused.output
    both = suite.run("--results", "run", "--resume", "run")
    assert both.code == 4 and "give one of them" in both.output
    assert suite.run("--resume", "none").code == 4
    claimed = claim(suite.folder / "run")
    assert claimed is not None
    busy = suite.run("--count", "5", "--resume", "run")
    assert busy.code == 4 and "another session is adding to" in busy.output
    os.close(claimed)
    assert suite.run("--count", "5", "--resume", "run").code == 0
