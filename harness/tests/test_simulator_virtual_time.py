"""Virtual time on the simulator: a script behaves as its clocks say, whatever it costs this machine.

Unless a test says otherwise, a launch costs the host 5 microseconds and takes 10 on its stream.
"""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

import pytest
import torch

from harness.backends.simulator import set_schedule
from harness.perturb.schedule import SubmissionOrder, VirtualTime
from harness.tests.simulator_support import filled, preparing, registered, repetition, streams

NAN = float("nan")
CYCLES_A_MICROSECOND = 2000
MEBIBYTE = 2**20


@pytest.fixture(scope="module")
def native() -> ModuleType:
    return registered()


@pytest.fixture(autouse=True)
def virtual_time(native: ModuleType) -> Any:
    set_schedule(VirtualTime(launch_us=5, operation_us=10, copy_us_per_mib=40, query_us=1))
    yield
    set_schedule(SubmissionOrder())


def sleep(duration_us: float) -> None:
    torch.sim._sleep(int(duration_us * CYCLES_A_MICROSECOND))  # type: ignore[attr-defined]


def host_us(native: ModuleType) -> float:
    return float(native.schedule_report()["host_us"])


@pytest.mark.parametrize(("sleep_us", "seen_value"), [(0.5, 2.0), (10, 2.0), (10.5, 1.0), (1000, 1.0)])
def test_a_reader_that_does_not_wait_is_stale_exactly_if_it_ends_first(
    native: ModuleType, sleep_us: float, seen_value: float
) -> None:
    fill, ambient = streams(2)
    with repetition(native):
        with preparing(native):
            value, seen = filled(4, 1.0), filled(4, NAN)
        with fill:
            sleep(sleep_us)  # enqueued at 5
            value.fill_(2.0)  # enqueued at 10, ends at max(5 + sleep_us, 10) + 10
        with ambient:
            seen.copy_(value)  # enqueued at 15, ends at 25; what ends at the same time goes in order
    executed = native.schedule_report()["executed"]
    assert executed[-1][3] == max(25.0, 15.0 + sleep_us)
    assert seen[0].item() == seen_value


