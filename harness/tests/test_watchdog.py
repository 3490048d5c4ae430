"""The watchdog, with hangs in Python, in native code and in native code that holds the GIL."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.campaign import watchdog as module
from harness.campaign.watchdog import RepetitionTimeout, Watchdog
from harness.processes import die_with_parent

REPOSITORY = Path(__file__).resolve().parents[2]

HANG = """
import ctypes, sys, threading, time
from pathlib import Path
from harness.campaign.watchdog import Watchdog

def hang_in_native_code(library):
    # A mutex that is locked twice; unlike sleep, the wait for it is not ended by a signal.
    mutex = ctypes.create_string_buffer(256)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)

def wait_in_another_thread():
    time.sleep(600)

threading.Thread(target=wait_in_another_thread, daemon=True).start()
stacks = Path(sys.argv[1]) if sys.argv[1] else None
"""


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def stacks_path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "gw0.stacks"


@pytest.fixture
def watchdog(stacks_path: Path) -> Iterator[Watchdog]:
    watchdog = Watchdog(0.2, stacks_path)
    yield watchdog
    watchdog.rest()


def waiting_elsewhere(end: threading.Event) -> None:
    end.wait()


def test_a_hang_in_python_is_cut_and_the_next_repetition_works(watchdog: Watchdog, stacks_path: Path) -> None:
    end = threading.Event()
    other = threading.Thread(target=waiting_elsewhere, args=(end,))
    other.start()
    try:
        started = time.monotonic()
        with pytest.raises(RepetitionTimeout, match=r"took longer than 0\.2 s"), watchdog.guard():
            time.sleep(30)
        assert 0.2 <= time.monotonic() - started < 5
    finally:
        end.set()
        other.join()
    assert "test_a_hang_in_python_is_cut" in watchdog.stacks()
    assert "waiting_elsewhere" in watchdog.stacks()
    assert stacks_path.read_bytes() == b""  # what is left there means a hard cut

    with watchdog.guard():
        pass
    with pytest.raises(RepetitionTimeout), watchdog.guard():
        threading.Event().wait()


def test_without_a_path_the_stacks_of_a_soft_cut_are_kept_all_the_same() -> None:
    watchdog = Watchdog(0.1, None)
    with pytest.raises(RepetitionTimeout), watchdog.guard():
        time.sleep(30)
    assert "test_without_a_path" in watchdog.stacks()


def test_a_case_that_catches_exceptions_does_not_catch_the_cut(watchdog: Watchdog) -> None:
    with pytest.raises(RepetitionTimeout), watchdog.guard():
        try:
            time.sleep(30)
        except Exception:
            pytest.fail("the cut was swallowed")


def test_every_repetition_has_the_whole_limit(stacks_path: Path) -> None:
    watchdog = Watchdog(0.5, stacks_path)
    with watchdog.guard():  # arms the timers
        time.sleep(0.1)
    time.sleep(0.2)
    with watchdog.guard():  # still runs when the alarm of the first one comes
        time.sleep(0.35)
    with pytest.raises(RepetitionTimeout), watchdog.guard():
        time.sleep(30)


def test_the_time_between_repetitions_is_nobodys(watchdog: Watchdog) -> None:
    with watchdog.guard():
        pass
    time.sleep(0.4)


def test_the_timer_thread_is_started_once_a_second(watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    armed_at: list[float] = []
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: armed_at.append(now))
    for _ in range(35):
        with watchdog.guard():
            now += 0.0625
        now += 0.0625
    assert armed_at == [1000.0, 1001.0, 1002.0, 1003.0, 1004.0]


def test_what_it_took_is_given_back(watchdog: Watchdog) -> None:
    def handler(number: int, frame: object) -> None:
        pass

    before = signal.signal(signal.SIGALRM, handler)
    timer_before = signal.setitimer(signal.ITIMER_REAL, 500.0)
    try:
        with watchdog.guard():
            assert signal.getsignal(signal.SIGALRM) is not handler
            assert signal.getitimer(signal.ITIMER_REAL)[0] <= 0.2
        watchdog.rest()
        assert signal.getsignal(signal.SIGALRM) is handler
        assert 400 < signal.getitimer(signal.ITIMER_REAL)[0] <= 500

        with pytest.raises(RepetitionTimeout), watchdog.guard():
            time.sleep(30)
        assert signal.getsignal(signal.SIGALRM) is handler
        assert 400 < signal.getitimer(signal.ITIMER_REAL)[0] <= 500
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer_before)


def test_it_takes_the_alarm_back_from_whoever_took_it_meanwhile(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REARM_INTERVAL_S", 0.0)
    with watchdog.guard():
        pass
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    try:
        with pytest.raises(RepetitionTimeout), watchdog.guard():
            time.sleep(3)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_another_thread_may_be_guarded(watchdog: Watchdog) -> None:
    entered: list[bool] = []

    def repetition() -> None:
        with watchdog.guard():
            entered.append(True)

    thread = threading.Thread(target=repetition)
    thread.start()
    thread.join()
    assert entered == [True]


@pytest.mark.parametrize("library", ["PyDLL", "CDLL"], ids=["holding the GIL", "without the GIL"])
def test_a_hang_in_native_code_ends_the_process_with_the_stacks_of_all_threads(library: str, stacks_path: Path) -> None:
    process = start(
        HANG + f"with Watchdog(0.2, stacks, grace_s=0.2).guard():\n    hang_in_native_code(ctypes.{library}(None))\n",
        str(stacks_path),
    )
    assert process.wait(timeout=30) == 1
    text = stacks_path.read_text()
    assert text.startswith("Timeout (0:00:01.4")
    assert "in hang_in_native_code" in text
    assert "in wait_in_another_thread" in text


@pytest.mark.parametrize("hang", ["hang_in_native_code(ctypes.PyDLL(None))", "wait_in_another_thread()"])
def test_a_hang_after_a_soft_cut_is_cut_hard(hang: str, stacks_path: Path) -> None:
    process = start(
        HANG
        + f"""
