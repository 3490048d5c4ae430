"""What makes the host wait, and for what: reading a value waits for the current stream, and for nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness.tests.device.accelerator import Accelerator

Read = Callable[[torch.Tensor], Any]

READS: dict[str, Read] = {
    "item": lambda value: value[0].item(),
    "bool": lambda value: bool(value[0]),
    "float": lambda value: float(value[0]),
    "int": lambda value: int(value[0]),
    "cpu": lambda value: value.cpu(),
    "to": lambda value: value.to("cpu"),
    "tolist": lambda value: value.tolist(),
    "print": repr,
    "nonzero": lambda value: value.nonzero(),
    "boolean index": lambda value: value[value > 0],
    "equal": lambda value: torch.equal(value, value.clone()),
    "unique": lambda value: value.unique(),
}

ENQUEUES: dict[str, Read] = {
    "arithmetic": lambda value: value * 2 + 1,
    "reduction": lambda value: value.sum(),
    "comparison": lambda value: value > 0,
    "copy": lambda value: value.clone(),
    "view": lambda value: value.view(-1, 2)[1:].t(),
    "fill": lambda value: torch.full_like(value, 3.0),
    "random": lambda value: torch.rand_like(value),
    "index": lambda value: value.index_select(0, torch.arange(2, device=value.device)),
    "metadata": lambda value: (value.shape, value.stride(), value.data_ptr(), value.is_contiguous(), len(value)),
    "in place": lambda value: value.add_(1.0),
}


@pytest.mark.parametrize("name", READS)
def test_reading_a_value_waits_for_the_current_stream(accelerator: Accelerator, name: str) -> None:
    (stream,) = accelerator.streams(1)
    value = accelerator.full(1.0, size=8)
    with stream:
        READS[name](value)
        with accelerator.busy(stream):
            value.fill_(2.0)
            done = stream.record_event()
            assert not done.query()
            READS[name](value)
            assert done.query()


@pytest.mark.parametrize("name", READS)
def test_reading_a_value_does_not_wait_for_other_streams(accelerator: Accelerator, name: str) -> None:
    stream, other = accelerator.streams(2)
    value = accelerator.full(1.0, size=8)
    for current in (stream, accelerator.default_stream()):
        with current:
            READS[name](value)
            with accelerator.busy(other):
                READS[name](value)
                assert not other.query()


@pytest.mark.parametrize("name", ENQUEUES)
def test_enqueueing_does_not_wait(accelerator: Accelerator, name: str) -> None:
    (stream,) = accelerator.streams(1)
    value = accelerator.full(1.0, size=8)
    with stream:
        ENQUEUES[name](value)
        with accelerator.busy(stream):
            ENQUEUES[name](value)
            assert not stream.query()


def test_a_value_read_is_that_of_the_current_stream(accelerator: Accelerator) -> None:
    (stream,) = accelerator.streams(1)
    value = accelerator.full(1.0, size=8)
    with accelerator.busy(stream):
        with stream:
            value.fill_(2.0)
        assert value[0].item() == 1.0
        with stream:
            assert value[0].item() == 2.0


def test_a_host_that_polls_an_event_sees_it_complete(accelerator: Accelerator) -> None:
    (stream,) = accelerator.streams(1)
    with accelerator.busy(stream):
        event = stream.record_event()
        while not event.query():
            pass
        assert stream.query()


def test_a_host_that_polls_a_stream_sees_it_complete(accelerator: Accelerator) -> None:
    (stream,) = accelerator.streams(1)
    with accelerator.busy(stream):
        event = stream.record_event()
        while not stream.query():
            pass
        assert event.query()
