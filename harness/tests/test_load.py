"""Load: its options, the bookkeeping on a device that is not there, and that of the host for real.

test_real_device.py has the loads of a device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch

from harness.errors import InfrastructureError, UsageError
from harness.perturb.load import (
    DIMENSIONS,
    Wanted,
    device_load,
    dimensions_of,
    history,
    loads,
    nvml,
    parse_loads,
    parse_memory_mib,
    require_device,
)
from harness.perturb.load.device_load import BACKLOG, DeviceLoad, Work, largest_that_fits
from harness.perturb.load.history import History
from harness.perturb.load.host import HostLoad, process_count
from harness.perturb.load.load import Load, LoadReport, Meter
from harness.perturb.load.loads import Loads
from harness.perturb.load.mixed import Rotation, phases
from harness.tests.suite_runner import SAFE, new_suite

REPOSITORY = Path(__file__).resolve().parents[2]
CUDA = torch.device("cuda", 0)


# Options.


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("compute", [Wanted("compute")]),
        (" compute , memory,", [Wanted("compute"), Wanted("memory")]),
        ("compute,alloc:0.5", [Wanted("compute"), Wanted("alloc", 0.5)]),
        ("host:1", [Wanted("host")]),
        ("mixed:.25", [Wanted("mixed", 0.25)]),
    ],
)
def test_dimensions_have_intensities(text: str, wanted: list[Wanted]) -> None:
    assert parse_loads(text) == wanted
    assert parse_loads(",".join(map(str, wanted))) == wanted, "as it is said in a replay line"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("coffee", "'coffee' is unknown"),
        ("compute,gpu:0.5", "'gpu' is unknown"),
        ("", "names nothing"),
        (",", "names nothing"),
        ("compute:0", "above 0 and up to 1"),
        ("compute:1.5", "above 0 and up to 1"),
        ("compute:", "above 0 and up to 1"),
        ("compute:nan", "above 0 and up to 1"),
        ("compute,compute", "compute is named twice"),
        ("mixed,compute", "name it alone"),
    ],
)
def test_what_is_no_load_is_refused(text: str, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        parse_loads(text)


def test_an_unknown_dimension_is_refused_naming_the_valid_ones() -> None:
    with pytest.raises(UsageError) as caught:
        parse_loads("coffee")
    assert all(name in str(caught.value) for name in [*DIMENSIONS, "mixed"])


@pytest.mark.parametrize(("text", "mib"), [("512MiB", 512.0), ("2GiB", 2048.0), ("0.5 GiB", 512.0), ("64", 64.0)])
def test_memory_has_units(text: str, mib: float) -> None:
    assert parse_memory_mib(text) == mib


@pytest.mark.parametrize("text", ["", "much", "2GB", "-1MiB", "0", "0.5MiB", "nan"])
def test_what_is_no_memory_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="write 512MiB or 2GiB"):
        parse_memory_mib(text)


@pytest.mark.parametrize("dimension", [name for name in DIMENSIONS if name != "host"])
def test_the_simulator_has_the_load_of_the_host_alone(dimension: str) -> None:
    with pytest.raises(UsageError, match=rf"--load {dimension} needs a real device: .* Use --load host"):
        require_device([Wanted("host"), Wanted(dimension)], "sim")
    require_device([Wanted("host")], "sim")
    require_device([Wanted("mixed")], "sim")
    assert dimensions_of([Wanted("mixed", 0.5)], "sim") == [Wanted("host", 0.5)]
    assert dimensions_of([Wanted("mixed")], "cuda") == [Wanted(name) for name in DIMENSIONS]


def test_other_devices_have_no_load_of_a_device_yet() -> None:
    with pytest.raises(UsageError, match="not on xpu"):
        Loads([Wanted("compute")], torch.device("xpu", 0))


def test_every_dimension_has_a_load_on_cuda() -> None:
    for name in DIMENSIONS:
        assert loads.make(Wanted(name), CUDA, 2.0**30, None).dimension == name


# The meter, and what it proves.


def test_a_meter_counts_the_time_in_which_it_runs_alone() -> None:
    meter = Meter()
    assert meter.rate() is None, "it has not run"
    meter.start()
    meter.add(1.0)
    time.sleep(0.1)
    meter.stop()
    rate = meter.rate()
    assert rate is not None and 2.0 < rate <= 10.0
    time.sleep(0.05)
    assert meter.rate() == rate, "time after the stop does not count"
    meter.forget()
    assert meter.rate() is None


def report(achieved: float | None, alone: float | None) -> LoadReport:
    return LoadReport("compute", 1.0, "FLOP/s", achieved, alone, least_share=0.5)


@pytest.mark.parametrize(
    ("achieved", "alone", "delivered"),
    [
        (50.0, 100.0, True),
        (120.0, 100.0, True),
        (49.0, 100.0, False),
        (None, 100.0, False),
        (50.0, None, False),
        (0.0, 0.0, False),
    ],
)
def test_a_load_is_delivered_from_a_share_on(achieved: float | None, alone: float | None, delivered: bool) -> None:
    assert report(achieved, alone).is_delivered is delivered


def test_a_report_survives_json() -> None:
    one = dataclasses.replace(report(1.0, None), worker="gw1", information="warm")
    assert LoadReport.from_json(json.loads(json.dumps(dataclasses.asdict(one)))) == one


@pytest.mark.parametrize(("memory", "count"), [(1e9, 64), (64.0 * 8, 64), (64.0 * 8 - 1, 32), (9.0, 1), (0.0, 1)])
def test_a_buffer_keeps_to_its_memory(memory: float, count: int) -> None:
    assert largest_that_fits(memory, 8, 64) == count


# A load on a device that is not there.


class FakeEvent:
    """An event whose work takes a millisecond from when it is waited for."""

    def synchronize(self) -> None:
        time.sleep(0.001)


class FakeWork(Work):
    """Batches of a million operations."""

    unit = "FLOP/s"
    made: ClassVar[list[FakeWork]]
    breaks_after: int | None = None

    def __init__(self, device: torch.device, memory_bytes: float) -> None:
        self.streams = [SimpleNamespace(stream_id=number) for number in (7, 8)]  # type: ignore[misc]
        self.backlog = BACKLOG * len(self.streams)
        self.amount = 1e6
        self.queued = 0
        self.made.append(self)

    def time_ms(self, pieces: int) -> float:
        return device_load.BATCH_MS

    def enqueue(self, pieces: int) -> Any:
        self.queued += 1
        if self.breaks_after is not None and self.queued > self.breaks_after:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore of it")
        return FakeEvent()


class FakeNative:
    def __init__(self) -> None:
        self.ignored: list[tuple[int, bool]] = []

    def ignore_this_thread(self, on: bool) -> None:
        self.ignored.append((threading.get_ident(), on))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeWork]:
    class Fake(FakeWork):
        made: ClassVar[list[FakeWork]] = []

    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(device_load, "_memory_of", lambda work: contextlib.nullcontext())
    monkeypatch.setattr(loads, "ALONE_S", 0.1)
    monkeypatch.setattr(nvml, "describe", lambda device: "cool")

    def make(wanted: Wanted, device: torch.device, memory_bytes: float, native: Any) -> Any:
        return DeviceLoad(wanted.dimension, Fake, device, intensity=wanted.intensity, native=native)

    monkeypatch.setattr(loads, "make", make)
    return Fake


def rates(running: Loads) -> list[float]:
    return [each.achieved or 0.0 for each in running.report()]


@pytest.mark.usefixtures("fake")
def test_it_runs_until_it_is_stopped_and_reports_what_it_achieved() -> None:
    native = FakeNative()
    running = Loads([Wanted("compute"), Wanted("memory")], CUDA, native)
    running.start()
    assert running.stream_ids == [7, 8, 7, 8]
    assert len(native.ignored) == 2
    assert all(on and thread != threading.get_ident() for thread, on in native.ignored), "its own threads"
    time.sleep(0.1)
    reports = running.report()
    started = time.perf_counter()
    running.stop()
    assert time.perf_counter() - started < 1.0
    assert [each.dimension for each in reports] == ["compute", "memory"]
    for each in reports:
        # A batch takes a millisecond and a bit.
        assert each.achieved is not None and 1e7 < each.achieved <= 1e9
        assert each.alone is not None and 1e7 < each.alone <= 1e9
        assert each.information == "cool"
    stopped = rates(running)
    time.sleep(0.05)
    assert rates(running) == stopped, "time after the stop does not count"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sidestream-load")]


def test_its_queue_is_bounded(fake: type[FakeWork]) -> None:
    waiting = threading.Event()

    def enqueue(self: FakeWork, pieces: int) -> Any:
        self.queued += 1
        return SimpleNamespace(synchronize=waiting.wait)

    fake.enqueue = enqueue  # type: ignore[method-assign]
    load = DeviceLoad("compute", fake, CUDA)
    load.start()
    load.resume()
    time.sleep(0.1)
    assert fake.made[0].queued == BACKLOG * 2 + 1
    waiting.set()
    load.stop()


def test_it_is_busy_for_its_share_of_the_time(fake: type[FakeWork]) -> None:
    # Side by side, so that a busy machine slows both of them down.
    both = [DeviceLoad("compute", fake, CUDA, intensity=intensity) for intensity in (1.0, 0.2)]
    for load in both:
        load.start()
        load.resume()
    time.sleep(0.3)
    achieved = [load.rate() or 0.0 for load in both]
    for load in both:
        load.stop()
    assert 0.05 < achieved[1] / achieved[0] < 0.5


def test_it_rests_between_pause_and_resume(fake: type[FakeWork]) -> None:
    with Loads([Wanted("compute")], CUDA) as running:
        time.sleep(0.1)
        running.pause()
        queued, rate = fake.made[0].queued, rates(running)
        time.sleep(0.1)
        assert fake.made[0].queued == queued
        assert rates(running) == rate, "and the time is not counted"
        running.resume()
        assert fake.made[0].queued > queued


def test_the_course_of_a_run_is_cut_into_few_stretches_that_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_SHORTEST_S", 0.01)
    monkeypatch.setattr(history, "MOST_STRETCHES", 8)
    begun = time.monotonic()
    amounts: list[float] = []

    def amount() -> float:
        # Nothing any more from 0.1 s on.
        amounts.append(min(time.monotonic() - begun, 0.1))
        return amounts[-1]

    course = History([cast("Load", SimpleNamespace(amount=amount))])
    course.start()
    time.sleep(0.4)
    course.stop()
    seen = course.rates(0)
    begins, lengths, rates_seen = zip(*seen, strict=True)
    assert 4 <= len(seen) <= 8 and set(lengths) == {lengths[0]} and lengths[0] >= 0.04
    assert [round(after - before, 6) for before, after in itertools.pairwise(begins)] == [
        pytest.approx(lengths[0], abs=1e-5)
    ] * (len(seen) - 1)
    assert sum(lengths[0] * each for each in rates_seen) == pytest.approx(max(amounts) - amounts[0])
    assert rates_seen[0] > 0.5 and rates_seen[-1] == 0.0
    time.sleep(0.05)
    assert course.rates(0) == seen


def test_the_course_of_a_load_shows_when_it_rested(fake: type[FakeWork], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_SHORTEST_S", 0.05)
    with Loads([Wanted("compute")], CUDA) as running:
        time.sleep(0.2)
        running.pause()
        time.sleep(0.2)
        (report,) = running.report()
    achieved = [each for _, _, each in report.history]
    assert len(achieved) >= 5
    assert min(achieved[:2]) > 1e6 and achieved[-1] == 0.0
    read = LoadReport.from_json(json.loads(json.dumps(asdict(report))))
    assert [tuple(each) for each in read.history] == report.history


def test_a_pause_waits_for_the_queue_even_if_the_load_began_to_rest_late(
    fake: type[FakeWork], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = DeviceLoad("compute", fake, CUDA)
    begin_to_rest = load._resting.set

    def late() -> None:
        time.sleep(0.05)
        begin_to_rest()

    monkeypatch.setattr(load._resting, "set", late)
    load.start()
    load.resume()
    assert not load._resting.is_set(), "a pause would return at once"
    load.pause()
    queued = fake.made[0].queued
    time.sleep(0.05)
    assert fake.made[0].queued == queued
    load.stop()


@pytest.mark.usefixtures("fake")
def test_it_can_be_started_again_and_is_a_context_manager() -> None:
    running = Loads([Wanted("compute")], CUDA)
    for _ in range(2):
        with running:
            running.start()  # it runs already
            assert [thread.name for thread in threading.enumerate()].count("sidestream-load-compute") == 1
        assert "sidestream-load-compute" not in [thread.name for thread in threading.enumerate()]
    running.stop()  # it has stopped already


def test_a_load_that_cannot_start_says_why(fake: type[FakeWork]) -> None:
    def refuse(self: Any, pieces: int) -> float:
        raise RuntimeError("CUDA out of memory\nmore of it")

    fake.time_ms = refuse  # type: ignore[method-assign]
    running = Loads([Wanted("compute")], CUDA)
    with pytest.raises(InfrastructureError, match=r"The load compute cannot run: RuntimeError: CUDA out of memory$"):
        running.start()


def test_a_load_that_breaks_off_says_so_when_it_is_stopped(fake: type[FakeWork]) -> None:
    fake.breaks_after = 300
    running = Loads([Wanted("compute")], CUDA)
    running.start()
    time.sleep(0.8)
    with pytest.raises(InfrastructureError, match="broke off: RuntimeError: CUDA error"):
        running.stop()


# In turn.


def test_the_turns_of_mixed_are_decided_by_a_seed() -> None:
    one, same, other = (list(itertools.islice(phases(3, seed), 200)) for seed in (1, 1, 2))
    assert one == same != other
    positions = [position for position, _ in one if position is not None]
    assert all(set(positions[start : start + 3]) == {0, 1, 2} for start in range(0, len(positions) - 3, 3))
    assert 20 < sum(position is None for position, _ in one) < 80
    assert all(0.05 <= seconds <= 0.4 for _, seconds in one)


class Noting:
    """A load that takes note of when it runs."""

    def __init__(self, name: str, running: set[str]) -> None:
        self.name = name
        self.running = running

    def resume(self) -> None:
        self.running.add(self.name)

    def pause(self) -> None:
        self.running.discard(self.name)


def test_in_turn_one_load_runs_at_a_time_and_none_while_paused() -> None:
    running: set[str] = set()
    rotation = Rotation([Noting(name, running) for name in "abc"], seed=3)  # type: ignore[misc]
    assert running == set(), "it starts paused"
    rotation.resume()
    seen: set[tuple[str, ...]] = set()
    until = time.monotonic() + 20.0
    while seen != {(), ("a",), ("b",), ("c",)} and time.monotonic() < until:
        seen.add(tuple(running))
        time.sleep(0.005)
    rotation.pause()
    assert running == set()
    time.sleep(0.5)
    assert running == set()
    rotation.stop()
    assert seen == {(), ("a",), ("b",), ("c",)}


@pytest.mark.usefixtures("fake")
def test_mixed_measures_each_load_while_it_is_its_turn() -> None:
    with Loads([Wanted("mixed")], CUDA) as running:
        deadline = time.monotonic() + 30.0
        while any(each.achieved is None for each in running.report()) and time.monotonic() < deadline:
            time.sleep(0.05)
        running.pause()
        reports = running.report()
    assert [each.dimension for each in reports] == list(DIMENSIONS)
    assert all(each.is_delivered for each in reports)


# The host.


def children() -> list[int]:
    listed = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True, check=True
    )
    return [int(line.split()[0]) for line in listed.stdout.splitlines() if "load.spin" in line]


def test_the_load_of_the_host_keeps_the_cores_busy_and_ends() -> None:
    load = HostLoad()
    load.start()
    try:
        assert len(children()) == process_count()
        time.sleep(0.2)
        assert load.rate() is None, "it rests until it is resumed"
        load.resume()
        load.forget()
        time.sleep(0.6)
        busy = load.rate()
        load.pause()
        load.forget()
        assert busy is not None and busy > 0.2
        assert "sidestream-load-host" in [thread.name for thread in threading.enumerate()]
    finally:
        started = time.perf_counter()
        load.stop()
    assert time.perf_counter() - started < 1.0
    assert children() == []
    assert "sidestream-load-host" not in [thread.name for thread in threading.enumerate()]


def test_the_workers_of_a_run_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.delenv("PYTEST_XDIST_WORKER_COUNT", raising=False)
    assert process_count() == 8
    for workers, each in ((2, 4), (8, 1), (16, 1)):
        monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", str(workers))
        assert process_count() == each


PARENT = """
import sys, time
from harness.perturb.load.host import HostLoad
load = HostLoad()
load.start()
if sys.argv[1] == "busy":
    load.resume()
