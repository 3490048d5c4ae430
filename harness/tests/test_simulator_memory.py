"""The simulator's caching allocator."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from harness.errors import UsageError
from harness.observe.instrument import Instrument
from harness.observe.streams import StreamNames
from harness.perturb.plan import Plan
from harness.perturb.schedule import RandomWalk
from harness.tests.simulator_support import Repetition, filled, preparing, registered, repetition, streams


@pytest.fixture(scope="module")
def native() -> ModuleType:
    module = registered()
    gc.collect()
    return module


def test_fresh_memory_is_nan(native: ModuleType) -> None:
    native.empty_cache()
    assert torch.empty(1234, device="sim").isnan().all().item()
    assert torch.empty(1234, device="sim", dtype=torch.bfloat16).isnan().all().item()


def test_a_freed_block_is_reused_at_once_by_its_own_stream_last_in_first_out(native: ModuleType) -> None:
    first, second = streams(2)
    with first:
        blocks = [torch.empty(100, device="sim") for _ in range(2)]
    addresses = [block.data_ptr() for block in blocks]
    for _ in addresses:
        blocks.pop(0)
    with second:
        foreign = torch.empty(100, device="sim")
    assert foreign.data_ptr() not in addresses
    with first:
        again = [torch.empty(100, device="sim") for _ in range(2)]
    assert [block.data_ptr() for block in again] == addresses[::-1]


def test_reuse_before_another_stream_has_finished_reading_is_seen(native: ModuleType) -> None:
    """Without record_stream, memory is reused though another stream still reads it: that bug must be able to happen."""
    results = {}
    for recorded in (False, True):
        owner, reader = streams(2)
        with repetition(native, [(reader, 0)]) as result:
            with preparing(native):
                seen = filled(100, -1.0)
            with owner:
                value = filled(100, 1.0)
            reader.wait_stream(owner)
            with reader:
                seen.copy_(value)  # held
            if recorded:
                value.record_stream(reader)
            del value
            with owner:
                other = filled(100, 2.0)
        results[recorded] = seen[0].item()
        allocations = result.of_kind("allocate")
        (free,) = result.of_kind("free")
        event = result.of_kind("record")[-1]
        if recorded:
            assert free[6] == (event[3],) and event[2] == reader.stream_id
            assert allocations[1][1] != allocations[0][1]
        else:
            assert free[6] == ()
            assert allocations[1][1] == allocations[0][1]
        del other
    assert results == {False: 2.0, True: 1.0}


def test_a_deferred_block_comes_back_when_its_recordings_are_complete(native: ModuleType) -> None:
    owner, reader = streams(2)
    with repetition(native) as result:
        with owner:
            value = torch.empty(100, device="sim")
        with preparing(native):
            value.record_stream(reader)  # counts, but is not traced
        value.record_stream(reader)
        value.record_stream(owner)  # its own stream needs no recording
        del value
        with owner:
            torch.empty(100, device="sim")
    first, second = result.of_kind("allocate")
    free = result.of_kind("free")[0]
    (record,) = result.of_kind("record")
    assert free[6] == second[6] == (record[3],)
    assert first[1] == second[1] and first[6] == ()
    block = first[1]
    assert result.of_kind("record_stream") == [
        ("record_stream", block, 0, 512, 0, reader.stream_id),
        ("record_stream", block, 0, 512, 0, owner.stream_id),
    ]


def test_the_engine_s_record_stream_reaches_the_allocator(native: ModuleType) -> None:
    forward, other = streams(2)
    with repetition(native) as result:
        with preparing(native), forward:
            leaf = filled(8, 2.0).requires_grad_()
            first = leaf * 3
        other.wait_stream(forward)
        with other:
            second = leaf * 5
        total = first.sum() + second.sum()
        total.backward()
    (free,) = [entry for entry in result.of_kind("free") if entry[6]]
    recorded = {entry[3]: entry[1:3] for entry in result.of_kind("record")}
    recorded_streams = {entry[4:] for entry in result.of_kind("record_stream") if entry[1] == free[1]}
    assert {recorded[event] for event in free[6]} == recorded_streams - {free[4:6]} != set()


def test_memory_freed_in_one_repetition_is_poisoned_for_the_next(native: ModuleType) -> None:
    (stream,) = streams(1)
    with stream:
        for expected_nan in (False, True):
            with repetition(native):
                value = filled(777, 1.0)
            address = value.data_ptr()
            del value
            if expected_nan:
                with repetition(native):
                    value = torch.empty(777, device="sim")
                assert value.data_ptr() == address
                assert value.isnan().all().item()


@contextlib.contextmanager
def poisoning(native: ModuleType) -> Iterator[None]:
    native.set_poisoning(True)
    try:
        yield
    finally:
        native.set_poisoning(False)


def read_and_free(
    native: ModuleType, *, held: str | None, recorded: bool = False, waits: bool = False
) -> tuple[list[float], Repetition]:
    """A tensor made and written on one stream, read on another, and freed; what was read, and the trace."""
    owner, reader = streams(2)
    stream, index = {None: (owner, 9), "write": (owner, 0), "read": (reader, 0)}[held]
    with repetition(native, [(stream, index)]) as result:
        with preparing(native):
            seen = filled(100, -1.0)
            with owner:
                value, other = filled(100, 1.0), filled(100, 1.0)
        with owner:
            value.add_(1)
        reader.wait_stream(owner)
        with reader:
            seen.copy_(value)
        if recorded:
            value.record_stream(reader)
        if waits:
            owner.wait_stream(reader)
        del value
        with owner:
            other.add_(1)
    return seen[:2].tolist(), result


@pytest.mark.parametrize("held", [None, "write", "read"])
def test_a_poisoned_free_shows_that_record_stream_is_missing(native: ModuleType, held: str | None) -> None:
    with poisoning(native):
        seen = read_and_free(native, held=held)[0]
        assert [value != value for value in seen] == [held == "read"] * 2
        assert read_and_free(native, held=held, recorded=True)[0] == [2.0] * 2, "deferred"
        assert read_and_free(native, held=held, waits=True)[0] == [2.0] * 2, "in order"
    assert read_and_free(native, held=held)[0] == [2.0] * 2


@pytest.mark.parametrize("held", [None, "write", "read"])
def test_a_poisoned_free_is_neither_counted_nor_traced(native: ModuleType, held: str | None) -> None:
    def shape(result: Repetition) -> list[tuple[Any, ...]]:
        kept = {"launch": [0, 3, 4, 8], "free": [0, 1, 2, 3, 6], "record": [0, 3], "wait": [0, 3]}
        return [tuple(entry[i] for i in kept[entry[0]]) for entry in result.entries]

    plain = read_and_free(native, held=held)[1]
    with poisoning(native):
        poisoned = read_and_free(native, held=held)[1]
    assert shape(poisoned) == shape(plain)
    assert poisoned.outcomes == plain.outcomes


def test_a_poisoned_free_comes_after_what_its_stream_still_has_to_do(native: ModuleType) -> None:
    (owner,) = streams(1)
    with poisoning(native), repetition(native, [(owner, 0)]):
        with preparing(native):
            seen = filled(100, -1.0)
            with owner:
                value = filled(100, 1.0)
        with owner:
            value.add_(1)  # held
            seen.copy_(value)
            del value
            value = torch.empty(100, device="sim")
            seen.add_(value.isnan())
    assert seen.tolist() == [3.0] * 100
    del value


def test_only_what_is_freed_in_a_repetition_is_poisoned(native: ModuleType) -> None:
    (stream,) = streams(1)
    with stream, poisoning(native):
        value = filled(997, 1.0)
        memory = value.data_ptr()
        del value
        value = torch.empty(997, device="sim")
        assert value.data_ptr() == memory
        assert value.tolist() == [1.0] * 997


def test_filling_does_not_go_with_a_schedule_that_would_count_it(native: ModuleType) -> None:
    instrument = Instrument(native, StreamNames())
    assert instrument.can_poison
    with pytest.raises(UsageError, match="fill it under the schedule 'submission'"):
        instrument.begin(Plan(), schedule=RandomWalk(seed=1), poison_memory=True)
    instrument.begin(Plan(), poison_memory=True)
    value = filled(997, 1.0)
    del value
    value = torch.empty(997, device="sim")
    assert value.isnan().all()
    instrument.finish()
    instrument.begin(Plan())
    del value
    value = filled(997, 1.0)
    del value
    assert torch.empty(997, device="sim").tolist() == [1.0] * 997
    instrument.finish()
