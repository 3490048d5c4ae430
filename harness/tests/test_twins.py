"""Twins: what is killed, what is redundant, what survives, and what people read of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

from harness import processes
from harness.__main__ import app
from harness.campaign.case import Case, CaseError, Control
from harness.campaign.options import Options
from harness.campaign.session import Session
from harness.campaign.turns import Turns
from harness.campaign.twins import KILLED, VALUES, Twin, TwinStudy, study_twins
from harness.campaign.watchdog import Watchdog
from harness.errors import InfrastructureError
from harness.exit_codes import ExitCode
from harness.report.twins import describe_failures, summary, write_twins_json
from harness.tests.suite_runner import CONTROL, SAFE, Suite, new_suite
from harness.tests.test_synchronizations import END, NODE, seed_elsewhere

GIVES_UP_ITS_SEED = SAFE.replace("        lab.observe", "        del seed\n        lab.observe")

SURVIVOR = """
def test_with_a_wait_for_nothing(lab):
    leaf, product = lab.product(2.0, 3.0)
    with lab.stream("default") as default:
        product.sum().backward()
        lab.observe(leaf.grad, 3.0)
    lab.stream("later").wait_stream(default)
"""


Study = Callable[..., TwinStudy]


@pytest.fixture
def session(tapped_session: Session) -> Session:
    return tapped_session


@pytest.fixture
def study(session: Session) -> Study:
    """Studies a body, which is given the lab."""

    def run(make: Callable[..., Callable[[], None]], control: Control | None = None) -> TwinStudy:
        lab = session.lab()
        case = Case("test_x.py::test_x", make(lab), session, lab, control)
        watchdog = Watchdog(60.0, None)
        try:
            return study_twins(case, 1, Turns(None), watchdog)
        finally:
            watchdog.rest()

    return run


def outcomes(of: TwinStudy) -> dict[str, tuple[str, list[str]]]:
    return {twin.synchronization: (twin.outcome, twin.killed_by) for twin in of.twins}


BOTH = ["happens-before", "values"]


def test_every_synchronization_of_a_backward_is_killed_or_redundant(study):
    found = study(seed_elsewhere)
    assert outcomes(found) == {
        "wait@ambient:0/user": ("killed", BOTH),
        "record_stream@ambient:0/user": ("redundant", []),
        "record_stream@forward:0/InputBuffer::add": ("redundant", []),
        f"wait@forward:0/{NODE}": ("killed", BOTH),
        f"wait@ambient:0/{END}": ("killed", BOTH),
    }
    assert found.issued["InputBuffer::add record"] == 1 and found.issued["user wait"] == 1
    killed = [twin for twin in found.twins if twin.outcome == "killed"]
    assert [twin.repetitions_to_kill for twin in killed] == [1, 1, 1]
    assert [twin.plan for twin in killed] == ["hold=fill:0", "hold=fill:0", "hold=forward:0"]
    assert all(twin.race is not None and "nothing orders" in twin.race for twin in killed)
    assert all(twin.proof is not None for twin in found.twins if twin.outcome == "redundant")


def test_of_two_waits_for_one_recording_each_is_redundant(study):
    def make(lab):
        def body() -> None:
            with lab.stream("fill") as fill:
                tensor = lab.poisoned(torch.empty(4, device=lab.device))
                tensor.fill_(5.0)
                event = fill.record_event()
            with lab.stream("ambient") as ambient:
                ambient.wait_event(event)
                ambient.wait_event(event)
                lab.observe(tensor, 5.0)

        return body

    found = study(make)
    assert outcomes(found) == {f"wait@ambient:{index}/user": ("redundant", []) for index in range(2)}
    assert "'ambient'" in found.twins[0].proof and "'fill'" in found.twins[0].proof


def test_a_wait_that_orders_nothing_that_is_looked_at_survives(study):
    def make(lab):
        def body() -> None:
            with lab.stream("fill") as fill:
                tensor = lab.poisoned(torch.empty(4, device=lab.device))
                tensor.fill_(5.0)
                lab.observe(tensor, 5.0)
            lab.stream("later").wait_stream(fill)

        return body

    (twin,) = study(make).twins
    assert (twin.outcome, twin.killed_by, twin.plan) == ("survived", [], "hold=fill:1")
    assert twin.note is not None and "orders nothing that anyone looks at" in twin.note


def test_what_is_noticed_is_killed_whatever_the_proof_says(study, monkeypatch):
    monkeypatch.setattr("harness.campaign.twins.implied", lambda trace, entries: "a chain that is none")
    found = study(seed_elsewhere)
    killed = [twin for twin in found.twins if twin.killed_by]
    assert [twin.outcome for twin in killed] == ["killed"] * 3 and found.contradictions == killed
    notes = {f"killed by {' and '.join(BOTH)}, although its order is implied"}
    assert {twin.note for twin in killed} == notes
    assert describe_failures(found, Options()).count("although its order is proved to be implied") == 3


def test_a_stale_value_that_happens_to_be_right_is_no_kill_by_values(study):
    def make(lab):
        def body() -> None:
            with lab.preparing(), lab.stream("fill"):
                tensor = torch.full((4,), 5.0, device=lab.device)
            with lab.stream("fill") as fill:
                tensor.fill_(5.0)
            with lab.stream("ambient") as ambient:
                ambient.wait_stream(fill)
                lab.observe(tensor, 5.0)

        return body

    (twin,) = study(make).twins
    assert (twin.outcome, twin.killed_by) == ("killed", ["happens-before"])
    assert twin.note == "killed by happens-before, not by values"


def test_memory_is_poisoned_so_that_a_missing_record_stream_has_a_value(study):
    def make(lab):
        def body() -> None:
            with lab.stream("fill") as fill:
                tensor = lab.poisoned(torch.empty(4, device=lab.device))
                tensor.fill_(5.0)
            with lab.stream("ambient") as ambient:
                ambient.wait_stream(fill)
                copy = tensor * 2.0
                tensor.record_stream(ambient)
                del tensor
                lab.observe(copy, 10.0)

        return body

    assert outcomes(study(make))["record_stream@ambient:0/user"] == ("killed", BOTH)


def raising_if_unordered(lab):
    def body() -> None:
        with lab.stream("fill") as fill:
            tensor = lab.poisoned(torch.empty(4, device=lab.device))
            tensor.fill_(5.0)
        with lab.stream("ambient") as ambient:
            ambient.wait_stream(fill)
            copy = tensor * 2.0
            lab.observe(copy, 10.0)
            if not copy.sum().item() == 40.0:
                raise ZeroDivisionError("from the body")

    return body


def test_a_twin_that_makes_the_body_raise_is_killed(study):
    (twin,) = study(raising_if_unordered).twins
    assert (twin.outcome, twin.killed_by, twin.repetitions_to_kill) == ("killed", BOTH, 1)
    assert twin.plan == "hold=fill:0"


def test_a_twin_that_breaks_the_device_ends_the_process_with_a_sentence(study, session, monkeypatch):
    monkeypatch.setattr(session, "is_broken_by", lambda error: isinstance(error, ZeroDivisionError))
    sentence = (
        "the device is unusable after test_x.py::test_x under hold=fill:0 without wait@ambient:0/user: ZeroDivision"
    )
    with pytest.raises(InfrastructureError, match=re.escape(sentence)):
        study(raising_if_unordered)


def unordered(lab):
    def body() -> None:
        with lab.stream("fill"):
            tensor = lab.poisoned(torch.empty(4, device=lab.device))
            tensor.fill_(5.0)
        with lab.stream("ambient"):
            lab.observe(tensor, 5.0)

    return body


def test_a_control_has_no_twins_and_is_seen_to_race(study):
    found = study(unordered, Control("Nothing orders them.", "fill"))
    assert found.control and found.twins == []
    assert found.look is not None and found.look.plans == {"hold=fill:0": [1, 1]} and found.look.is_seen
    assert describe_failures(found, Options()) == ""
    assert TwinStudy.from_json(found.to_json()) == found


def test_a_control_that_does_not_race_fails_as_in_any_run(study):
    found = study(seed_elsewhere, Control("It is not, really.", "fill"))
    assert found.control and found.twins == []
    assert found.look is not None and not found.look.is_seen
    text = describe_failures(found, Options())
    assert "this run could not have seen the race: test_x.py::test_x is a control, unsafe because\n  It is not" in text
    assert "repetitions raced" in text


def test_a_control_that_one_oracle_alone_sees_is_not_seen(study, monkeypatch):
    monkeypatch.setattr("harness.campaign.repetition.compare", lambda observation: None)
    found = study(unordered, Control("Nothing orders them.", "fill"))
    assert found.look is not None and not found.look.is_seen
    assert "only 0 of the 1 repetitions that held the racing access were seen to race by both oracles" in (
        describe_failures(found, Options())
    )


def test_a_case_that_races_as_it_is_is_refused(study):
    with pytest.raises(CaseError, match="is not clean with nothing left out"):
        study(unordered)


def test_a_case_that_does_not_always_synchronize_alike_is_refused(study):
    def make(lab):
        turn = iter(range(1000))

        def body() -> None:
            with lab.stream("fill") as fill:
                tensor = torch.ones(4, device=lab.device)
                lab.observe(tensor, 1.0)
            for _ in range(next(turn) % 2):
                lab.stream("later").wait_stream(fill)

        return body

    with pytest.raises(CaseError, match="does not synchronize the same way each time"):
        study(make)


class LeavesNothingOut:
    """A tap with a planted bug: it says that it left something out, and did not."""

    def __init__(self, native):
        self._native = native
        self._target = None

    def __getattr__(self, name):
        return getattr(self._native, name)

    def begin_synchronizations(self, target, fault, lines):
        self._target = target
        self._native.begin_synchronizations(None, fault, lines)

    def finish_synchronizations(self):
        made = self._native.finish_synchronizations()
        left_out = self._target[:5] if self._target is not None else None
        return [(*each[:-2], each[:5] == left_out, each[-1]) for each in made]


def test_a_tap_that_leaves_nothing_out_makes_survivors(session, study, monkeypatch):
    monkeypatch.setattr(session.instrument, "_tap", LeavesNothingOut(session.instrument._tap))
    found = study(seed_elsewhere)
    assert len(found.survivors) == 3
    assert all(twin.outcome in ("survived", "redundant") for twin in found.twins)


def test_a_tap_that_is_not_there_is_noticed(session, study, monkeypatch):
    deaf = LeavesNothingOut(session.instrument._tap)
    monkeypatch.setattr(deaf, "finish_synchronizations", deaf._native.finish_synchronizations, raising=False)
    monkeypatch.setattr(session.instrument, "_tap", deaf)
    with pytest.raises(CaseError, match="did not issue wait@ambient:0/user again"):
        study(seed_elsewhere)


# The figures.


def test_rates_are_of_the_twins_that_are_not_redundant():
    def twin(outcome: str, *by: str, repetitions: int | None = None) -> Twin:
        return Twin("wait@a:0/user", "wait", "user", "", outcome, list(by), repetitions)

    twins = [twin("killed", "values", "happens-before", repetitions=1), twin("killed", "happens-before")]
    twins += [twin("killed", "values", "happens-before", repetitions=3), twin("survived"), twin("redundant")]
    score = summary(twins)
    assert (score["twins"], score["killed"], score["redundant"], score["survived"]) == (5, 3, 1, 1)
    assert (score["kill_rate"], score["kill_rate_values"], score["kill_rate_happens_before"]) == (0.75, 0.5, 0.75)
    assert (score["repetitions_to_kill_median"], score["repetitions_to_kill_max"]) == (2, 3)
    none = summary([twin("redundant")])
    assert none["kill_rate"] is None and none["repetitions_to_kill_median"] is None


# As a user runs it.


@pytest.fixture
def suite(tmp_path) -> Suite:
    return new_suite(tmp_path)


def test_a_control_that_does_not_race_fails_the_run(suite):
    suite.write(
        CONTROL.replace("import pytest", "import pytest, torch").replace(
            "        seed.fill_(5.0)  # the fill\n", "        seed.fill_(5.0)\n    torch.accelerator.synchronize()\n"
        )
    )
    ran = suite.run("--twins", "-n", "2")
    assert ran.code == ExitCode.RACE
    assert "0 of 1 controls raced as they are." in ran.output
    assert "this run could not have seen the race" in ran.output


@pytest.mark.parametrize("workers", [(), ("-n", "2")])
def test_survivors_fail_their_case_and_the_run(suite, workers):
    suite.write(GIVES_UP_ITS_SEED + SURVIVOR + CONTROL)
    ran = suite.run("--twins", "--twins-json", "twins.json", "--junitxml", "report.xml", *workers)
    assert ran.code == ExitCode.RACE
    assert "1 twin survived: nothing notices when the synchronization is left out" in ran.output
    assert "1 of 1 controls raced as they are." in ran.output
    name = "test_written.py::test_with_a_wait_for_nothing"
    replay = f"python -m pytest {name} --device sim --plan hold=default:3 --leave-out wait@later:0/user"
    assert replay in ran.output
    data = json.loads((suite.folder / "twins.json").read_text())
    assert {case["nodeid"] for case in data["cases"]} >= {name, "test_written.py::test_ordered"}
    (survivor,) = [twin for case in data["cases"] for twin in case["twins"] if twin["outcome"] == "survived"]
    assert survivor["synchronization"] == "wait@later:0/user"
    assert data["summary"]["survived"] == 1 and data["summary"]["kill_rate"] < 1
    failed = [case for case in ElementTree.parse(suite.folder / "report.xml").iter("testcase") if len(case)]
    assert [case.get("name") for case in failed] == ["test_with_a_wait_for_nothing"]
    again = suite.run(*replay.split()[3:])
    assert again.code == ExitCode.CLEAN, "it survives again"


def test_a_killed_twin_is_replayed_as_a_race(suite):
    ran = suite.run("test_written.py", "--plan", "hold=fill:0", "--leave-out", "wait@ambient:0/user")
    assert ran.code == ExitCode.RACE
    assert "left out wait@ambient:0/user" in ran.output
    assert "--leave-out wait@ambient:0/user" in ran.output.partition("replay")[2]
    ran = suite.run("test_written.py", "--plan", "hold=fill:0", "--misdirect", "wait@ambient:0/user")
    assert ran.code == ExitCode.RACE
    assert "issued and not honoured" in ran.output and "misdirect" in ran.output


def test_the_command_prints_json_and_exits_like_pytest(suite):
    suite.write(GIVES_UP_ITS_SEED)

    def twins(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "harness", "twins", "--device", "sim", *arguments]
        return subprocess.run(
            command, cwd=suite.folder, env=suite.environment(), text=True, capture_output=True, timeout=240
        )

    done = twins("--json", "test_written.py")
    assert done.returncode == ExitCode.CLEAN
    assert json.loads(done.stdout)["summary"]["survived"] == 0
    assert "0 survived" in done.stderr
    assert twins("-k", "nothing_is_called_so").returncode == ExitCode.NOTHING_RAN


def test_an_interrupted_command_prints_what_has_ended(monkeypatch):
    def interrupted(command: list[str], **_: object) -> int:
        write_twins_json(Path(command[command.index("--twins-json") + 1]), [], Options())
        raise KeyboardInterrupt

    monkeypatch.setattr(processes, "run_child", interrupted)
    ran = CliRunner().invoke(app, ["twins", "--json"])
    assert ran.exit_code == ExitCode.INTERRUPTED
    assert json.loads(ran.stdout)["summary"]["survived"] == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--twins", "--count", "5"), "leave out --count"),
        (("--twins", "--plan", "baseline"), "leave out --plan"),
        (("--twins", "--twin-repetitions", "0"), "give a number from 1 on"),
        (("--twins-json", "twins.json"), "--twins-json goes with --twins"),
        (("--csan",), "--csan goes with --twins"),
        (("--twins", "--twins-json", "nowhere/twins.json"), "cannot be written (No such file or directory)"),
        (("--leave-out", "nonsense"), "'nonsense' names no synchronization: write kind@stream:index/issuer"),
        (("--misdirect", "record_stream@a:0/user"), "only the wait for an event can be misdirected"),
        (("--leave-out", "wait@a:0/user", "--misdirect", "wait@a:0/user"), "give one of them"),
        (("--leave-out", "wait@ambient:7/user"), "never issued wait@ambient:7/user"),
    ],
)
def test_what_makes_no_sense_is_refused(suite, arguments, sentence):
    ran = suite.run(*arguments)
    assert ran.code == ExitCode.USAGE
    assert sentence in ran.output


def test_a_twin_that_is_noticed_against_a_proof_fails_its_case() -> None:
    noticed = Twin("wait@a:0/user", "wait", "user", "here", KILLED, [VALUES], proof="a chain", plan="hold=b:0")
    study = TwinStudy("test_x.py::test_x", False, twins=[noticed])
    text = describe_failures(study, Options())
    assert text.startswith("a twin was noticed although its order is proved to be implied: here")
    assert "a chain" in text and "survived" not in text
    noticed.proof = None
    assert describe_failures(study, Options()) == ""


def test_a_link_to_the_json_file_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    link.symlink_to(target)
    write_twins_json(link, [], Options())
    assert link.is_symlink() and json.loads(target.read_text())["cases"] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "target.json"]
    plain = tmp_path / "plain"
    plain.touch()
    assert target.stat().st_mode == plain.stat().st_mode
