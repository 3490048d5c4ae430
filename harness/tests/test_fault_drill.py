"""Whatever happens to a run, no finished repetition is lost, the verdict is right, and nothing is left behind.

Workers and controllers are killed at random times, cases hang, crash and run out of memory, disks are full, files are
damaged. ``SIDESTREAM_DRILL_KILLS=200`` asks for the whole drill, with so many random kills; without it, what is drilled
is a sample that a machine for CI has the time for.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.campaign.numbers import Numbers
from harness.campaign.reader import find_runs, read_run
from harness.campaign.resume import Earlier
from harness.campaign.store import RepetitionRecord
from harness.tests.suite_runner import CONTROL, RACY, SAFE, WHOLE_DRILL, Ran, Suite, new_suite

KILLS = int(os.environ.get("SIDESTREAM_DRILL_KILLS", "3"))
KILLS_A_RUN = 5
"""After so many kills a run is left to complete, and compared with one that nothing happened to."""
COUNT = 600
PATIENCE_S = 20.0

SUITE = SAFE + SAFE.replace("test_ordered", "test_after") + CONTROL

# What has been settled is finished: from here on no kill may lose it.
WITNESS = """
import contextlib
import os

import harness.campaign.case

pytest_plugins = ["harness.plugin"]
settle = harness.campaign.case.Case._settle
witness = os.open("witness", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def _settle(self, repetition, *arguments):
    settle(self, repetition, *arguments)
    with contextlib.suppress(OSError):  # a disk that is full is full for everyone
        os.write(witness, f"{self.nodeid} {repetition.number}\\n".encode())


harness.campaign.case.Case._settle = _settle
"""

WORKERS = ["0", "2"]
Key = tuple[str, int]


@dataclass
class Drill:
    """A suite whose processes can be found, and that holds a lock which they inherit."""

    suite: Suite
    source: str

    @property
    def folder(self) -> Path:
        return self.suite.folder

    @property
    def run_folder(self) -> Path:
        return self.folder / "run"

    def start(self, *arguments: str, command: list[str] | None = None, **settings: Any) -> subprocess.Popen[str]:
        """Start a session in the background, as ci/stress.sh does: with the lock on an open file that it inherits."""
        begun = any(self.run_folder.glob("*.jsonl"))
        results = f"--resume={self.run_folder}" if begun else f"--results={self.run_folder}"
        with (self.folder / "lock").open("a") as lock, (self.folder / "output").open("w") as output:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            process: subprocess.Popen[str] = subprocess.Popen(
                command or self.suite.command("--device", "sim", results, *arguments),
                cwd=self.folder,
                env=self.suite.environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                pass_fds=[lock.fileno()],
                start_new_session=True,
                **settings,
            )
            return process

    def run(self, *arguments: str, **settings: Any) -> Ran:
        """Run a session to its end, and check that it leaves nothing behind."""
        process = self.start(*arguments, **settings)
        try:
            code = process.wait(timeout=240)
        finally:
            process.kill()
        self.require_nothing_left()
        return Ran(code, self.output(), self.folder)

    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def require_nothing_left(self) -> None:
        """No process outlives the one that was started, and no lock is held."""
        deadline = time.monotonic() + PATIENCE_S
        while self.suite.processes():
            assert time.monotonic() < deadline, f"left behind: {self.suite.processes()}"
            time.sleep(0.02)
        with (self.folder / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        cache = Path(os.environ["SIDESTREAM_CACHE"]) / "lock" if "SIDESTREAM_CACHE" in os.environ else None
        if cache is not None and cache.exists():
            with cache.open("a") as lock:
                while True:  # another test may be building meanwhile
                    with contextlib.suppress(BlockingIOError):
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    assert time.monotonic() < deadline, "the lock of the extensions is held"
                    time.sleep(0.1)

    def whole(self, count: int) -> set[Key]:
        """The repetitions of a run that is complete."""
        names = re.findall(r"def (test_\w+)", self.source)
        return {(f"test_written.py::{name}", number) for name in names for number in range(count)}

    def records(self) -> list[RepetitionRecord]:
        return list(read_run(self.run_folder)) if self.run_folder.exists() else []

    def kept(self) -> Counter[Key]:
        return Counter((record.nodeid, record.repetition) for record in self.records())

    def witnessed(self) -> set[Key]:
        """The repetitions that were finished, whatever became of their process afterwards."""
        path = self.folder / "witness"
        lines = path.read_text().splitlines() if path.exists() else []
        return {(nodeid, int(number)) for nodeid, _, number in (line.rpartition(" ") for line in lines)}

    def require_nothing_lost(self) -> None:
        kept = self.kept()
        assert self.witnessed() <= kept.keys(), "a finished repetition is not in the files"
        assert not [key for key, times in kept.items() if times > 1], "a repetition ran twice"


def new_drill(folder: Path, source: str = SUITE) -> Drill:
    folder.mkdir(exist_ok=True)
    drill = Drill(new_suite(folder, source), source)
    (folder / "conftest.py").write_text(WITNESS)
    return drill


@pytest.fixture
def drill(tmp_path: Path) -> Iterator[Drill]:
    made = new_drill(tmp_path / "drill")
    yield made
    for left in made.suite.processes():  # of a test that failed
        with contextlib.suppress(ProcessLookupError):
            os.kill(left, signal.SIGKILL)


def outcomes(records: list[RepetitionRecord]) -> dict[Key, tuple[object, ...]]:
    """All that a repetition's record says but for who ran it when, and how long it took."""
    return {
        (each.nodeid, each.repetition): (each.plan, each.verdict, each.raced_by, each.holds, each.aimed, each.message)
        for each in records
    }


# Random kills.


def kill_one(drill: Drill, session: subprocess.Popen[str], kind: str, draw: random.Random) -> str | None:
    """Kill the controller, or any other process as soon as there is one; None if the session ends before that."""
    victims = [session.pid]
    while kind == "worker" and session.poll() is None:
        victims = [each for each in drill.suite.processes() if each != session.pid]
        if victims:
            break
        time.sleep(0.01)
    if session.poll() is not None:
        return None
    try:
        os.kill(draw.choice(victims), signal.SIGKILL)
    except ProcessLookupError:
        return None
    return kind


def drill_a_run(drill: Drill, kills: int, draw: random.Random, length_s: float, code: int) -> Counter[str]:
    """Kill processes of one run until there were so many kills, or nothing is left to interrupt."""
    killed: Counter[str] = Counter()
    while sum(killed.values()) < kills and drill.kept().keys() != drill.whole(COUNT):
        session = drill.start("--count", str(COUNT), "-n", "2")
        time.sleep(draw.uniform(0.0, length_s))
        kind = "worker" if killed["worker"] <= killed["controller"] else "controller"
        victim = kill_one(drill, session, kind, draw)
        ended = session.wait(timeout=PATIENCE_S if victim == "controller" else 240)
        drill.require_nothing_left()
        drill.require_nothing_lost()
        if victim == "controller":
            assert ended == -signal.SIGKILL
        else:
            # A worker that was killed in a repetition is infrastructure; a race outranks that.
            assert ended in ({code, 3} if victim else {code}), f"{ended} after {victim}\n{drill.output()}"
            assert ended or drill.kept().keys() == drill.whole(COUNT), "green, and repetitions are missing"
        if victim is not None:
            killed[victim] += 1
    return killed


SUITES = {"racy": (SUITE + RACY.replace("test_unordered", "test_racy"), 1), "safe": (SUITE, 0)}


@pytest.mark.timeout(120 + 60 * KILLS)
@pytest.mark.parametrize(
    ("source", "code"), list(SUITES.values())[: 2 if WHOLE_DRILL else 1], ids=list(SUITES)[: 2 if WHOLE_DRILL else 1]
)
def test_random_kills_lose_nothing_and_change_no_verdict(source: str, code: int, tmp_path: Path) -> None:
    draw = random.Random(f"kills/{code}")
    kills = KILLS // 2 if WHOLE_DRILL else KILLS
    reference = new_drill(tmp_path / "reference", source)
    started = time.monotonic()
    assert reference.run("--count", str(COUNT)).code == code
    length_s = 1.5 * (time.monotonic() - started)  # with workers it takes longer to start
    expected = outcomes(reference.records())
    assert expected.keys() == reference.whole(COUNT)
    killed: Counter[str] = Counter()
    runs = 0
    while sum(killed.values()) < kills:
        drill = new_drill(tmp_path / f"run{runs}", source)
        runs += 1
        killed += drill_a_run(drill, min(KILLS_A_RUN, kills - sum(killed.values())), draw, length_s, code)
        last = drill.run("--count", str(COUNT))
        assert last.code == code, last.output
        drill.require_nothing_lost()
        assert outcomes(drill.records()) == expected
        assert f"{len(expected):,} repetitions in" in last.output, last.output
    print(f"killed {dict(killed)} in {runs} runs")


# What a case can do to its worker, each in the ninth run of its body or so, and once in the whole drill.

IMPORTS = (
    "import ctypes, os, pathlib, signal, threading\nimport torch\nfrom collections import Counter\nruns = Counter()\n"
)


def faulty(name: str, *lines: str) -> str:
    """A case that runs these lines once."""
    return (
        SAFE.replace("test_ordered", f"test_{name}")
        + f"        runs['{name}'] += 1\n"
        + f"        if runs['{name}'] == 9 and not pathlib.Path('{name}').exists():\n"
        + f"            pathlib.Path('{name}').touch()\n"
        + "".join(f"            {line}\n" for line in lines)
    )


def failures(output: str) -> dict[str, str]:
    """What the run said about each test that failed."""
    parts = re.split(r"^_+ (test_\w+) _+$", output, flags=re.MULTILINE)
    return {name.removeprefix("test_"): text for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def mutex(library: str) -> list[str]:
    lock = f"ctypes.{library}(None).pthread_mutex_lock(mutex)"
    return ["mutex = ctypes.create_string_buffer(64)", lock, lock]


DEADLOCKS = {
    "with_the_gil": mutex("PyDLL"),
    "in_the_engine": [
        "stuck, product = lab.product(2.0, 3.0)",
        "stuck.register_hook(lambda gradient: threading.Event().wait())",
        "product.sum().backward()",
    ],
    "without_the_gil": mutex("CDLL"),
}
CRASHES = {
    "segmentation_fault": "ctypes.string_at(0)",
    "exit": "os._exit(0)",
    "abort": "os.abort()",
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
}
DEMANDS = {
    "device": "torch.empty(1 << 46, device=lab.device)",
    "host": "torch.empty(1 << 46)",
    "pinned": "torch.empty(1 << 46, pin_memory=True)",
    "python": "bytearray(1 << 62)",
}
BROKEN = "raise RuntimeError('device-side assert triggered')"
# On the simulator no error breaks the device; test_real_device.py has one that does.
BREAKS = """
from harness.campaign.session import Session

Session.is_broken_by = lambda self, error: "device-side assert" in str(error)
"""


def test_deadlocks_are_timeouts_of_their_repetitions_and_the_rest_goes_on(tmp_path: Path) -> None:
    deadlocks = dict(list(DEADLOCKS.items())[: 3 if WHOLE_DRILL else 2])
    cases = [faulty(name, *lines) for name, lines in deadlocks.items()]
    drill = new_drill(tmp_path / "drill", "".join([IMPORTS, *cases, SAFE]))
    ran = drill.run("--count", "40", "--repetition-timeout", "3", "-n", "2")
    assert ran.code == 1, ran.output
    assert f"{len(cases)} failed, 1 passed" in ran.output
    said = failures(ran.output)
    assert said.keys() == deadlocks.keys()
    for name, text in said.items():
        assert re.search(r"timeout: worker gw\d hung for 3 s in repetition \d+ under ", text), text
        assert f"in test_{name}" in text, "the stacks name the line that hung"
    drill.require_nothing_lost()
    assert {key for key in drill.kept() if "ordered" in key[0]} == {
        ("test_written.py::test_ordered", n) for n in range(40)
    }
    again = drill.run("--count", "40")
    assert again.code == 0, again.output
    assert drill.kept().keys() == drill.whole(40)


def test_crashes_are_infrastructure_of_their_repetitions_and_another_worker_goes_on(tmp_path: Path) -> None:
    crashes = dict(list(CRASHES.items())[: 4 if WHOLE_DRILL else 2])
    cases = [faulty(name, line) for name, line in [*crashes.items(), *DEMANDS.items(), ("broken", BROKEN)]]
    hopeless = (
        "import pytest\n\n@pytest.mark.repeat(1)"
        + SAFE.replace("test_ordered", "test_hopeless")
        + f"        {DEMANDS['device']}\n"
    )
    drill = new_drill(tmp_path / "drill", "".join([IMPORTS, *cases, hopeless, SAFE]))
    with (drill.folder / "conftest.py").open("a") as conftest:
        conftest.write(BREAKS)
    ran = drill.run("--count", "40", "-n", "2")
    assert ran.code == 3, ran.output
    assert f"{len(cases) + 1} failed, 1 passed" in ran.output
    said = failures(ran.output)
    assert said.keys() == {*crashes, *DEMANDS, "broken", "hopeless"}
    kept, verdicts = drill.kept(), Counter(record.verdict for record in drill.records())
    for name in crashes:
        lost = re.search(r"infra: worker gw\d died in repetition (\d+) under ", said[name])
        assert lost is not None, said[name]
        assert (f"test_written.py::test_{name}", int(lost[1])) not in kept
    for name in DEMANDS:
        assert re.search(r"infra: memory ran out in repetition \d+ under ", said[name]), said[name]
        assert re.search(
            r"sim:0: \d+ MiB allocated, \d+ MiB reserved by PyTorch, [\d,]+ MiB of [\d,]+ MiB free", said[name]
        )
    assert re.search(
        r"the device is unusable after test_written.py::test_broken, repetition \d+ under ", said["broken"]
    )
    assert verdicts.keys() == {"pass", "infra"} and verdicts["infra"] == len(DEMANDS) + len(["hopeless", "broken"])
    assert "infra: memory ran out in repetition 0 under baseline" in said["hopeless"]
    drill.require_nothing_lost()
    again = drill.run("--count", "40", "-k", "not hopeless")
    assert again.code == 0, again.output
    passed = Counter((each.nodeid, each.repetition) for each in drill.records() if each.verdict == "pass")
    assert passed == Counter(key for key in drill.whole(40) if "hopeless" not in key[0])


def test_a_worker_that_gives_its_broken_device_up_fails_one_case_once(tmp_path: Path) -> None:
    drill = new_drill(tmp_path / "drill", IMPORTS + faulty("broken", BROKEN) + SAFE)
    with (drill.folder / "conftest.py").open("a") as conftest:
        conftest.write(BREAKS)
    ran = drill.run("--count", "40", "-n", "1")
    assert ran.code == 3, ran.output
    assert "1 failed, 1 passed" in ran.output
    assert failures(ran.output).keys() == {"broken"}


@pytest.mark.parametrize("crash", ["segmentation_fault", "abort", "kill"][: 3 if WHOLE_DRILL else 1])
def test_a_crash_in_one_process_loses_nothing_that_had_ended(crash: str, tmp_path: Path) -> None:
    drill = new_drill(tmp_path / "drill", IMPORTS + faulty(crash, CRASHES[crash]) + SAFE)
    assert drill.run("--count", "40").code < 0
    drill.require_nothing_lost()
    assert drill.kept()
    again = drill.run("--count", "40")
    assert again.code == 0, again.output
    assert drill.kept().keys() == drill.whole(40)


# Disks.


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of that size, where this process may mount one."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("not covered: this process may not mount a file system; the limit of a file's size is tested")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("workers", WORKERS if WHOLE_DRILL else WORKERS[:1])
def test_a_full_disk_loses_lines_and_no_verdict(workers: str, tmp_path: Path) -> None:
    drill = new_drill(tmp_path / "drill", SUITES["racy"][0])
    with small_disk(drill.run_folder, "48k"):
        ran = drill.run("--count", "600", "-n", workers)
        assert ran.code == 1, ran.output
        assert "2,400 repetitions in" in ran.output, ran.output
        assert "1 failed, 3 passed" in ran.output
        assert re.search(
            "could not be written to .*No space left on device.*: the counts of this run are complete", ran.output
        )
        assert 0 < len(drill.kept()) < 2400
        subprocess.run(["mount", "-o", "remount,size=16m", drill.run_folder], check=True)
        again = drill.run("--count", "600", "-n", workers)
        assert again.code == 1, again.output
        assert "2,400 repetitions in" in again.output
        drill.require_nothing_lost()
        assert drill.kept().keys() == drill.whole(600)


@pytest.mark.parametrize("workers", WORKERS if WHOLE_DRILL else WORKERS[:1])
def test_a_file_that_may_not_grow_loses_lines_and_no_verdict(workers: str, tmp_path: Path) -> None:
    drill = new_drill(tmp_path / "drill")
    limited = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))}
    ran = drill.run("--count", "300", "-n", workers, **limited)
    assert ran.code == 0, ran.output
    assert "900 repetitions in" in ran.output
    assert "could not be written to" in ran.output and "File too large" in ran.output
    assert 0 < len(drill.kept()) < 900
    assert drill.run("--count", "300", "-n", workers).code == 0
    assert drill.kept().keys() == drill.whole(300)


