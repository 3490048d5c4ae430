"""Copies overlap compute, and the ordering that correctness needs does not take that away.

A copy between pinned memory and the device, enqueued ``non_blocking`` on a stream of its own, is carried out by a copy
engine while kernels of another stream run (https://docs.pytorch.org/docs/stable/notes/cuda.html, "Use pinned memory
buffers"). That is what prefetching and offloading are for, and a wait too many would silently end it. Whether it
happens is read from a trace of PyTorch's profiler, which is kept with the results; nothing is asserted about how long
anything takes. The values are the business of ``test_copies.py``.
"""

import pytest
import torch

ROWS = 4096
BATCHES = 6

pytestmark = pytest.mark.contract(
    "CUDA semantics, 'Use pinned memory buffers'; pytorch/pytorch docs/source/notes/cuda.rst"
)


@pytest.fixture
def compute():
    return torch.Stream()


@pytest.fixture
def copying():
    return torch.Stream()


def host_batches():
    return [torch.ones(ROWS, ROWS).pin_memory() for _ in range(BATCHES)]


def test_independent_copies_run_beside_compute(profiled, compute, copying):
    """Copies on a stream of their own run while a matrix product runs on another."""
    batches = host_batches()
    device = torch.accelerator.current_accelerator()
    weight = torch.ones(ROWS, ROWS, device=device)
    buffers = [torch.empty(ROWS, ROWS, device=device) for _ in range(2)]
    torch.accelerator.synchronize()

    def body():
        with compute:
            for _ in range(4 * BATCHES):
                torch.mm(weight, weight)
        with copying:
            for number, batch in enumerate(batches):
                buffers[number % 2].copy_(batch, non_blocking=True)

    timeline = profiled(body)
    assert len(timeline.copies) == BATCHES
    assert all(timeline.beside_kernels_us(copy) > 0 for copy in timeline.copies[1:-1])


def test_a_prefetch_that_is_waited_for_still_runs_beside_compute(profiled, compute, copying):
    """Each batch is waited for before its use, each buffer before it is filled again: copies overlap all the same."""
    batches = host_batches()
    device = torch.accelerator.current_accelerator()
    weight = torch.ones(ROWS, ROWS, device=device, requires_grad=True)
    buffers = [torch.empty(ROWS, ROWS, device=device) for _ in range(2)]
    torch.accelerator.synchronize()

    def body():
        used = [compute.record_event() for _ in buffers]
        for number, batch in enumerate(batches):
            buffer = buffers[number % 2]
            with copying:
                copying.wait_event(used[number % 2])
                buffer.copy_(batch, non_blocking=True)
                ready = copying.record_event()
            with compute:
                compute.wait_event(ready)
                torch.mm(buffer, weight).sum().backward()
                used[number % 2] = compute.record_event()

    timeline = profiled(body)
    assert len(timeline.copies) == BATCHES
    # The first fills the buffer that the first product waits for; the next ones run while products do.
    assert sum(timeline.beside_kernels_us(copy) > 0 for copy in timeline.copies[1:]) >= BATCHES - 2


def test_gradients_are_offloaded_beside_the_backward_that_makes_the_next(profiled, compute, copying):
    """A gradient is copied to the host as soon as it is made, while backward goes on."""
    device = torch.accelerator.current_accelerator()
    weights = [torch.ones(ROWS, ROWS, device=device, requires_grad=True) for _ in range(BATCHES)]
    batch = torch.ones(ROWS, ROWS, device=device)
    kept = [torch.empty(ROWS, ROWS).pin_memory() for _ in range(BATCHES)]
    torch.accelerator.synchronize()

    def offload(number):
        def hook(weight):
            copying.wait_event(compute.record_event())
            with copying:
                kept[number].copy_(weight.grad, non_blocking=True)
                weight.grad.record_stream(copying)
            weight.grad = None

        return hook

    for number, weight in enumerate(weights):
        weight.register_post_accumulate_grad_hook(offload(number))

    def body():
        with compute:
            value = batch
            for weight in weights:
                value = torch.mm(value, weight)
            value.sum().backward()

    timeline = profiled(body)
    offloads = [copy for copy in timeline.copies if "DtoH" in copy.name]
    assert len(offloads) == BATCHES
    # Nothing is left to compute beside the last one.
    assert sum(timeline.beside_kernels_us(copy) > 0 for copy in offloads[:-1]) >= BATCHES - 2
