"""``python -m harness``: the commands as a user types them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.__main__ import app
from harness.backends import extension


def test_build_builds_every_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "build", lambda name, sources, announce, title: Path("/built", name))
    answer = CliRunner().invoke(app, ["build"])
    assert answer.exit_code == 0, answer.output
    assert answer.stdout.split() == ["/built/sidestream_simulator", "/built/sidestream_tap"]
