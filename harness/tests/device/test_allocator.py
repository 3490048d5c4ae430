"""The caching allocator: whose memory is whose, and when it comes back.

A block belongs to the stream that was current when it was allocated: see ``c10/cuda/CUDACachingAllocator.cpp`` in
PyTorch, and "CUDA streams" in PyTorch's CUDA semantics notes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from harness.tests.device.accelerator import Accelerator

SIZE = 300
LARGE_BYTES = 16 << 20
"""From 10 MiB on, CUDA's allocator gives a block a segment of its own."""


def empty(accelerator: Accelerator, size: int = SIZE) -> torch.Tensor:
    return torch.empty(size, device=accelerator.device())


def test_freed_memory_goes_to_its_own_stream_s_next_allocation_though_work_on_it_is_pending(
    accelerator: Accelerator,
) -> None:
    (stream,) = accelerator.streams(1)
    with accelerator.busy(stream), stream:
        first = empty(accelerator).fill_(1.0)
        address = first.data_ptr()
        del first
        second = empty(accelerator)
        assert second.data_ptr() == address
        assert not stream.query()


def test_freed_memory_never_goes_to_another_stream(accelerator: Accelerator) -> None:
    first, second = accelerator.streams(2)
    with first:
        value = empty(accelerator)
    address = value.data_ptr()
    del value
    for stream in (second, accelerator.default_stream()):
        with stream:
            assert empty(accelerator).data_ptr() != address


def test_memory_that_another_stream_still_reads_is_reused_without_record_stream(accelerator: Accelerator) -> None:
    owner, reader = accelerator.streams(2)
    seen = accelerator.full(0.0, size=SIZE)
    with accelerator.busy(reader):
        with owner:
            value = empty(accelerator).fill_(1.0)
        reader.wait_stream(owner)
        with reader:
            seen.copy_(value)
        del value
        with owner:
            empty(accelerator).fill_(2.0)
        owner.synchronize()
    assert seen.unique().tolist() == [2.0]


def test_record_stream_keeps_memory_until_the_stream_has_finished_with_it(accelerator: Accelerator) -> None:
    owner, reader = accelerator.streams(2)
    seen = accelerator.full(0.0, size=SIZE)
    with accelerator.busy(reader):
        with owner:
            value = empty(accelerator).fill_(1.0)
        reader.wait_stream(owner)
        with reader:
            seen.copy_(value)
        value.record_stream(reader)
        address = value.data_ptr()
        del value
        with owner:
            other = empty(accelerator).fill_(2.0)
        assert other.data_ptr() != address
        owner.synchronize()
        assert not reader.query()
    assert seen.unique().tolist() == [1.0]
    with owner:
        assert empty(accelerator).data_ptr() == address


def test_record_stream_does_not_wait_for_work_enqueued_after_the_memory_was_freed(accelerator: Accelerator) -> None:
    owner, reader, late = accelerator.streams(3)
    with accelerator.busy(late):
        with owner:
            value = empty(accelerator)
        value.record_stream(reader)
        address = value.data_ptr()
        del value
        freed = reader.record_event()
        reader.wait_stream(late)
        freed.synchronize()
        with owner:
            assert empty(accelerator).data_ptr() == address
        assert not reader.query()


def test_memory_waits_for_all_the_streams_that_it_was_recorded_on(accelerator: Accelerator) -> None:
    owner, idle, reader = accelerator.streams(3)
    with accelerator.busy(reader):
        with owner:
            value = empty(accelerator)
        for stream in (idle, reader):
            value.record_stream(stream)
        address = value.data_ptr()
        del value
        idle.synchronize()
        with owner:
            other = empty(accelerator)
        assert other.data_ptr() != address
    with owner:
        assert empty(accelerator).data_ptr() == address


def test_a_record_on_the_stream_that_owns_the_memory_changes_nothing(accelerator: Accelerator) -> None:
    (stream,) = accelerator.streams(1)
    with accelerator.busy(stream), stream:
        value = empty(accelerator)
        value.record_stream(stream)
        address = value.data_ptr()
        del value
        assert empty(accelerator).data_ptr() == address
        assert not stream.query()


