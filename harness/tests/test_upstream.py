"""Upstream beside us: test files that know nothing of the harness, on the simulator, and what their kill rate says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from harness.__main__ import app
from harness.errors import InfrastructureError, UsageError
from harness.observe import tap
from harness.observe.instrument import Instrument
from harness.observe.streams import StreamsByAppearance
from harness.observe.synchronizations import Fault, SynchronizationId
from harness.perturb.plan import Plan
from harness.report import upstream as report
from harness.report.tables import LOG_WIDTH, rendered
from harness.tests.simulator_support import registered
from harness.upstream import observer, runs, study
from harness.upstream.runs import AGAIN, ALONE, COMPLETE, DIED, FAILED, PASSED, TRACED, Issued, Log, Run, RunKey

WRITTEN = """
import os
import sys
import unittest

import torch

assert not sys.argv[1:]  # as PyTorch's own tests need it, which parse it
LONG = 2_000_000_000


def current():
    return torch.accelerator.current_stream()


class TestOfUnittest(unittest.TestCase):
    def setUp(self):
        self.side = torch.Stream("sim:0")  # another one each time, out of the pool
        self.addCleanup(torch.accelerator.synchronize)  # called by unittest itself

    def test_notices(self):
        value = torch.ones(8, device="sim")
        with self.side:
            torch.sim._sleep(LONG)
            value.add_(1)
        current().wait_stream(self.side)
        with self.subTest("value"):
            self.assertEqual(value.clone()[0].item(), 2)

    def test_notices_nothing(self):
        leaf = torch.ones(8, device="sim", requires_grad=True)
        torch.accelerator.synchronize()
        with self.side:
            product = leaf * 3
            torch.sim._sleep(LONG)
        product.sum().backward()
        torch.accelerator.synchronize()
        self.assertEqual(leaf.grad[0].item(), 3)

    @unittest.expectedFailure
    def test_expected_to_fail(self):
        self.fail()


runs = 0


def test_other_streams_each_time():
    global runs
    runs += 1
    for _ in range(runs):
        torch.Stream("sim:0").wait_stream(current())


def test_dies():
    value = torch.ones(8, device="sim")
    side = torch.Stream("sim:0")
    with side:
        torch.sim._sleep(LONG)
        value.add_(1)
    current().wait_stream(side)
    if value.clone()[0].item() != 2:
        os.abort()


def test_implied():
    value = torch.ones(8, device="sim")
    side = torch.Stream("sim:0")
    side.wait_stream(current())
    side.wait_stream(current())
    with side:
        value.add_(1)
    current().wait_stream(side)
    torch.accelerator.synchronize()


@unittest.skip("not on Mondays")
def test_skipped():
    pass


def test_fails():
    assert torch.ones(1, device="sim").item() == 2