print(*(process.pid for process in load._processes), flush=True)
time.sleep(600)
"""


def is_gone(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="not covered: needs Linux")
@pytest.mark.parametrize("state", ["busy", "resting"])
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_its_processes_die_with_their_parent(state: str, signal_number: signal.Signals) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, state],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    processes = [int(word) for word in parent.stdout.readline().split()]
    assert len(processes) == process_count() and not any(map(is_gone, processes))
    parent.send_signal(signal_number)
    parent.wait()
    deadline = time.monotonic() + 1.0
    while not all(map(is_gone, processes)) and time.monotonic() < deadline:
        time.sleep(0.01)
    parent.stdout.close()
    assert all(map(is_gone, processes))


# A whole run.


def test_a_run_under_load_says_what_the_load_achieved(tmp_path: Path) -> None:
    suite = new_suite(tmp_path, SAFE)
    results = tmp_path / "results"
    ran = suite.run("--load", "host:0.5", "--count", "300", "--results", str(results))
    assert ran.code == 0, ran.output
    assert "load: host:0.5" in ran.output
    assert "Load host:0.5: " in ran.output and " cores beside the cases, " in ran.output
    (stored,) = json.loads((results / "main.load.json").read_text())
    one = LoadReport.from_json(stored)
    assert (one.dimension, one.intensity, one.worker) == ("host", 0.5, "main")
    assert one.is_delivered
    header = json.loads((results / "main.jsonl").read_text().splitlines()[0])["header"]
    assert header["loads"] == ["host:0.5"]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_load_that_was_not_delivered_makes_the_run_inconclusive(tmp_path: Path, workers: int) -> None:
    suite = new_suite(tmp_path, SAFE)
    # Once it has been measured alone it stops, and the time goes on.
    (tmp_path / "conftest.py").write_text(
        """