import harness.campaign.watchdog as module
module.IDLE_S = 0.1
with Watchdog(0.2, stacks, grace_s=0.2).guard():
    try:
        time.sleep(600)
    finally:
        print("cut softly", flush=True)
        {hang}
""",
        str(stacks_path),
    )
    assert process.communicate(timeout=30)[0] == "cut softly\n"
    assert process.returncode == 1
    assert f"in {hang.partition('(')[0]}" in stacks_path.read_text()


def test_without_a_path_a_hard_cut_is_told_on_standard_error() -> None:
    process = start(
        HANG + "with Watchdog(0.2, stacks, grace_s=0.2).guard():\n    hang_in_native_code(ctypes.PyDLL(None))\n", ""
    )
    assert "in hang_in_native_code" in process.communicate(timeout=30)[1]


@pytest.mark.parametrize("rest", [True, False], ids=["told to rest", "left idle"])
def test_a_process_that_runs_no_repetition_is_not_cut(rest: bool, stacks_path: Path) -> None:
    # Idle in Python when nobody told the watchdog to rest; else even in native code that no signal reaches.
    process = start(
        HANG
        + f"""
import faulthandler, harness.campaign.watchdog as module
module.IDLE_S = 0.2
watchdog = Watchdog(0.2, stacks, grace_s=0.2)
with watchdog.guard():
    pass
if {rest}:
    watchdog.rest()
    library = ctypes.PyDLL(None)
    end = time.monotonic() + 2
    while time.monotonic() < end:
        library.usleep(900_000)
else:
    time.sleep(2)
print("alive", flush=True)
""",
        str(stacks_path),
    )
    assert process.communicate(timeout=30)[0] == "alive\n"
    assert process.returncode == 0
    assert stacks_path.read_bytes() == b""


linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel call is Linux's own")

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
child.wait()
"""

CHILD = """
import time
from harness.processes import die_with_parent
die_with_parent()
print("ready", flush=True)
time.sleep(600)
"""


def is_gone(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


@linux_only
def test_a_child_dies_with_its_parent() -> None:
    parent = start(PARENT, CHILD)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        assert not is_gone(child)
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + 10
        while not is_gone(child):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        if not is_gone(child):
            os.kill(child, signal.SIGKILL)


@linux_only
def test_a_child_whose_parent_is_dead_already_dies_at_once() -> None:
    child = start("from harness.processes import die_with_parent\ndie_with_parent(1 << 30)\nprint('alive')\n")
    assert child.communicate(timeout=30)[0] == ""
    assert child.returncode == -signal.SIGKILL


def test_elsewhere_dying_with_the_parent_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    die_with_parent(1 << 30)
