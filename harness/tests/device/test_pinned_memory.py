"""Pinned host memory: what is pinned, which copies wait for what, and when the allocator hands a block out again.

After aten/src/ATen/native/cuda/Copy.cu and aten/src/ATen/core/CachingHostAllocator.h in PyTorch.
"""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable

import pytest
import torch

from harness.tests.device.accelerator import Accelerator

SIZE = 256
BLOCK_BYTES = 1 << 21
"""A size class of the pinned allocator that nothing else uses."""


def pinned(value: float, size: int = SIZE) -> torch.Tensor:
    return torch.full((size,), value).pin_memory()


def block() -> torch.Tensor:
    """A whole block of that size class."""
    return torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=True)


def test_what_is_pinned(accelerator: Accelerator) -> None:
    tensor = torch.empty(SIZE, pin_memory=True)
    assert tensor.is_pinned() and tensor.device.type == "cpu"
    assert tensor[100:].is_pinned() and tensor.view(16, 16).t()[1:].is_pinned() and tensor.detach().is_pinned()
    assert torch.from_numpy(tensor.numpy()[7:]).is_pinned()
    assert tensor.pin_memory() is tensor
    pageable = torch.empty(SIZE)
    assert pageable.pin_memory().is_pinned() and not pageable.is_pinned()
    assert torch.zeros(3, pin_memory=True).is_pinned() and torch.rand(3, pin_memory=True).is_pinned()


def test_what_is_not_pinned(accelerator: Accelerator) -> None:
    tensor = pinned(3.0)
    assert not torch.empty(SIZE).is_pinned() and not torch.empty(0, pin_memory=True).is_pinned()
    for copy in (tensor.clone(), tensor + 1.0, torch.empty_like(tensor), pickle.loads(pickle.dumps(tensor))):
        assert not copy.is_pinned()
    assert pickle.loads(pickle.dumps(tensor)).equal(tensor)


def test_to_the_host_without_blocking_is_pinned(accelerator: Accelerator) -> None:
    value = accelerator.full(2.0)
    assert value.to("cpu", non_blocking=True).is_pinned()
    assert not value.to("cpu").is_pinned() and not value.cpu().is_pinned()


def half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1, 2)[:, 0]