def test_record_stream_of_a_view_keeps_all_of_its_memory(accelerator: Accelerator) -> None:
    owner, reader = accelerator.streams(2)
    with accelerator.busy(reader):
        with owner:
            value = empty(accelerator)
        value[SIZE // 2 :].record_stream(reader)
        address = value.data_ptr()
        del value
        with owner:
            assert empty(accelerator).data_ptr() != address


def test_work_that_was_enqueued_before_its_input_was_freed_still_reads_it(accelerator: Accelerator) -> None:
    (stream,) = accelerator.streams(1)
    seen = accelerator.full(0.0, size=SIZE)
    with accelerator.busy(stream), stream:
        value = empty(accelerator).fill_(2.0)
        seen.copy_(value)
        del value
        empty(accelerator).fill_(3.0)
    assert seen.unique().tolist() == [2.0]


def test_memory_belongs_to_the_stream_that_was_current_and_not_to_the_one_that_frees_it(
    accelerator: Accelerator,
) -> None:
    owner, other = accelerator.streams(2)
    with owner:
        value = empty(accelerator)
    address = value.data_ptr()
    with other:
        del value
        assert empty(accelerator).data_ptr() != address
    with owner:
        assert empty(accelerator).data_ptr() == address


def test_sizes_are_rounded_up_to_512_bytes(accelerator: Accelerator) -> None:
    allocated = accelerator.module.memory_allocated
    before = allocated()
    for size, rounded in ((1, 512), (128, 512), (129, 1024), (1000, 4096)):
        value = empty(accelerator, size)
        assert value.data_ptr() % 512 == 0
        assert allocated() - before == rounded
        del value
        assert allocated() == before


def test_memory_lives_as_long_as_any_tensor_that_uses_it(accelerator: Accelerator) -> None:
    allocated = accelerator.module.memory_allocated
    before = allocated()
    value = empty(accelerator, 128)
    view = value[3:5]
    del value
    assert allocated() - before == 512
    del view
    assert allocated() == before


def test_an_empty_tensor_has_no_memory(accelerator: Accelerator) -> None:
    before = accelerator.module.memory_allocated()
    value = empty(accelerator, 0)
    assert value.data_ptr() == 0
    assert accelerator.module.memory_allocated() == before


def test_memory_is_no_longer_allocated_once_freed_though_a_stream_still_uses_it(accelerator: Accelerator) -> None:
    owner, reader = accelerator.streams(2)
    before = accelerator.module.memory_allocated()
    with accelerator.busy(reader):
        with owner:
            value = empty(accelerator, 128)
        value.record_stream(reader)
        assert accelerator.module.memory_allocated() - before == 512
        del value
        assert accelerator.module.memory_allocated() == before


def test_the_peak_is_the_most_that_was_allocated_at_once(accelerator: Accelerator) -> None:
    module = accelerator.module
    module.reset_peak_memory_stats()
    before = module.memory_allocated()
    assert module.max_memory_allocated() == before
    values = [empty(accelerator, 128) for _ in range(3)]
    del values
    empty(accelerator, 128)
    assert module.memory_allocated() == before
    assert module.max_memory_allocated() - before == 3 * 512
    module.reset_peak_memory_stats()
    assert module.max_memory_allocated() == before


@pytest.mark.usefixtures("two_devices")
def test_each_device_counts_its_own_memory(accelerator: Accelerator) -> None:
    before = [accelerator.module.memory_allocated(index) for index in (0, 1)]
    value = torch.empty(128, device=accelerator.device(1))
    after = [accelerator.module.memory_allocated(index) for index in (0, 1)]
    assert [new - old for new, old in zip(after, before, strict=True)] == [0, 512]
    del value


def emptying_calls(accelerator: Accelerator) -> list[Callable[[], None]]:
    calls = [accelerator.module.empty_cache]
    if hasattr(torch.accelerator, "empty_cache"):
        calls.append(torch.accelerator.empty_cache)
    return calls


def test_empty_cache_gives_free_memory_back_and_no_other(accelerator: Accelerator) -> None:
    module = accelerator.module
    for empty_cache in emptying_calls(accelerator):
        empty_cache()
        kept = torch.full((LARGE_BYTES // 4,), 2.0, device=accelerator.device())
        freed = empty(accelerator, LARGE_BYTES // 4)
        allocated, reserved = module.memory_allocated(), module.memory_reserved()
        assert reserved >= allocated
        del freed
        assert module.memory_allocated() == allocated - LARGE_BYTES
        assert module.memory_reserved() == reserved
        empty_cache()
        assert module.memory_reserved() <= reserved - LARGE_BYTES
        assert kept[0].item() == 2.0


def test_empty_cache_gives_memory_back_that_pending_work_used(accelerator: Accelerator) -> None:
    (stream,) = accelerator.streams(1)
    seen = accelerator.full(0.0, size=LARGE_BYTES // 4)
    with accelerator.busy(stream), stream:
        value = empty(accelerator, LARGE_BYTES // 4).fill_(2.0)
        seen.copy_(value)
        del value
        reserved = accelerator.module.memory_reserved()
        accelerator.module.empty_cache()
        assert accelerator.module.memory_reserved() <= reserved - LARGE_BYTES
    assert seen[:256].unique().tolist() == [2.0]


def test_more_memory_than_there_is_is_an_out_of_memory_error(accelerator: Accelerator) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 50, dtype=torch.uint8, device=accelerator.device())
    assert accelerator.full(1.0).sum().item() == 256.0
