"""CSAN as an outside opinion, with a sanitizer on the simulator that only passes on what happens-before says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.cuda import _sanitizer

from harness.campaign import csan
from harness.campaign.case import Case
from harness.campaign.options import Options
from harness.campaign.runs import Runs
from harness.campaign.session import Session
from harness.campaign.turns import Turns
from harness.campaign.twins import Twin, TwinStudy
from harness.campaign.watchdog import Watchdog
from harness.exit_codes import ExitCode
from harness.report.tables import LOG_WIDTH, rendered
from harness.report.twins import who_sees_what
from harness.tests.simulator_support import registered
from harness.tests.suite_runner import SAFE, Suite, new_suite
from harness.tests.test_synchronizations import END, NODE, seed_elsewhere

FAKE = """
from harness.campaign import csan
from harness.campaign.case import Case

pytest_plugins = ["harness.plugin"]
once = Case.once


def enable():
    sanitizer = csan.Sanitizer()

    def reporting(self, *arguments, **settings):
        repetition = once(self, *arguments, **settings)
        if repetition.judgement.races or "false_alarm" in self.nodeid:
            sanitizer.collect(lambda: [RuntimeError("a race")])()
        return repetition

    Case.once = reporting
    return sanitizer


csan.enable = enable
csan.require_cuda = lambda device: None
"""


Ask = Callable[..., csan.Opinion]


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    session = Session(Options(twins=True))
    yield session
    session.close()
    registered()  # the other tests' ignored prefixes


@pytest.fixture
def ask(session: Session) -> Ask:
    """Asks a sanitizer about a body; by default one that reports what happens-before sees."""

    def ask(synchronizations: list[str], reports: Callable[[Any], bool] = races) -> csan.Opinion:
        lab = session.lab()
        case = Case("test_x.py::test_x", seed_elsewhere(lab), session, lab, None)
        watchdog = Watchdog(60.0, None)
        runs = Runs(case, Turns(None), watchdog)
        once = runs.once
        sanitizer = csan.Sanitizer()

        def reporting(*arguments: Any, **settings: Any) -> Any:
            repetition = once(*arguments, **settings)
            launched = sanitizer.collect(lambda *ignored: [RuntimeError()] if reports(repetition) else [])
            assert launched("stream", "read", "written") == []  # or the sanitizer would raise
            return repetition

        runs.once = reporting  # type: ignore[method-assign]
        try:
            return csan.form_opinion(runs, synchronizations, sanitizer)
        finally:
            watchdog.rest()

    return ask


def races(repetition: Any) -> bool:
    return bool(repetition.judgement.races)


def test_a_twin_is_seen_if_the_sanitizer_reports_without_the_synchronization(ask: Ask) -> None:
    names = ["wait@ambient:0/user", f"wait@forward:0/{NODE}", "record_stream@ambient:0/user", f"wait@ambient:0/{END}"]
    opinion = ask(names)
    assert (opinion.complete, opinion.failure) == (False, None)
    assert opinion.twins == dict(zip(names, [True, True, False, True], strict=True))


def test_what_is_not_issued_under_the_sanitizer_says_nothing(ask: Ask) -> None:
    assert ask(["wait@ambient:7/user"]).twins == {"wait@ambient:7/user": None}


def test_a_report_of_the_complete_case_makes_its_twins_say_nothing(ask: Ask) -> None:
    opinion = ask(["wait@ambient:0/user"], reports=lambda repetition: True)
    assert (opinion.complete, opinion.twins) == (True, {"wait@ambient:0/user": None})


def test_an_error_that_is_not_the_sanitizer_s_is_no_report(ask: Ask) -> None:
    def broken(repetition: Any) -> bool:
        raise ValueError("broken\nhere")

    opinion = ask(["wait@ambient:0/user"], reports=broken)
    assert (opinion.complete, opinion.failure) == (None, "ValueError: broken")
    assert opinion.twins == {"wait@ambient:0/user": None}

    def without_the_wait(repetition: Any) -> bool:
        if races(repetition):
            raise ValueError
        return False

    opinion = ask(["wait@ambient:0/user"], reports=without_the_wait)
    assert (opinion.complete, opinion.twins) == (False, {"wait@ambient:0/user": None})


def test_the_real_sanitizer_is_enabled_and_reports_instead_of_raising(monkeypatch: pytest.MonkeyPatch) -> None:
    class Handler:
        def _handle_kernel_launch(self, *arguments: Any) -> list[Exception]:
            return [RuntimeError(*arguments)]

    handler = Handler()
    enabled: list[bool] = []
    real = SimpleNamespace(dispatch=SimpleNamespace(event_handler=handler))
    monkeypatch.setattr(_sanitizer, "cuda_sanitizer", real)
    monkeypatch.setattr(_sanitizer, "enable_cuda_sanitizer", lambda: enabled.append(True))
    sanitizer = csan.enable()
    assert enabled == [True]
    assert handler._handle_kernel_launch("a") == [] and handler._handle_kernel_launch("b") == []
    assert [error.args for error in sanitizer.take()] == [("a",), ("b",)]
    assert sanitizer.take() == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the CUDA Sanitizer needs CUDA")
def test_the_real_sanitizer_sees_a_missing_wait(tmp_path: Path) -> None:
    suite = new_suite(tmp_path)
    ran = suite.run("--twins", "--csan", "--twins-json", "twins.json", "--device", "cuda")
    assert "warning" not in ran.output
    (case,) = json.loads((tmp_path / "twins.json").read_text())["cases"]
    seen = {twin["synchronization"]: twin["csan"] for twin in case["twins"]}
    assert case["csan"] is False and seen["wait@ambient:0/user"] is True


def test_the_sanitizer_is_asked_in_a_process_of_its_own(tmp_path: Path) -> None:
    suite = new_suite(tmp_path, SAFE + SAFE.replace("test_ordered", "test_false_alarm"))
    (tmp_path / "conftest.py").write_text(FAKE)
    ran = suite.run("--twins", "--csan", "--twins-json", "twins.json", "-k", "test_")
    assert ran.code in (ExitCode.CLEAN, ExitCode.RACE)
    assert "csan reports 1 complete case of 2, which are safe, and 0 redundant twins of " in ran.output
    cases = {case["nodeid"]: case for case in json.loads((tmp_path / "twins.json").read_text())["cases"]}
    ordered, alarming = (cases[f"test_written.py::{name}"] for name in ("test_ordered", "test_false_alarm"))
    assert (ordered["csan"], alarming["csan"]) == (False, True)
    for twin in ordered["twins"]:
        assert twin["csan"] == ("happens-before" in twin["killed_by"])
    assert all(twin["csan"] is None for twin in alarming["twins"])
    assert "all" in ran.output and "nobody" not in ran.output.partition("csan reports")[2]


def test_another_device_than_cuda_is_refused(tmp_path: Path) -> None:
    suite = new_suite(tmp_path)
    command = [sys.executable, "-m", "harness", "twins", "--csan", "--device", "sim"]
    done = subprocess.run(command, cwd=tmp_path, env=suite.environment(), text=True, capture_output=True, timeout=240)
    assert done.returncode == ExitCode.USAGE
    assert "knows CUDA only, and the device is sim: leave it out, or use --device cuda" in done.stderr


def test_a_process_that_answers_nothing_is_said(tmp_path: Path) -> None:
    new_suite(tmp_path)
    (tmp_path / "conftest.py").write_text("import os\nprint('gone')\nos._exit(7)\n")
    study = TwinStudy("test_written.py::test_ordered", False, twins=[twin("wait", "killed")])
    warning = csan.ask([study], "sim", tmp_path, Suite(tmp_path).environment())
    assert warning is not None and "asked about 1 cases and answered for 0: its process ended with" in warning


def twin(kind: str, outcome: str, *by: str, csan: bool | None = None) -> Twin:
    return Twin(f"{kind}@a:0/user", kind, "user", "", outcome, list(by), csan=csan)


def test_the_table_has_a_column_for_each_combination() -> None:
    every = ("values", "happens-before")
    studies = [
        TwinStudy(
            "a",
            False,
            csan=False,
            twins=[
                twin("wait", "killed", *every, csan=True),
                twin("wait", "killed", *every, csan=False),
                twin("record_stream", "killed", "values", csan=False),
                twin("wait", "survived", csan=True),
                twin("wait", "survived", csan=False),
                twin("wait", "redundant", csan=True),
                twin("wait", "killed", *every),
            ],
        ),
        TwinStudy("b", False, csan=True, twins=[twin("wait", "killed", *every)]),
    ]
    lines = rendered(who_sees_what(studies), LOG_WIDTH, colour=False)
    cells = {tuple(line.split()[:2]): line.split()[2:] for line in lines if line.strip().startswith("user")}
    # twins, values, happens-before, csan; all three, values and happens-before, csan alone, values alone, nobody
    assert cells["user", "wait"] == ["4", "2", "2", "2", "1", "1", "1", "0", "1"]
    assert cells["user", "record_stream"] == ["1", "1", "0", "0", "0", "0", "0", "1", "0"]
    assert "csan reports 1 complete case of 2, which are safe, and 1 redundant twin of 1." in lines
    assert any(line.startswith("2 twins not in this table: csan reports the complete case as well") for line in lines)
    for study in studies:
        study.csan = None
    assert who_sees_what(studies) == []
