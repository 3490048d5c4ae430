"""Copies from, to and between devices: which streams they are ordered with, and when the host goes on.

What the host may rely on is in the CUDA Runtime API, "API synchronization behavior"; which streams a copy between
devices is ordered with, in ``aten/src/ATen/native/cuda/Copy.cu`` of PyTorch. More on pinned memory is in
``test_pinned_memory.py``.
"""

from __future__ import annotations

import pytest
import torch

from harness.tests.device.accelerator import Accelerator

LARGE = 1 << 20
"""Elements: 4 MiB, more than a driver copies along with the command."""


def test_a_blocking_copy_from_the_host_is_complete_when_it_returns(accelerator: Accelerator) -> None:
    (stream,) = accelerator.streams(1)
    source, value = torch.full((256,), 2.0), accelerator.full(1.0)
    with accelerator.busy(stream), stream:
        value.copy_(source)
        assert stream.query()
    assert value.unique().tolist() == [2.0]


def test_a_blocking_copy_to_the_host_is_complete_when_it_returns(accelerator: Accelerator) -> None:
    (stream,) = accelerator.streams(1)
    value, target = accelerator.full(1.0), torch.zeros(256)
    with accelerator.busy(stream), stream:
        value.fill_(2.0)
        target.copy_(value)
        assert stream.query()
        assert target.unique().tolist() == [2.0]


def test_a_blocking_copy_does_not_wait_for_other_streams(accelerator: Accelerator) -> None:
    stream, other = accelerator.streams(2)
    value, host = accelerator.full(1.0), torch.zeros(256)
    with accelerator.busy(other), stream:
        value.copy_(host)
        host.copy_(value)
        assert not other.query()


@pytest.mark.parametrize("size", [256, LARGE])
def test_a_host_may_overwrite_pageable_memory_once_an_asynchronous_copy_from_it_has_returned(
    accelerator: Accelerator, size: int
) -> None:
    (stream,) = accelerator.streams(1)
    source, value = torch.full((size,), 2.0), accelerator.full(1.0, size=size)
    with accelerator.busy(stream), stream:
        value.copy_(source, non_blocking=True)
        source.fill_(9.0)
    assert value.unique().tolist() == [2.0]


def test_a_large_asynchronous_copy_from_pinned_memory_reads_it_when_its_turn_comes(accelerator: Accelerator) -> None:
    (stream,) = accelerator.streams(1)
    source, value = torch.full((LARGE,), 2.0).pin_memory(), accelerator.full(1.0, size=LARGE)
    with accelerator.busy(stream), stream:
        value.copy_(source, non_blocking=True)
        assert not stream.query()
        source.fill_(9.0)
    assert value.unique().tolist() == [9.0]


def test_a_copy_on_one_device_does_not_make_the_host_wait(accelerator: Accelerator) -> None:
    (stream,) = accelerator.streams(1)
    source, target = accelerator.full(2.0), accelerator.full(1.0)
    with accelerator.busy(stream), stream:
        target.copy_(source)
        assert not stream.query()
        target.double()
        assert not stream.query()
    assert target.unique().tolist() == [2.0]


def test_a_copy_converts_and_broadcasts(accelerator: Accelerator) -> None:
    value = torch.empty(3, 4, device=accelerator.device())
    value.copy_(torch.arange(4))
    expected = torch.arange(4.0).expand(3, 4)
    assert torch.equal(value.cpu(), expected)
    target = torch.empty(4, 3, dtype=torch.int64)
    target.copy_(value.t())
    assert torch.equal(target, expected.t().long())
    assert torch.equal(value.t()[::2].to("cpu"), expected.t()[::2])
    conjugated = torch.tensor([1 + 2j, 3 - 4j], device=accelerator.device()).conj()
    assert conjugated.cpu().tolist() == [1 - 2j, 3 + 4j]


def test_a_copy_of_the_wrong_size_is_refused(accelerator: Accelerator) -> None:
    with pytest.raises(RuntimeError, match="size"):
        torch.empty(3, device=accelerator.device()).copy_(torch.empty(4))


@pytest.mark.usefixtures("two_devices")
class TestBetweenDevices:
    @pytest.mark.parametrize("non_blocking", [False, True])
    def test_a_copy_waits_for_the_current_stream_of_its_source(
        self, accelerator: Accelerator, non_blocking: bool
    ) -> None:
        (here,), (there,) = accelerator.streams(1, 0), accelerator.streams(1, 1)
        source, target = accelerator.full(1.0), accelerator.full(0.0, index=1)
        with accelerator.busy(here), there, here:
            source.fill_(2.0)
            target.copy_(source, non_blocking=non_blocking)
            assert not here.query()
            assert not there.query()
        assert target.unique().tolist() == [2.0]

    def test_a_copy_waits_for_the_current_stream_of_its_destination(self, accelerator: Accelerator) -> None:
        (here,), (there,) = accelerator.streams(1, 0), accelerator.streams(1, 1)
        source, target = accelerator.full(1.0), accelerator.full(0.0, index=1)
        with accelerator.busy(there), there, here:
            target.fill_(3.0)
            target.copy_(source)
            assert not here.query()
            source.fill_(2.0)
        assert target.unique().tolist() == [1.0]

    def test_the_destination_s_current_stream_waits_for_the_copy(self, accelerator: Accelerator) -> None:
        (here,), (there,) = accelerator.streams(1, 0), accelerator.streams(1, 1)
        source, target = accelerator.full(1.0), accelerator.full(0.0, index=1)
        with accelerator.busy(here), there, here:
            source.fill_(2.0)
            target.copy_(source)
            target.add_(1.0)
            assert not there.query()
        assert target.unique().tolist() == [3.0]

    def test_a_copy_leaves_the_other_streams_of_both_devices_alone(self, accelerator: Accelerator) -> None:
        (here, idle_here), (there, idle_there) = accelerator.streams(2, 0), accelerator.streams(2, 1)
        source, target = accelerator.full(1.0), accelerator.full(0.0, index=1)
        with accelerator.busy(idle_here, idle_there), there, here:
            target.copy_(source)
            here.synchronize()
            there.synchronize()
            assert not idle_here.query()
            assert not idle_there.query()
        with accelerator.busy(here), there, here:
            target.copy_(source)
            assert idle_here.query()
            assert idle_there.query()
        assert target.unique().tolist() == [1.0]

    def test_a_move_and_back_keeps_values_and_strides(self, accelerator: Accelerator) -> None:
        value = torch.arange(12.0, device=accelerator.device(0)).view(3, 4).t()
        moved = value.to(accelerator.device(1))
        assert moved.device == accelerator.device(1)
        assert moved.stride() == value.stride()
        assert torch.equal(moved.to(accelerator.device(0)), value)
        assert torch.equal(moved[::2].double().to(accelerator.device(0)), value[::2].double())

    def test_a_copy_from_the_host_runs_on_the_destination_s_current_stream(self, accelerator: Accelerator) -> None:
        (here,), (there,) = accelerator.streams(1, 0), accelerator.streams(1, 1)
        value, host = accelerator.full(0.0, index=1), torch.full((256,), 2.0)
        with accelerator.busy(here, there), there, here:
            value.copy_(host)
            assert there.query()
        assert value.unique().tolist() == [2.0]
