"""What the autograd engine does with a device: the patterns themselves are the suite's (``suites/``)."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from harness.tests.device.accelerator import Accelerator


def leaf_and_product(
    accelerator: Accelerator, stream: torch.Stream, index: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """A leaf of twos and three times it, made on a stream and complete."""
    with stream:
        leaf = torch.full((256,), 2.0, device=accelerator.device(index), requires_grad=True)
        product = leaf * 3
    accelerator.backend.synchronize()
    return leaf, product


def backward_is_warm(accelerator: Accelerator) -> None:
    """The first backward of a process starts the engine's threads, which takes longer than a stream is kept busy."""
    (stream,) = accelerator.streams(1)
    for index in range(accelerator.device_count):
        _, product = leaf_and_product(accelerator, stream if index == 0 else accelerator.streams(1, index)[0], index)
        product.backward(torch.ones_like(product))
    accelerator.backend.synchronize()


@pytest.mark.parametrize("from_default", [True, False])
def test_backward_waits_for_the_stream_that_it_is_called_on(accelerator: Accelerator, from_default: bool) -> None:
    backward_is_warm(accelerator)
    forward, other = accelerator.streams(2)
    ambient = accelerator.default_stream() if from_default else other
    leaf, product = leaf_and_product(accelerator, forward)
    seed = accelerator.full(0.0)
    with accelerator.busy(ambient), ambient:
        seed.fill_(5.0)
        product.backward(seed)
        assert not forward.query()
    assert leaf.grad is not None
    assert leaf.grad.unique().tolist() == [15.0]


@pytest.mark.parametrize("from_default", [True, False])
def test_the_stream_that_backward_is_called_on_waits_for_its_end(accelerator: Accelerator, from_default: bool) -> None:
    backward_is_warm(accelerator)
    forward, other = accelerator.streams(2)
    ambient = accelerator.default_stream() if from_default else other
    leaf, product = leaf_and_product(accelerator, forward)
    seed, seen = accelerator.full(5.0), accelerator.full(0.0)
    with accelerator.busy(forward), ambient:
        product.backward(seed)
        assert leaf.grad is not None
        seen.copy_(leaf.grad)
        assert not ambient.query()
    assert seen.unique().tolist() == [15.0]


def test_backward_leaves_streams_alone_that_have_no_part_in_it(accelerator: Accelerator) -> None:
    backward_is_warm(accelerator)
    forward, ambient, other = accelerator.streams(3)
    leaf, product = leaf_and_product(accelerator, forward)
    seed = accelerator.full(5.0)
    with accelerator.busy(other), ambient:
        product.backward(seed)
        assert leaf.grad is not None
        assert leaf.grad[0].item() == 15.0
        assert not other.query()


class Where(torch.autograd.Function):
    """Notes where its backward runs."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, seen: list[tuple[int, int, torch.Stream]]) -> torch.Tensor:
        ctx.seen = seen
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        place = threading.get_ident(), torch.accelerator.current_device_index(), torch.accelerator.current_stream()
        ctx.seen.append(place)
        return gradient * 1, None


def test_a_node_runs_on_the_stream_of_its_forward_in_a_thread_of_its_device(accelerator: Accelerator) -> None:
    streams = [accelerator.streams(1, index)[0] for index in range(accelerator.device_count)]
    seen: list[tuple[int, int, torch.Stream]] = []
    total = torch.zeros(1, device=accelerator.device())
    for index, stream in enumerate(streams):
        leaf, _ = leaf_and_product(accelerator, stream, index)
        with stream:
            noted = Where.apply(leaf, seen)
        torch.accelerator.current_stream(index).wait_stream(stream)
        total = total + noted.sum().to(accelerator.device())
    total.sum().backward()
    accelerator.backend.synchronize()
    assert sorted(index for _, index, _ in seen) == list(range(accelerator.device_count))
    assert {(index, stream.stream_id) for _, index, stream in seen} == {
        (index, stream.stream_id) for index, stream in enumerate(streams)
    }
    threads = {thread for thread, _, _ in seen}
    assert len(threads) == accelerator.device_count
    assert threading.get_ident() not in threads


def test_the_current_stream_and_device_are_the_same_after_backward(accelerator: Accelerator) -> None:
    forward, ambient = accelerator.streams(2)
    _, product = leaf_and_product(accelerator, forward)
    with ambient:
        product.sum().backward()
        assert torch.accelerator.current_stream() == ambient
    assert torch.accelerator.current_stream() == accelerator.default_stream()
    assert torch.accelerator.current_device_index() == 0


@pytest.mark.usefixtures("two_devices")
def test_gradients_cross_devices(accelerator: Accelerator) -> None:
    leaf = accelerator.full(2.0).requires_grad_()
    there = (leaf * 3).to(accelerator.device(1)) * 2
    there.backward(torch.full_like(there, 5.0))
    assert leaf.grad is not None
    assert leaf.grad.device == accelerator.device(0)
    assert leaf.grad.unique().tolist() == [30.0]
