"""Events: what a record marks, what a wait binds to, and what the host learns from a query."""

from __future__ import annotations

import pytest
import torch

from harness.tests.device.accelerator import Accelerator
from harness.tests.device.differences import DIFFERENCES


def event_of(accelerator: Accelerator, *, timed: bool = False) -> torch.Event:
    return torch.Event(device=accelerator.type, enable_timing=timed)


def test_an_event_is_complete_once_the_work_before_its_record_is(accelerator: Accelerator) -> None:
    (stream,) = accelerator.streams(1)
    before, after = event_of(accelerator), event_of(accelerator)
    before.record(stream)
    with accelerator.busy(stream):
        after.record(stream)
        assert before.query()
        assert not after.query()
    assert after.query()


def test_recording_an_event_again_makes_it_pending_again(accelerator: Accelerator) -> None:
    (stream,) = accelerator.streams(1)
    event = event_of(accelerator)
    event.record(stream)
    event.synchronize()
    assert event.query()
    with accelerator.busy(stream):
        event.record(stream)
        assert not event.query()


def test_a_record_and_a_wait_without_a_stream_mean_the_current_stream(accelerator: Accelerator) -> None:
    first, second = accelerator.streams(2)
    event = event_of(accelerator)
    with accelerator.busy(first):
        with first:
            event.record()
        with second:
            event.wait()
        assert not event.query()
        assert not second.query()
        assert accelerator.default_stream().query()


def test_a_stream_that_waits_for_an_event_sees_what_was_written_before_its_record(accelerator: Accelerator) -> None:
    first, second = accelerator.streams(2)
    value, seen = accelerator.full(1.0), accelerator.full(0.0)
    event = event_of(accelerator)
    with accelerator.busy(first):
        with first:
            value.fill_(2.0)
        event.record(first)
        second.wait_event(event)
        with second:
            seen.copy_(value)
        assert not second.query()
    assert seen.unique().tolist() == [2.0]


def test_waits_add_up_along_a_chain_of_streams(accelerator: Accelerator) -> None:
    first, second, third = accelerator.streams(3)
    value, seen = accelerator.full(1.0), accelerator.full(0.0)
    with accelerator.busy(first):
        with first:
            value.fill_(2.0)
        second.wait_stream(first)
        third.wait_stream(second)
        with third:
            seen.copy_(value)
        assert not third.query()
    assert seen.unique().tolist() == [2.0]


def test_a_wait_binds_to_the_record_before_it_and_not_to_a_later_one(accelerator: Accelerator) -> None:
    early, late, waiting = accelerator.streams(3)
    event = event_of(accelerator)
    with accelerator.busy(late):
        event.record(early)
        waiting.wait_event(event)
        event.record(late)
        waiting.synchronize()
        assert not event.query()
        waiting.wait_event(event)
        assert not waiting.query()


def test_a_wait_outlives_the_next_record_and_the_event(accelerator: Accelerator) -> None:
    first, idle, *waiting = accelerator.streams(4)
    value, seen = accelerator.full(1.0), [accelerator.full(0.0) for _ in waiting]
    event, dropped = event_of(accelerator), event_of(accelerator)
    with accelerator.busy(first):
        with first:
            value.fill_(2.0)
        event.record(first)
        dropped.record(first)
        waiting[0].wait_event(event)
        waiting[1].wait_event(dropped)
        event.record(idle)
        del dropped
        for stream, copy in zip(waiting, seen, strict=True):
            with stream:
                copy.copy_(value)
            assert not stream.query()
    assert [copy.unique().tolist() for copy in seen] == [[2.0], [2.0]]


def test_an_event_that_was_never_recorded_is_complete_and_holds_nobody_up(accelerator: Accelerator) -> None:
    (stream,) = accelerator.streams(1)
    never = event_of(accelerator)
    assert never.query()
    never.synchronize()
    stream.wait_event(never)
    never.wait(stream)
    stream.synchronize()
    assert stream.query()