@pytest.mark.parametrize(
    ("host", "device"),
    [
        (lambda: pinned(7.0), lambda value: value),
        (lambda: pinned(7.0, 2 * SIZE)[5 : 5 + SIZE], lambda value: value),
        (lambda: pinned(7.0).view(16, 16).t(), lambda value: value.view(16, 16).t()),
        (lambda: half(pinned(7.0, 2)), lambda value: half(value)[:1]),
        (lambda: pinned(7.0).double(), lambda value: value),
    ],
    ids=["plain", "slice", "alike transposed", "one element", "another dtype"],
)
def test_asynchronous_copies_of_pinned_memory(
    accelerator: Accelerator,
    host: Callable[[], torch.Tensor],
    device: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """They return at once, and access the host's memory when the stream comes to them."""
    (stream,) = accelerator.streams(1)
    memory = host()
    memory = memory if memory.is_pinned() else memory.pin_memory()
    value = device(accelerator.full(2.0))
    with accelerator.busy(stream):
        with stream:
            memory.copy_(value, non_blocking=True)
        assert not stream.query() and memory.unique().tolist() == [7.0]
        stream.synchronize()
        assert memory.unique().tolist() == [2.0]
    with accelerator.busy(stream):
        with stream:
            value.copy_(memory, non_blocking=True)
        assert not stream.query()
        memory.fill_(9.0)
    assert value.unique().tolist() == [9.0]


def test_an_asynchronous_copy_to_the_device_from_pinned_memory_makes_a_new_tensor(accelerator: Accelerator) -> None:
    (stream,) = accelerator.streams(1)
    memory = pinned(7.0)
    with accelerator.busy(stream):
        with stream:
            value = memory.to(accelerator.device(), non_blocking=True)
        assert not stream.query()
        memory.fill_(9.0)
    assert value.unique().tolist() == [9.0]


@pytest.mark.parametrize(
    "host",
    [lambda: torch.full((SIZE,), 7.0), lambda: half(pinned(7.0, 2 * SIZE))],
    ids=["pageable", "pinned with gaps"],
)
def test_copies_that_go_through_pageable_memory(accelerator: Accelerator, host: Callable[[], torch.Tensor]) -> None:
    """To the host they return when they are done; from the host they have read it when they return."""
    (stream,) = accelerator.streams(1)
    memory, value = host(), accelerator.full(2.0)
    with accelerator.busy(stream):
        with stream:
            memory.copy_(value, non_blocking=True)
        assert stream.query() and memory.unique().tolist() == [2.0]
    memory.fill_(7.0)
    with accelerator.busy(stream):
        with stream:
            value.copy_(memory, non_blocking=True)
        memory.fill_(9.0)
    assert value.unique().tolist() == [7.0]


def test_blocking_copies_of_pinned_memory_wait_for_the_stream(accelerator: Accelerator) -> None:
    (stream,) = accelerator.streams(1)
    memory, value = pinned(7.0), accelerator.full(2.0)
    with accelerator.busy(stream):
        with stream:
            memory.copy_(value)
        assert stream.query() and memory.unique().tolist() == [2.0]
    memory.fill_(7.0)
    with accelerator.busy(stream):
        with stream:
            value.copy_(memory)
        assert stream.query()
    assert value.unique().tolist() == [7.0]


def test_an_event_tells_when_a_copy_is_done(accelerator: Accelerator) -> None:
    (stream,) = accelerator.streams(1)
    memory, value = pinned(7.0), accelerator.full(2.0)
    with accelerator.busy(stream):
        with stream:
            memory.copy_(value, non_blocking=True)
            done = stream.record_event()
        assert not done.query()
        done.synchronize()
        assert memory.unique().tolist() == [2.0]


def test_a_conjugate_is_made_by_the_host_at_once(accelerator: Accelerator) -> None:
    """Copy.cu conjugates what the host has before an asynchronous copy is done, and then the copy comes, as it is."""
    (stream,) = accelerator.streams(1)
    memory = torch.full((SIZE,), 7 + 7j).pin_memory()
    value = torch.full((SIZE,), 1 + 2j, device=accelerator.device())
    with accelerator.busy(stream):
        with stream:
            memory.copy_(value.conj(), non_blocking=True)
        assert memory.tolist() == [7 - 7j] * SIZE
    assert memory.tolist() == [1 + 2j] * SIZE
    memory.copy_(value.conj())
    assert memory.tolist() == [1 - 2j] * SIZE


def test_a_freed_block_is_reused_last_in_first_out(accelerator: Accelerator) -> None:
    first, second = block(), block()
    addresses = [first.data_ptr(), second.data_ptr()]
    del first
    del second
    again = [block() for _ in range(2)]
    assert [tensor.data_ptr() for tensor in again] == addresses[::-1]


@pytest.mark.parametrize("part", [lambda memory: memory, lambda memory: memory[4096:]], ids=["whole", "slice"])
def test_a_block_is_not_reused_before_the_copies_that_use_it_are_done(
    accelerator: Accelerator, part: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    (stream,) = accelerator.streams(1)
    memory = block()
    address = memory.data_ptr()
    value = torch.empty_like(part(memory), device=accelerator.device())
    spare = block()
    del spare
    gc.collect()
    with accelerator.busy(stream):
        with stream:
            part(memory).copy_(value, non_blocking=True)
        del memory
        other = block()
        assert other.data_ptr() != address
        stream.synchronize()
        assert block().data_ptr() == address


def test_a_block_waits_behind_those_that_were_freed_before_it(accelerator: Accelerator) -> None:
    """Recordings are looked at in the order of the frees, up to the first that is not complete."""
    busy, idle = accelerator.streams(2)
    first, second, spare = block(), block(), block()
    address = second.data_ptr()
    values = [torch.empty_like(first, device=accelerator.device()) for _ in range(2)]
    del spare
    with accelerator.busy(busy):
        with busy:
            first.copy_(values[0], non_blocking=True)
        with idle:
            second.copy_(values[1], non_blocking=True)
        del first
        del second
        idle.synchronize()
        other = block()
        assert not busy.query() and other.data_ptr() != address
        busy.synchronize()
        assert block().data_ptr() == address
