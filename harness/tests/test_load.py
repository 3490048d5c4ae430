"""Load: its options, and its bookkeeping on a device that is not there (test_real_device.py has the real thing)."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from harness.errors import InfrastructureError, UsageError
from harness.perturb.load import DIMENSIONS, parse_loads
from harness.perturb.load import compute as compute_module
from harness.perturb.load.compute import ComputeLoad


@pytest.mark.parametrize("text", ["compute", " compute ", "compute,compute", "compute,"])
def test_dimensions_are_named_once_each(text: str) -> None:
    assert parse_loads(text) == ["compute"]


@pytest.mark.parametrize(
    ("text", "what"), [("memory", "'memory' is unknown"), ("compute,gpu", "'gpu' is unknown"), ("", "names nothing")]
)
def test_an_unknown_dimension_is_refused_naming_the_valid_ones(text: str, what: str) -> None:
    with pytest.raises(UsageError, match=what) as caught:
        parse_loads(text)
    assert all(name in str(caught.value) for name in DIMENSIONS)


def test_the_simulator_has_no_load() -> None:
    with pytest.raises(UsageError, match="needs a real device: simulated time has nothing to compete for"):
        # No device type of that name needs to exist for this.
        ComputeLoad(_device("sim"))


def test_other_devices_have_no_load_yet() -> None:
    with pytest.raises(UsageError, match="not on xpu"):
        ComputeLoad(torch.device("xpu", 0))


class _Device:
    def __init__(self, type_: str) -> None:
        self.type = type_


def _device(type_: str) -> Any:
    return _Device(type_)


class FakeEvent:
    """An event whose work takes a millisecond from when it is waited for."""

    def synchronize(self) -> None:
        time.sleep(0.001)


class FakeWork:
    """Batches of a million operations, on a device that is not there."""

    def __init__(self, device: torch.device, breaks_after: int | None = None) -> None:
        self.streams = [type("Stream", (), {"stream_id": number})() for number in (7, 8)]
        self.batch_flop = 1e6
        self.queued = 0
        self.breaks_after = breaks_after

    def enqueue_batch(self) -> FakeEvent:
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
def fake(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    import contextlib

    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(compute_module, "ALONE_S", 0.05)
    monkeypatch.setattr(compute_module, "_Multiplications", FakeWork)
    return monkeypatch


@pytest.mark.usefixtures("fake")
def test_it_runs_until_it_is_stopped_and_reports_what_it_achieved() -> None:
    native = FakeNative()
    load = ComputeLoad(torch.device("cuda", 0), native)
    assert load.report() == {"achieved_flops": 0.0, "alone_flops": 0.0}
    load.start()
    assert load.stream_ids == [7, 8]
    ((thread, on),) = native.ignored
    assert on and thread != threading.get_ident(), "its own thread is the one to ignore"
    time.sleep(0.1)
    running = load.report()
    started = time.perf_counter()
    load.stop()
    assert time.perf_counter() - started < 1.0
    # A batch takes a millisecond and a bit.
    for flops in (running["achieved_flops"], running["alone_flops"], load.report()["achieved_flops"]):
        assert 1e7 < flops <= 1e9
    stopped = load.report()
    time.sleep(0.05)
    assert load.report() == stopped, "time after the stop does not count"


@pytest.mark.usefixtures("fake")
def test_its_queue_is_bounded(fake: pytest.MonkeyPatch) -> None:
    waiting = threading.Event()
    works = []

    class NeverDone(FakeWork):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)
            works.append(self)

        def enqueue_batch(self) -> Any:
            super().enqueue_batch()
            return type("Event", (), {"synchronize": lambda self: waiting.wait()})()

    fake.setattr(compute_module, "_Multiplications", NeverDone)
    load = ComputeLoad(torch.device("cuda", 0))
    starter = threading.Thread(target=load.start)
    starter.start()
    time.sleep(0.1)
    assert works[0].queued == compute_module.BACKLOG * 2 + 1
    waiting.set()
    starter.join()
    load.stop()


def test_it_can_be_started_again_and_is_a_context_manager(fake: pytest.MonkeyPatch) -> None:
    load = ComputeLoad(torch.device("cuda", 0))
    for _ in range(2):
        with load:
            load.start()  # it runs already
            assert [thread.name for thread in threading.enumerate()].count("sidestream-load-compute") == 1
        assert "sidestream-load-compute" not in [thread.name for thread in threading.enumerate()]
    load.stop()  # it has stopped already


def test_a_load_that_cannot_start_says_why(fake: pytest.MonkeyPatch) -> None:
    fake.setattr(compute_module, "_Multiplications", lambda device: FakeWork(device, breaks_after=0))
    with pytest.raises(InfrastructureError, match=r"cannot run: CUDA error: an illegal memory access was encountered$"):
        ComputeLoad(torch.device("cuda", 0)).start()


def test_a_load_that_breaks_off_says_so_when_it_is_stopped(fake: pytest.MonkeyPatch) -> None:
    fake.setattr(compute_module, "_Multiplications", lambda device: FakeWork(device, breaks_after=200))
    load = ComputeLoad(torch.device("cuda", 0))
    load.start()
    time.sleep(0.5)
    with pytest.raises(InfrastructureError, match="broke off: CUDA error"):
        load.stop()