def test_synchronizes_nothing():
    torch.ones(1)
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The tests above, studied as a user would."""
    file = tmp_path_factory.mktemp("upstream") / "test_written.py"
    file.write_text(WRITTEN)
    answer = CliRunner().invoke(app, ["upstream", str(file), "--device", "sim", "--repetitions", "2", "--json"])
    assert answer.exit_code == 0, answer.output
    assert [path.name for path in file.parent.iterdir() if path.name != "__pycache__"] == [file.name]
    return dict(json.loads(answer.stdout))


def studied(written: dict[str, Any], test: str) -> dict[str, Any]:
    (found,) = (each for each in written["tests"] if each["nodeid"].endswith(f"::{test}"))
    assert found["excluded"] is None, found
    return dict(found)


def left_out(written: dict[str, Any], test: str) -> dict[str, dict[str, Any]]:
    found = studied(written, test)
    return {each["synchronization"]: each for each in found["left_out"]}


def test_a_test_that_fails_without_a_wait_notices(written: dict[str, Any]) -> None:
    (wait,) = left_out(written, "test_notices").values()
    assert (wait["synchronization"], wait["outcome"], wait["runs"]) == ("wait@default:0/user", "killed", 1)
    assert "AssertionError: 1.0 != 2" in wait["reason"]
    assert wait["where"] == "wait@default:0/user (test_written.py:26)"


def test_what_the_framework_synchronizes_is_none_of_the_test_s(written: dict[str, Any]) -> None:
    found = studied(written, "test_notices")
    assert (found["by_framework"], len(found["left_out"])) == (1, 1)


def test_a_host_synchronization_after_backward_hides_what_the_engine_does(written: dict[str, Any]) -> None:
    found = left_out(written, "test_notices_nothing")
    outcomes = {name: each["outcome"] for name, each in found.items()}
    assert outcomes["wait@side1:0/Engine::evaluate_function"] == "survived"
    assert outcomes["wait@default:0/GraphTask::exec_post_processing"] == "redundant"
    assert all(each["runs"] == 2 for each in found.values())


def test_what_is_not_issued_each_time_is_unstable(written: dict[str, Any]) -> None:
    found = left_out(written, "test_other_streams_each_time")
    assert found["wait@side3:0/user"]["outcome"] == "unstable"
    assert found["wait@side1:0/user"]["outcome"] != "unstable"


def test_a_test_that_takes_the_process_down_notices_and_the_rest_is_studied(written: dict[str, Any]) -> None:
    (wait,) = left_out(written, "test_dies").values()
    assert (wait["outcome"], wait["reason"]) == ("killed", "the process died of SIGABRT")


def test_what_the_others_imply_does_not_count(written: dict[str, Any]) -> None:
    found = left_out(written, "test_implied")
    assert {name: each["outcome"] for name, each in found.items()} == {
        "wait@side1:0/user": "redundant",
        "wait@side1:1/user": "redundant",
        "wait@default:0/user": "redundant",
        "synchronize_device@device0:0/user": "survived",
    }
    assert all(each["proof"] for each in found.values() if each["outcome"] == "redundant")


def test_tests_without_a_meaning_here_are_listed_with_their_reason(written: dict[str, Any]) -> None:
    excluded = {each["nodeid"].rpartition("::")[2]: each["excluded"] for each in written["tests"] if each["excluded"]}
    assert excluded == {
        "test_expected_to_fail": "skipped: it is expected to fail",
        "test_skipped": "skipped: not on Mondays",
        "test_fails": "it does not pass with nothing left out: AssertionError: assert 1.0 == 2",
        "test_synchronizes_nothing": "it issues no synchronization",
    }


def test_the_rate_is_of_what_could_be_killed(written: dict[str, Any]) -> None:
    every = [each["outcome"] for test in written["tests"] if not test["excluded"] for each in test["left_out"]]
    score = written["summary"]
    assert score["killed"] == every.count("killed") == 2
    assert score["judged"] == score["killed"] + every.count("survived")
    assert score["kill_rate"] == score["killed"] / score["judged"]
    studies = [
        study.TestStudy(**{**test, "left_out": [study.LeftOut(**each) for each in test["left_out"]]})
        for test in written["tests"]
    ]
    lines = rendered(report.tables(studies, "sim"), LOG_WIDTH, colour=False)
    assert lines[-1] == f"upstream kill rate: 2 of {score['judged']} ({score['kill_rate']:.1%})"
    redundant = every.count("redundant")
    assert any(f"with them it would be 2 of {score['judged'] + redundant}." in line for line in lines)
    assert "twins killed redundant survivors unstable kill rate" in " ".join(" ".join(lines).split())
    assert "noticed" not in " ".join(lines)
    assert any(line.split()[:3] == ["Engine::evaluate_function", "wait", "1"] for line in lines)


def test_the_same_stream_is_recognized_although_the_pool_gives_another() -> None:
    native = registered()
    instrument = Instrument(native, StreamsByAppearance())
    instrument.use_tap(tap.observe_synchronizations("sim", native.last_entry_function()))
    target = SynchronizationId("wait", "side2.1", 1, "user")
    keys = []
    try:
        for _ in range(2):
            instrument.names.clear()
            instrument.begin(Plan(), synchronizations=True, fault=Fault(target))
            first, second = (torch.Stream("sim:1") for _ in range(2))
            second.wait_stream(first)
            second.wait_stream(first)
            recording = instrument.finish()
            keys.append(instrument.names.key("side2.1"))
            assert [str(each.id) for each in recording.synchronizations if each.id.kind == "wait"] == [
                "wait@side2.1:0/user",
                "wait@side2.1:1/user",
            ]
            assert [each.id for each in recording.synchronizations if each.left_out] == [target]
    finally:
        tap.ignore_synchronizations()
    assert keys[0] != keys[1] and None not in keys


class AsARealDevice:
    """The simulator, as something that does not trace itself."""

    device_count = 2

    @property
    def device(self) -> torch.device:
        return torch.device("sim", 0)  # torch knows the name from the registration on

    def describe(self) -> dict[str, str]:
        return {}

    def synchronize(self) -> None:
        torch.accelerator.synchronize()


def seen_and_implied(observed: observer.Observer) -> list[tuple[str, bool]]:
    with observed.traced() as recordings:
        value = torch.ones(8, device="sim")
        side, other = torch.Stream("sim:0"), torch.Stream("sim:0")
        for _ in range(2):
            side.wait_stream(torch.accelerator.current_stream())
        with side:
            value.add_(1)
        other.wait_stream(side)
    (recording,) = recordings
    return [(each.id, each.proof is not None) for each in observer.issued(recording, proofs=True)]


def test_a_real_device_is_traced_by_the_tap_for_one_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = seen_and_implied(observer.Observer("sim"))
    assert simulated == [("wait@side1:0/user", True), ("wait@side1:1/user", True), ("wait@side2:0/user", False)]
    monkeypatch.setattr(observer, "open_backend", lambda device, announce: AsARealDevice())
    observed = observer.Observer("cuda")
    for _ in range(2):
        assert seen_and_implied(observed) == simulated
        assert tap._installed is None
        with observed.tapped(None) as recordings:
            torch.Stream("sim:0").wait_stream(torch.accelerator.current_stream())
        assert not recordings[0].trace and len(recordings[0].synchronizations) == 2
    registered()  # the other tests' ignored prefixes


# The study, from runs that are made up.

WAIT = Issued("wait@side1:0/user", "wait", "user", "wait@side1:0/user (a.py:1)", by_framework=False)
OWN = Issued("synchronize_stream@default:0/user", "synchronize_stream", "user", "somewhere", by_framework=True)


def whole(issued: list[Issued]) -> list[Run]:
    return [
        Run(RunKey("t", ALONE), PASSED),
        Run(RunKey("t", COMPLETE), PASSED, issued=issued),
        Run(RunKey("t", AGAIN), PASSED, issued=issued),
        Run(RunKey("t", TRACED), PASSED, issued=issued),
    ]


def without(attempt: int, outcome: str, *, left_out: bool = True) -> Run:
    return Run(RunKey("t", WAIT.id, attempt), outcome, left_out=left_out)


def test_each_run_follows_from_those_before() -> None:
    planned = [*whole([WAIT, OWN]), without(1, PASSED), without(2, PASSED)]
    for done, run in enumerate(planned):
        assert runs.next_run("t", planned[:done], 2) == run.key
    assert runs.next_run("t", planned, 2) is None
    assert runs.next_run("t", [*whole([WAIT]), without(1, FAILED)], 2) is None
    assert runs.next_run("t", [Run(RunKey("t", ALONE), FAILED)], 2) is None
    assert runs.next_run("t", whole([OWN])[:3], 2) is None


@pytest.mark.parametrize(
    ("tries", "outcome"),
    [
        ([without(1, PASSED), without(2, DIED)], "killed"),
        ([without(1, PASSED), without(2, PASSED)], "survived"),
        # What fails without having left anything out says nothing about it.
        ([without(1, FAILED, left_out=False), without(2, PASSED, left_out=False)], "unstable"),
        ([without(1, FAILED, left_out=False), without(2, PASSED)], "survived"),
    ],
)
def test_a_twin_is_killed_if_the_test_fails_without_it(tries: list[Run], outcome: str) -> None:
    made = study.assemble("t", [*whole([WAIT, OWN]), *tries])
    assert ([each.outcome for each in made.left_out], made.by_framework) == ([outcome], 1)


def test_a_log_is_read_up_to_the_line_that_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = Log(path)
    log.write(collected=["t"])
    log.write(started={"nodeid": "t", "what": ALONE, "attempt": 1})
    with path.open("a") as file:
        file.write('{"ended": {"key"')
    again = Log(path)
    assert (again.nodeids, again.flying, again.runs) == (["t"], RunKey("t", ALONE), {})


# What cannot be studied.


def refused(tests: Path, keyword: str | None = None) -> None:
    study.study_file(str(tests), "sim", keyword=keyword, repetitions=1, limit_s=60, announce=lambda sentence: None)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nosuch\.py is no file: give a test file"):
        refused(tmp_path / "nosuch.py")


def test_a_file_that_cannot_be_imported_is_refused_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "test_broken.py"
    file.write_text("import nosuchmodule\n")
    with pytest.raises(UsageError, match=r"test_broken\.py cannot be collected: .*No module named 'nosuchmodule'"):
        refused(file)


def test_a_file_without_tests_is_nothing_to_study(tmp_path: Path) -> None:
    file = tmp_path / "test_one.py"
    file.write_text("def test_it():\n    pass\n")
    with pytest.raises(study.NothingToStudy, match=r"has no test that matches -k 'other'") as refusal:
        refused(file, "other")
    assert refusal.value.exit_code == 5


def test_a_process_that_does_not_start_is_not_started_for_ever(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("import os\nos._exit(9)\n")
    file = tmp_path / "test_one.py"
    file.write_text("def test_it():\n    pass\n")
    with pytest.raises(InfrastructureError, match=r"test_one\.py ended with 9 before any test"):
        refused(file)
