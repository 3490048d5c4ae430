"""Which work waits for which: streams, and nothing but what a program asks for."""

from __future__ import annotations

from harness.tests.device.accelerator import Accelerator


def test_a_stream_runs_its_work_in_the_order_of_its_enqueueing(accelerator: Accelerator) -> None:
    (stream,) = accelerator.streams(1)
    value = accelerator.full(1.0)
    with accelerator.busy(stream), stream:
        value.add_(1.0)
        value.mul_(10.0)
        value.sub_(3.0)
    assert value.tolist() == [17.0] * 256


def test_a_pool_stream_does_not_wait_for_the_default_stream(accelerator: Accelerator) -> None:
    (stream,) = accelerator.streams(1)
    value, seen = accelerator.full(1.0), accelerator.full(0.0)
    with accelerator.busy(accelerator.default_stream()):
        value.fill_(2.0)
        with stream:
            seen.copy_(value)
        stream.synchronize()
        assert not accelerator.default_stream().query()
    assert seen.unique().tolist() == [1.0]


def test_the_default_stream_does_not_wait_for_a_pool_stream(accelerator: Accelerator) -> None:
    (stream,) = accelerator.streams(1)
    value, seen = accelerator.full(1.0), accelerator.full(0.0)
    with accelerator.busy(stream):
        with stream:
            value.fill_(2.0)
        seen.copy_(value)
        accelerator.default_stream().synchronize()
        assert not stream.query()
    assert seen.unique().tolist() == [1.0]


def test_two_pool_streams_do_not_wait_for_each_other(accelerator: Accelerator) -> None:
    first, second = accelerator.streams(2)
    value, seen = accelerator.full(1.0), accelerator.full(0.0)
    with accelerator.busy(first):
        with first:
            value.fill_(2.0)
        with second:
            seen.copy_(value)
        second.synchronize()
        assert not first.query()
    assert seen.unique().tolist() == [1.0]