def test_to_synchronize_an_event_waits_for_what_came_before_its_record_alone(accelerator: Accelerator) -> None:
    first, other = accelerator.streams(2)
    value = accelerator.full(1.0)
    with accelerator.busy(other):
        with first:
            value.fill_(2.0)
        event = first.record_event()
        first.wait_stream(other)
        event.synchronize()
        assert event.query()
        assert not first.query()


def test_to_synchronize_an_event_waits_for_what_its_stream_waits_for(accelerator: Accelerator) -> None:
    first, second = accelerator.streams(2)
    with accelerator.busy(first):
        earlier = first.record_event()
        second.wait_event(earlier)
        second.record_event().synchronize()
        assert earlier.query()


def test_record_event_makes_an_event_or_records_the_one_it_is_given(accelerator: Accelerator) -> None:
    (stream,) = accelerator.streams(1)
    event = event_of(accelerator)
    with accelerator.busy(stream):
        assert stream.record_event(event) is event
        made = stream.record_event()
        assert isinstance(made, torch.Event)
        assert not event.query()
        assert not made.query()
    assert event.device == made.device == accelerator.device()


def test_the_time_between_two_events_is_that_of_their_order(accelerator: Accelerator) -> None:
    (stream,) = accelerator.streams(1)
    value = accelerator.full(1.0)
    start, end = (event_of(accelerator, timed=True) for _ in range(2))
    with stream:
        start.record(stream)
        value.add_(1.0)
        end.record(stream)
    end.synchronize()
    assert 0.0 <= start.elapsed_time(end) < 1000.0
    assert start.elapsed_time(start) == 0.0
    assert end.elapsed_time(start) == -start.elapsed_time(end)


def test_the_time_between_two_events_is_that_of_the_work_between_them(accelerator: Accelerator) -> None:
    if not accelerator.sleep_takes_time:
        pytest.skip(f"not covered: {DIFFERENCES['sleep']}")
    (stream,) = accelerator.streams(1)
    start, end = (event_of(accelerator, timed=True) for _ in range(2))
    with stream:
        start.record()
        accelerator.sleep(20.0)
        end.record()
    end.synchronize()
    assert 18.0 < start.elapsed_time(end) < 40.0


def test_there_is_no_time_between_events_without_timing_or_record_or_completion(accelerator: Accelerator) -> None:
    (stream,) = accelerator.streams(1)
    timed, pending, never = (event_of(accelerator, timed=True) for _ in range(3))
    plain = event_of(accelerator)
    timed.record(stream)
    plain.record(stream)
    stream.synchronize()
    for other in (plain, never):
        with pytest.raises((RuntimeError, ValueError), match=r"enable_timing|record"):
            timed.elapsed_time(other)
    with accelerator.busy(stream):
        pending.record(stream)
        with pytest.raises(RuntimeError, match=r"completed|not ready"):
            timed.elapsed_time(pending)


@pytest.mark.usefixtures("two_devices")
def test_a_stream_waits_for_an_event_of_another_device(accelerator: Accelerator) -> None:
    (first,), (second,) = accelerator.streams(1, 0), accelerator.streams(1, 1)
    with accelerator.busy(first):
        second.wait_event(first.record_event())
        assert not second.query()
        second.synchronize()
        assert first.query()


@pytest.mark.usefixtures("two_devices")
def test_an_event_belongs_to_the_device_of_its_first_record(accelerator: Accelerator) -> None:
    (first,), (second,) = accelerator.streams(1, 0), accelerator.streams(1, 1)
    event = event_of(accelerator)
    event.record(first)
    # Not the rest of the sentence: CUDA's ends at device 0, whose 8-bit index is written as a NUL character
    # (c10/cuda/impl/CUDAGuardImpl.h).
    with pytest.raises(RuntimeError, match=r"[Ee]vent device"):
        event.record(second)


@pytest.mark.usefixtures("two_devices")
def test_there_is_no_time_between_events_of_two_devices(accelerator: Accelerator) -> None:
    events = [event_of(accelerator, timed=True) for _ in range(2)]
    for index, event in enumerate(events):
        event.record(accelerator.streams(1, index)[0])
        event.synchronize()
    with pytest.raises(RuntimeError):
        events[0].elapsed_time(events[1])
