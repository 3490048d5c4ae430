"""Turns: processes that name the same file run one after another."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.campaign import turns as turns_module
from harness.campaign.turns import Turns
from harness.tests.simulator_support import PACKAGE_ROOT

# Writes one line when a stretch of its turn begins and one when it ends, each by a single write.
TAKES_TURNS = """
import os, sys, time
from pathlib import Path
from harness.campaign.turns import Turns

name, folder, stretches = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
turns = Turns(folder / "gpu.turns")
(folder / name).touch()
while len(list(folder.glob("process-*"))) < 2:
    time.sleep(0.001)
for _ in range(stretches):
    with turns.turn():
        os.write(log, f"{name} begins\\n".encode())
        time.sleep(0.003)
        os.write(log, f"{name} ends\\n".encode())
"""

HOLDS_ITS_TURN = """
import sys, time
from pathlib import Path
from harness.campaign.turns import Turns

with Turns(Path(sys.argv[1])).turn():
    print("holding", flush=True)
    time.sleep(60)
"""


@contextlib.contextmanager
def started(script: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """The script in a process of its own, which is gone when the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)], cwd=PACKAGE_ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def is_free(path: Path) -> bool:
    """Whether another process could begin its turn now."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


class Clock:
    """A monotonic clock that moves only when told to, or when somebody sleeps by it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, duration_s: float) -> None:
        self.slept.append(duration_s)
        self.now += duration_s


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(turns_module, "time", clock)
    return clock


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gpu.turns"


def test_two_processes_never_overlap_and_both_get_on(tmp_path):
    with (
        started(TAKES_TURNS, "process-1", tmp_path, 30) as first,
        started(TAKES_TURNS, "process-2", tmp_path, 30) as second,
    ):
        assert (first.wait(60), second.wait(60)) == (0, 0)
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 120
    for begins, ends in zip(lines[::2], lines[1::2], strict=True):
        assert ends == begins.replace("begins", "ends")
    # Had one of them kept the lock to itself, the other's stretches would all come after its own.
    switches = sum(before.split()[0] != after.split()[0] for before, after in itertools.pairwise(lines))
    assert switches > 2


def test_a_killed_holder_frees_its_turn(path):
    with started(HOLDS_ITS_TURN, path) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holding\n"
        assert not is_free(path)
        holder.kill()
        holder.wait()
        assert is_free(path)


def test_a_turn_waits_for_the_one_before(path):
    first, second = Turns(path), Turns(path)
    order = []
    asked = threading.Event()

    def takes_a_turn() -> None:
        asked.set()
        with second.turn():
            order.append("second")

    with first.turn():
        waiting = threading.Thread(target=takes_a_turn, daemon=True)
        waiting.start()
        asked.wait()
        time.sleep(0.05)
        order.append("first")
    waiting.join(timeout=10)
    assert order == ["first", "second"]
    first.close()
    second.close()


def test_a_turn_ends_with_its_stretch_and_stays_away_a_moment(path, clock):
    turns = Turns(path)
    with turns.turn():
        assert not is_free(path)
    assert is_free(path)
    (slept,) = clock.slept
    assert 0 < slept < 1e-2
    turns.close()


def test_a_long_turn_goes_on_over_stretches_until_it_has_lasted(path, clock):
    calls = []
    turns = Turns(path, length_s=10.0, on_begin=lambda: calls.append("begin"), on_end=lambda: calls.append("end"))
    for now in (100.0, 104.0, 109.0):
        clock.now = now
        with turns.turn():
            assert calls == ["begin"]
        assert not is_free(path)
        assert not clock.slept, "nobody is waited for within a turn"
    with turns.turn():
        clock.now = 110.0
    assert calls == ["begin", "end"]
    assert is_free(path)
    with turns.turn():
        assert calls == ["begin", "end", "begin"], "the length counts from the beginning of each turn"
    assert not is_free(path)
    turns.close()


def test_what_begins_with_a_turn_runs_within_it(path):
    seen = []
    turns = Turns(path, on_begin=lambda: seen.append(is_free(path)), on_end=lambda: seen.append(is_free(path)))
    with turns.turn():
        assert seen == [False]
    assert seen == [False, False], "the load must rest before the others begin"
    turns.close()


def test_a_long_turn_can_be_ended_early_and_only_once(path):
    ended = []
    turns = Turns(path, length_s=3600.0, on_end=lambda: ended.append(True))
    turns.end()
    assert not ended, "there was no turn to end"
    with turns.turn():
        pass
    turns.end()
    turns.end()
    assert ended == [True]
    assert is_free(path)
    turns.close()


def test_a_stretch_that_raises_leaves_the_turn_to_be_ended(path):
    ended = []
    turns = Turns(path, on_end=lambda: ended.append(True))
    with pytest.raises(ValueError, match="from the body"), turns.turn():
        raise ValueError("from the body")
    turns.end()
    assert ended == [True]
    assert is_free(path)
    turns.close()


def test_closing_ends_the_turn_and_the_file(path):
    ended = []
    before = len(os.listdir("/proc/self/fd"))
    turns = Turns(path, length_s=3600.0, on_end=lambda: ended.append(True))
    with turns.turn():
        pass
    turns.close()
    turns.close()
    assert ended == [True]
    assert is_free(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_a_file_it_is_always_this_process_turn(clock):
    calls = []
    turns = Turns(None, on_begin=lambda: calls.append("begin"), on_end=lambda: calls.append("end"))
    with turns.turn():
        pass
    turns.end()
    turns.close()
    assert not calls
    assert not clock.slept


def test_other_files_are_other_turns(tmp_path):
    first, second = Turns(tmp_path / "gpu-0.turns"), Turns(tmp_path / "gpu-1.turns")
    with first.turn(), second.turn():
        assert not is_free(tmp_path / "gpu-0.turns")
        assert not is_free(tmp_path / "gpu-1.turns")
    first.close()
    second.close()
