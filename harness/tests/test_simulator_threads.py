"""The simulator under several threads: no deadlock, no wrong value, no error."""

from __future__ import annotations

import subprocess
import sys

from harness.tests.simulator_support import PACKAGE_ROOT

HANG_S = 120
"""A run takes 2 s. The stress program ends itself after this time with the stacks of its threads."""


def test_threads_that_do_everything_at_once_neither_hang_nor_disturb_one_another() -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "harness.tests.thread_stress", "--programs", "180", "--hang-s", str(HANG_S)],
        cwd=PACKAGE_ROOT,
        capture_output=True,
        text=True,
        timeout=2 * HANG_S,
    )
    assert answer.returncode == 0, answer.stderr
    counts = {name: int(count) for name, count in map(str.split, answer.stdout.splitlines())}
    assert counts.pop("repetition") > 0
    assert set(counts.values()) == {4 * 180 // 10}
    assert len(counts) == 10