@pytest.mark.parametrize(("reader_us", "seen_value"), [(14, 1.0), (16, 2.0)])
def test_a_late_reader_reads_what_an_earlier_launch_has_written_over(
    native: ModuleType, reader_us: float, seen_value: float
) -> None:
    reading, overwriting = streams(2)
    mebibytes = 2.0  # read and written
    set_schedule(VirtualTime(launch_us=5, operation_us=0, operation_us_per_mib=reader_us / mebibytes))
    with repetition(native):
        with preparing(native):
            value, seen = filled(MEBIBYTE // 4, 1.0), filled(MEBIBYTE // 4, NAN)
        with reading:
            torch.add(value, 0, out=seen)  # from 5 to 5 + reader_us
        with overwriting:
            sleep(10)  # enqueued at 10, until 20
            value[:4].fill_(2.0)
    assert seen[0].item() == seen_value


def test_a_stream_that_waits_starts_when_what_it_waits_for_is_complete(native: ModuleType) -> None:
    fill, ambient = streams(2)
    with repetition(native):
        with preparing(native):
            value, seen = filled(4, 1.0), filled(4, NAN)
        with fill:
            sleep(100)  # from 5 to 105
            value.fill_(2.0)  # until 115
        ambient.wait_stream(fill)
        with ambient:
            seen.copy_(value)  # until 125
        with fill:
            value.fill_(3.0)  # until 125 as well, but enqueued later
    assert [round(launch[3]) for launch in native.schedule_report()["executed"]] == [105, 115, 125, 125]
    assert seen[0].item() == 2.0


def test_a_host_that_synchronizes_waits_until_the_stream_is_through(native: ModuleType) -> None:
    slow, quick = streams(2)
    with slow:
        sleep(1000)  # from 5 to 1005
    with quick:
        sleep(100)  # from 10 to 110
    assert host_us(native) == 10
    quick.synchronize()
    assert host_us(native) == 110
    quick.synchronize()
    assert host_us(native) == 110
    slow.record_event().synchronize()
    assert host_us(native) == 1005
    with quick:
        sleep(100)  # from 1010 to 1110
    torch.accelerator.synchronize()
    assert host_us(native) == 1110


def test_a_host_that_polls_sees_it_complete_when_its_clock_says_so(native: ModuleType) -> None:
    (stream,) = streams(1)
    with stream:
        sleep(3000)  # from 5 to 3005
    event = stream.record_event()
    polls = 0
    while not event.query():
        polls += 1
    assert polls == 2999  # the 3000th is made at 5 + 3000
    assert stream.query()
    assert host_us(native) == 3006


def test_elapsed_time_is_virtual_and_costs_nothing(native: ModuleType) -> None:
    (stream,) = streams(1)
    start, end = (torch.Event(device="sim", enable_timing=True) for _ in range(2))
    started = time.process_time()
    with stream:
        start.record(stream)
        sleep(3_600_000_000)
        end.record(stream)
    end.synchronize()
    assert start.elapsed_time(end) == 3_600_000 + 0.005  # enqueued 5 microseconds after the first event
    assert time.process_time() - started < 10


def test_events_of_different_clocks_are_not_compared(native: ModuleType) -> None:
    stream = streams(1)[0]
    start, end = (torch.Event(device="sim", enable_timing=True) for _ in range(2))
    start.record(stream)
    set_schedule(SubmissionOrder())
    end.record(stream)
    with pytest.raises(RuntimeError, match="different schedules, which share no clock"):
        start.elapsed_time(end)


def test_copies_take_what_their_bandwidth_says(native: ModuleType) -> None:
    (stream,) = streams(1)
    with repetition(native):
        with preparing(native):
            device = filled(MEBIBYTE // 4, 2.0)
            other = filled(MEBIBYTE // 4, NAN)
            host = torch.zeros(MEBIBYTE // 4).pin_memory()
        with stream:
            other.copy_(device)  # on the device: 10
            host.copy_(device, non_blocking=True)  # 10 + 40
        assert host_us(native) == 10
        assert host[0].item() == 0.0  # the host is early
        stream.synchronize()
        assert host_us(native) == 65
        assert host[0].item() == 2.0
        with stream:
            device.copy_(torch.full((MEBIBYTE // 4,), 3.0))  # the host waits for it
        assert host_us(native) == 65 + 5 + 50
    assert [launch[3] for launch in native.schedule_report()["executed"]] == [15, 65, 120]


def test_pinned_memory_that_the_host_overwrites_too_early_is_copied_so(native: ModuleType) -> None:
    (stream,) = streams(1)
    with repetition(native):
        with preparing(native):
            host, device = torch.full((4,), 1.0).pin_memory(), filled(4, NAN)
        with stream:
            sleep(100)
            device.copy_(host, non_blocking=True)
        host.fill_(2.0)
    assert device[0].item() == 2.0


def test_each_repetition_starts_at_nought_and_preparing_costs_nothing(native: ModuleType) -> None:
    for _ in range(2):
        with repetition(native):
            with preparing(native):
                value = filled(4, 1.0)
            assert host_us(native) == 0
            value.fill_(2.0)
        assert host_us(native) == 15
    set_schedule(VirtualTime())
    assert host_us(native) == 0


def test_backward_runs_on_the_clocks_of_its_streams(native: ModuleType) -> None:
    """The engine's waits are honoured, and without the user's own the seed is read before it is filled."""
    for waits in (True, False):
        fill, ambient = streams(2)
        with repetition(native):
            with preparing(native):
                leaf = filled(4, 2.0).requires_grad_()
                product = leaf * 3
                seed = filled(4, 1.0)
            with fill:
                sleep(1000)
                seed.fill_(5.0)
            with ambient:
                if waits:
                    ambient.wait_stream(fill)
                product.backward(seed)
                assert leaf.grad is not None
                seen = leaf.grad.clone()
        assert seen[0].item() == (15.0 if waits else 3.0)