# Damage.


def spoil_a_byte(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] = 0xFF
    path.write_bytes(data)


def cut_the_end(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(path.stat().st_size))


def zero_a_block(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    start = draw.randrange(len(data))
    data[start : start + 512] = bytes(len(data[start : start + 512]))
    path.write_bytes(data)


def append_foreign_lines(path: Path, draw: random.Random) -> None:
    with path.open("ab") as file:
        file.write(b"\xff\x00 not ours\n" + b'{"k": 7, "r": []}\n' + b'{"header": null}\n' + b"[" * 5000 + b"\n")


def put_foreign_files_beside(path: Path, draw: random.Random) -> None:
    (path.parent / "gw7.jsonl").mkdir(exist_ok=True)
    (path.parent / "gw8.jsonl").write_bytes(os.urandom(4096))
    with contextlib.suppress(FileExistsError):
        (path.parent / "gw9.jsonl").symlink_to("nowhere")
    path.with_suffix(".now").write_bytes(os.urandom(64))


def remove(path: Path, draw: random.Random) -> None:
    path.unlink()


DAMAGES = [spoil_a_byte, cut_the_end, zero_a_block, append_foreign_lines, put_foreign_files_beside, remove]


def test_a_run_whose_files_were_damaged_is_completed_by_the_next_session(tmp_path: Path) -> None:
    drill = new_drill(tmp_path / "drill")
    assert drill.run("--count", "60", "-n", "2").code == 0
    expected = outcomes(drill.records())
    sound = tmp_path / "sound"
    shutil.copytree(drill.run_folder, sound)
    for number, damage in enumerate(4 * DAMAGES):
        draw = random.Random(number)
        shutil.rmtree(drill.run_folder)
        shutil.copytree(sound, drill.run_folder)
        for path in sorted(drill.run_folder.glob("gw*.jsonl")):
            damage(path, draw)
        # What a session that resumes it would run again is what cannot be read any more, and nothing else.
        earlier = Earlier.read(drill.run_folder, "another")
        kept = drill.kept()
        assert {key for key in expected if earlier.has(*key)} == kept.keys() <= expected.keys()
        assert sum(case.repetitions for case in Numbers.of(find_runs([drill.run_folder])).cases.values()) == len(kept)
    shutil.rmtree(drill.run_folder)
    shutil.copytree(sound, drill.run_folder)
    for number, damage in enumerate(DAMAGES[:-1]):
        damage(drill.run_folder / f"gw{number % 2}.jsonl", random.Random(number))
    again = drill.run("--count", "60")
    assert again.code == 0, again.output
    assert "180 repetitions in" in again.output, again.output
    assert outcomes(drill.records()) == expected


# Interruptions.


INTERRUPTIONS = [
    ("SIGTERM", "all", "2"),
    ("SIGINT", "the controller", "0"),
    ("SIGTERM", "the controller", "0"),
    ("SIGINT", "the controller", "2"),
    ("SIGINT", "all", "2"),
    ("SIGTERM", "the controller", "2"),
]


@pytest.mark.parametrize(("signal_name", "to", "workers"), INTERRUPTIONS[: 6 if WHOLE_DRILL else 2])
def test_an_interrupted_run_ends_with_a_summary(drill: Drill, signal_name: str, to: str, workers: str) -> None:
    session = drill.start("--count", "1000000", "-n", workers)
    interrupt(drill, session, signal.Signals[signal_name], to)
    assert session.wait(timeout=60) == 2, drill.output()
    drill.require_nothing_left()
    counted = re.search(r"([\d,]+) repetitions in", drill.output())
    assert counted is not None, drill.output()
    assert int(counted[1].replace(",", "")) >= 100
    drill.require_nothing_lost()


def interrupt(drill: Drill, session: subprocess.Popen[str], number: int, to: str) -> None:
    deadline = time.monotonic() + 60
    while len(drill.witnessed()) < 200:
        assert time.monotonic() < deadline and session.poll() is None, drill.output()
        time.sleep(0.05)
    if to == "all":
        os.killpg(session.pid, number)
    else:
        os.kill(session.pid, number)


# A worker that nothing but the kernel can end: it holds the GIL in native code.
STUCK = IMPORTS + SAFE + "        pathlib.Path('stuck').touch()\n        ctypes.PyDLL(None).sleep(3600)\n"


@pytest.mark.parametrize("command", ["pytest", "harness twins"])
def test_what_a_killed_command_has_started_ends_with_it(command: str, drill: Drill) -> None:
    drill.suite.write(STUCK)
    session = drill.start(command=[sys.executable, "-m", *command.split(), "--device", "sim", "-n", "1"])
    deadline = time.monotonic() + 60
    while not (drill.folder / "stuck").exists():
        assert time.monotonic() < deadline and session.poll() is None, drill.output()
        time.sleep(0.05)
    session.kill()
    assert session.wait(timeout=PATIENCE_S) == -signal.SIGKILL
    drill.require_nothing_left()
