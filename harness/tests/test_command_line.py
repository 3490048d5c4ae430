"""``python -m harness``: the commands as a user types them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from harness.__main__ import app, main
from harness.backends import extension
from harness.tests.simulator_support import PACKAGE_ROOT


def test_build_builds_every_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "build", lambda name, sources, announce, title: Path("/built", name))
    answer = CliRunner().invoke(app, ["build"])
    assert answer.exit_code == 0, answer.output
    assert answer.stdout.split() == ["/built/sidestream_simulator", "/built/sidestream_tap"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["version"], 0), (["nosuch"], 4), (["bench", "--launches", "-1"], 4), (["operators", "nosuch"], 4)],
)
def test_the_exit_code_is_one_of_our_own(monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int) -> None:
    monkeypatch.setattr("sys.argv", ["harness", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code or 0) == code


def test_a_full_disk_under_the_output_is_one_sentence() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "harness", "version"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=PACKAGE_ROOT)
    assert done.returncode == 3
    assert done.stderr == ("ERROR: the output could not be written: No space left on device. Run it again elsewhere.\n")


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_says_so_by_its_exit_code(monkeypatch: pytest.MonkeyPatch, signal_number: int) -> None:
    def interrupted() -> None:
        os.kill(os.getpid(), signal_number)

    monkeypatch.setattr("harness.__main__.app", typer_of(interrupted))
    monkeypatch.setattr("sys.argv", ["harness"])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 2


def typer_of(command: Callable[[], None]) -> typer.Typer:
    made = typer.Typer()
    made.command()(command)
    return made
