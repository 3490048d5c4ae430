"""Twins of the suite traced by the tap, as on a GPU, and by the simulator: the same outcomes and the same
edges of the engine.

Copies, hooks and threads are where the two see things by different ways: pinned memory, the host's own accesses, what
the caller's code launches inside an operation, memory given up by a thread that runs no operation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.tests.suite_runner import REPOSITORY

SUITES = ["suites/test_copies.py", "suites/test_hooks.py", "suites/test_graph_shape.py"]
SELECTED = "copies or saved or reads or thread or checkpoint"

Outcomes = dict[tuple[str, str], tuple[str, bool, str]]
"""Case and synchronization -> outcome, whether happens-before killed it, the aimed plan."""


Edges = dict[str, list[str]]
"""Case -> the edges of the engine that it crosses."""


def run_twins(report: Path, *plugins: str) -> tuple[Outcomes, Edges]:
    command = [sys.executable, "-m", "pytest", *SUITES, "-k", SELECTED, "--device", "sim", "--twins", "-q"]
    done = subprocess.run(
        [*command, f"--twins-json={report}", *plugins],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    studies: list[dict[str, Any]] = json.loads(report.read_text())["cases"]
    outcomes = {
        (study["nodeid"], twin["synchronization"]): (
            twin["outcome"],
            "happens-before" in twin["killed_by"],
            twin["plan"] if twin["outcome"] == "killed" else "",
        )
        for study in studies
        for twin in study["twins"]
    }
    return outcomes, {study["nodeid"]: study["edges"] for study in studies}


def test_the_tap_kills_the_twins_that_the_simulator_kills_under_the_same_plans(tmp_path: Path) -> None:
    expected, edges = run_twins(tmp_path / "simulator.json")
    assert len(expected) > 300 and {"j", "k"} <= {edge for found in edges.values() for edge in found}
    assert run_twins(tmp_path / "tap.json", "-p", "harness.tests.tap_as_instrument") == (expected, edges)
