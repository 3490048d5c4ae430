"""Streams: where they come from, which one is current, and what waiting for one means."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from harness.tests.device.accelerator import Accelerator

POOL_SIZE = 32


def current_id(index: int | None = None) -> int:
    return torch.accelerator.current_stream(index).stream_id


def in_a_thread(body: Callable[[], None]) -> None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            body()
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for failure in failures:
        raise failure


def test_the_default_stream_is_current_at_first(accelerator: Accelerator) -> None:
    default = accelerator.default_stream()
    assert torch.accelerator.current_stream() == default
    assert (default.stream_id, default.device) == (0, accelerator.device())


def test_a_stream_is_current_in_its_with_block(accelerator: Accelerator) -> None:
    first, second = accelerator.streams(2)
    with first as entered:
        assert entered is first
        assert torch.accelerator.current_stream() == first
        with second:
            assert torch.accelerator.current_stream() == second
        assert torch.accelerator.current_stream() == first
    assert current_id() == 0


def test_the_former_stream_is_current_again_after_an_exception(accelerator: Accelerator) -> None:
    first, second = accelerator.streams(2)
    with first:
        with pytest.raises(KeyError), second:
            raise KeyError
        assert torch.accelerator.current_stream() == first
    assert current_id() == 0


def test_set_stream_makes_a_stream_current_until_further_notice(accelerator: Accelerator) -> None:
    (stream,) = accelerator.streams(1)
    torch.accelerator.set_stream(stream)
    try:
        assert torch.accelerator.current_stream() == stream
    finally:
        torch.accelerator.set_stream(accelerator.default_stream())
    assert current_id() == 0


def test_each_thread_has_a_current_stream_of_its_own(accelerator: Accelerator) -> None:
    first, second = accelerator.streams(2)

    def body() -> None:
        assert current_id() == 0
        with second:
            assert torch.accelerator.current_stream() == second
        torch.accelerator.set_stream(second)

    with first:
        in_a_thread(body)
        assert torch.accelerator.current_stream() == first


def test_work_that_several_threads_enqueue_on_a_stream_stays_in_order(accelerator: Accelerator) -> None:
    (stream,) = accelerator.streams(1)
    value, seen = accelerator.full(1.0), accelerator.full(0.0)

    def copy() -> None:
        with stream:
            seen.copy_(value)

    with accelerator.busy(stream):
        with stream:
            value.fill_(2.0)
        in_a_thread(copy)
        assert not stream.query()
    assert seen.unique().tolist() == [2.0]


@pytest.mark.usefixtures("two_devices")
def test_each_device_has_a_current_stream_of_its_own(accelerator: Accelerator) -> None:
    (first,), (second,) = accelerator.streams(1, 0), accelerator.streams(1, 1)
    with first:
        assert current_id(1) == 0
        with second:
            assert torch.accelerator.current_stream(0) == first
            assert torch.accelerator.current_stream(1) == second


@pytest.mark.usefixtures("two_devices")
def test_a_stream_of_another_device_makes_its_device_current_too(accelerator: Accelerator) -> None:
    (first,), (other, inner) = accelerator.streams(1, 0), accelerator.streams(2, 1)
    with first:
        with other:
            assert torch.accelerator.current_device_index() == 1
            assert torch.accelerator.current_stream() == other
            assert torch.empty(1, device=accelerator.type).device.index == 1
            with inner:
                assert torch.accelerator.current_stream() == inner
            assert torch.accelerator.current_stream() == other
        assert torch.accelerator.current_device_index() == 0
        assert torch.accelerator.current_stream() == first
    assert current_id(1) == 0
    torch.accelerator.set_stream(other)
    try:
        assert torch.accelerator.current_device_index() == 1
    finally:
        torch.accelerator.set_stream(accelerator.default_stream(1))
        torch.accelerator.set_device_index(0)


@pytest.mark.usefixtures("two_devices")
def test_a_thread_starts_on_device_0(accelerator: Accelerator) -> None:
    def body() -> None:
        assert torch.accelerator.current_device_index() == 0

    torch.accelerator.set_device_index(1)
    try:
        in_a_thread(body)
        assert torch.accelerator.current_device_index() == 1
    finally:
        torch.accelerator.set_device_index(0)


@pytest.mark.usefixtures("two_devices")
def test_an_operation_runs_on_the_device_of_its_tensors(accelerator: Accelerator) -> None:
    (first,), (other,) = accelerator.streams(1, 0), accelerator.streams(1, 1)
    value = accelerator.full(1.0, index=1)
    with accelerator.busy(other):
        with other, first:
            assert torch.accelerator.current_device_index() == 0
            value.add_(1.0)
        assert first.query()
        assert not other.query()
    assert value.unique().tolist() == [2.0]


def test_the_pool_hands_out_32_streams_in_turn(accelerator: Accelerator) -> None:
    ids = [torch.Stream(device=accelerator.device()).stream_id for _ in range(2 * POOL_SIZE)]
    assert ids[:POOL_SIZE] == ids[POOL_SIZE:]
    assert len(set(ids)) == POOL_SIZE
    assert 0 not in ids


def test_streams_of_one_id_are_one_stream(accelerator: Accelerator) -> None:
    first, *_, same = (torch.Stream(device=accelerator.device()) for _ in range(POOL_SIZE + 1))
    with accelerator.busy(first):
        assert not same.query()
        same.synchronize()
        assert first.query()


def test_each_priority_has_a_pool_of_its_own(accelerator: Accelerator) -> None:
    pools = [
        {torch.Stream(device=accelerator.device(), priority=priority).stream_id for _ in range(POOL_SIZE)}
        for priority in (0, -1, -2, -3)
    ]
    assert [len(pool) for pool in pools] == [POOL_SIZE] * 4
    assert len(set.union(*pools)) == 4 * POOL_SIZE


@pytest.mark.parametrize(("beyond", "nearest"), [(-100, -3), (1, 0), (100, 0)])
def test_a_priority_that_does_not_exist_is_the_nearest_that_does(
    accelerator: Accelerator, beyond: int, nearest: int
) -> None:
    pools = [
        {torch.Stream(device=accelerator.device(), priority=priority).stream_id for _ in range(POOL_SIZE)}
        for priority in (beyond, nearest)
    ]
    assert pools[0] == pools[1]


def test_a_stream_of_high_priority_is_ordered_like_any_other(accelerator: Accelerator) -> None:
    low = torch.Stream(device=accelerator.device())
    high = torch.Stream(device=accelerator.device(), priority=-1)
    with accelerator.busy(low):
        assert high.query()
        high.wait_stream(low)
        assert not high.query()


def test_streams_compare_and_hash_by_device_and_id(accelerator: Accelerator) -> None:
    first, second = accelerator.streams(2)
    with first:
        again = torch.accelerator.current_stream()
    assert again is not first
    assert again == first
    assert hash(again) == hash(first)
    assert first != second
    assert len({first, second, again}) == 2


def test_a_stream_says_what_it_is(accelerator: Accelerator) -> None:
    (stream,) = accelerator.streams(1)
    assert stream.device == accelerator.device()
    assert stream.device_index == 0
    said = repr(stream)
    assert accelerator.type in said
    assert f"stream_id={stream.stream_id}" in said


def test_a_query_of_a_stream_says_whether_all_its_work_is_complete(accelerator: Accelerator) -> None:
    idle, busy = accelerator.streams(2)
    assert idle.query()
    with accelerator.busy(busy):
        assert idle.query()
        assert not busy.query()
    assert busy.query()


def test_to_synchronize_a_stream_waits_for_its_own_work_alone(accelerator: Accelerator) -> None:
    first, other = accelerator.streams(2)
    value = accelerator.full(1.0)
    with accelerator.busy(other):
        with first:
            value.add_(1.0)
        first.synchronize()
        assert first.query()
        assert not other.query()
        other.synchronize()
        assert other.query()


def test_to_synchronize_a_device_waits_for_all_its_streams(accelerator: Accelerator) -> None:
    streams = [*accelerator.streams(2), accelerator.default_stream()]
    for index in (0, None):
        with accelerator.busy(*streams):
            assert not any(stream.query() for stream in streams)
            torch.accelerator.synchronize(index)
            assert all(stream.query() for stream in streams)


@pytest.mark.usefixtures("two_devices")
def test_to_synchronize_a_device_does_not_wait_for_another(accelerator: Accelerator) -> None:
    (first,), (other,) = accelerator.streams(1, 0), accelerator.streams(1, 1)
    value = accelerator.full(1.0)
    with accelerator.busy(other):
        with first:
            value.add_(1.0)
        torch.accelerator.synchronize(0)
        assert first.query()
        assert not other.query()


@pytest.mark.usefixtures("two_devices")
def test_devices_do_not_wait_for_each_other(accelerator: Accelerator) -> None:
    with accelerator.busy(accelerator.default_stream(0)):
        value = torch.full((4,), 1.0, device=accelerator.device(1))
        assert value.tolist() == [1.0] * 4
        assert not accelerator.default_stream(0).query()


def test_a_sleep_occupies_the_current_stream_alone(accelerator: Accelerator) -> None:
    first, other = accelerator.streams(2)
    with accelerator.busy(first):
        with first:
            accelerator.sleep(0.001)
        assert not first.query()
        assert other.query()
        assert accelerator.default_stream().query()