pytest_plugins = ["harness.plugin"]
from harness.perturb.load.loads import Loads
start = Loads.start
def starve(self):
    start(self)
    self.pause()
    self._loads[0].forget()
    self._loads[0]._meter.start()
Loads.start = starve
"""
    )
    ran = suite.run("--load", "host", "--count", "100", *(["-n", str(workers)] if workers else []))
    assert ran.code == 6, ran.output
    assert "The load host was not delivered, which takes 25% of what it achieves alone" in ran.output


# What the GPU says of itself.


def test_without_nvml_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.describe(CUDA) == ""


def test_with_nvml_clock_power_and_temperature_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(
        NVMLError=RuntimeError,
        NVML_CLOCK_SM=1,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetClockInfo=lambda handle, kind: 1980,
        nvmlDeviceGetPowerUsage=lambda handle: 640_400,
        nvmlDeviceGetTemperature=lambda handle, kind: 61,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1234"))
    assert nvml.describe(CUDA) == "1,980 MHz, 640 W, 61 °C"

    # The idle GPU and the user's own clocks slow nothing down.
    fake.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 0x1 | 0x2
    assert nvml.describe(CUDA) == "1,980 MHz, 640 W, 61 °C"
    fake.nvmlDeviceGetCurrentClocksEventReasons = lambda handle: 0x4 | 0x40
    slowed = nvml.describe(CUDA)
    assert slowed == "1,980 MHz, 640 W, 61 °C, slowed by the power limit and its temperature (hardware)"

    def fail(handle: object) -> None:
        raise RuntimeError("not supported")

    fake.nvmlDeviceGetPowerUsage = fail
    assert nvml.describe(CUDA) == ""
