"""The host as a participant: which accesses to pinned memory a trace has, and what it costs."""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from harness.observe.instrument import Instrument
from harness.observe.streams import StreamNames
from harness.observe.trace import Access, Allocate, Free, HostAccess
from harness.perturb.plan import Plan
from harness.tests import observer_effects
from harness.tests.simulator_support import Repetition, filled, preparing, registered, repetition, streams

SIZE = 8
ITEM = 4  # bytes of a float
ALL = (0, SIZE)


@pytest.fixture(scope="module")
def native() -> ModuleType:
    return registered()


@contextlib.contextmanager
def with_pinned(native: ModuleType) -> Iterator[tuple[torch.Tensor, Repetition]]:
    """A repetition with a pinned tensor of 8 ones."""
    with repetition(native) as result:
        with preparing(native):
            memory = torch.ones(SIZE).pin_memory()
        yield memory, result


def host_accesses(result: Repetition) -> list[tuple[str, list[tuple[tuple[int, int], bool]]]]:
    """(operation, [((first element, one past the last), whether it is written)]) of each host access."""
    return [
        (entry[1], [((start // ITEM, stop // ITEM), write) for _, start, stop, write in entry[5]])
        for entry in result.of_kind("host")
    ]


def read(*runs: tuple[int, int]) -> list[tuple[tuple[int, int], bool]]:
    return [(run, False) for run in runs]


def written(*runs: tuple[int, int]) -> list[tuple[tuple[int, int], bool]]:
    return [(run, True) for run in runs]


USES: list[tuple[Callable[[torch.Tensor], Any], list[Any]]] = [
    (lambda memory: memory[3].item(), [("aten::_local_scalar_dense", read((3, 4)))]),
    (lambda memory: float(memory[3]), [("aten::_local_scalar_dense", read((3, 4)))]),
    (lambda memory: memory[2:4].tolist(), [("Tensor.tolist", read((2, 4)))]),
    (lambda memory: memory[4:].numpy(), [("Tensor.numpy", read((4, 8)))]),
    (np.asarray, [("Tensor.numpy", read(ALL))]),
    (lambda memory: memory.__dlpack__(), [("Tensor.__dlpack__", read(ALL))]),
    (pickle.dumps, [("Tensor.__reduce_ex__", read(ALL))]),
    (lambda memory: torch.from_numpy(memory.numpy()[2:])[1].item(),
     [("Tensor.numpy", read(ALL)), ("aten::_local_scalar_dense", read((3, 4)))]),
    (lambda memory: memory.sum(), [("aten::sum.dim_IntList", read(ALL))]),
    (lambda memory: memory[::4] + 1, [("aten::add.Tensor", read((0, 1), (4, 5)))]),
    (lambda memory: memory.view(2, 4)[torch.tensor([1])], [("aten::index.Tensor", read(ALL))]),
    (lambda memory: memory.clone(), [("aten::copy_", read(ALL))]),
    (lambda memory: torch.cat([memory[:2], torch.zeros(1), memory[6:]]), [("aten::cat", read((0, 2), (6, 8)))]),
    (lambda memory: torch.equal(memory, torch.zeros(SIZE)), [("aten::equal", read(ALL))]),
    (lambda memory: torch.empty(SIZE).copy_(memory), [("aten::copy_", read(ALL))]),
    (lambda memory: memory[1:3].copy_(torch.zeros(2)), [("aten::copy_", written((1, 3)))]),
    (lambda memory: memory[1:3].fill_(2.0), [("aten::fill_.Scalar", written((1, 3)))]),
    (lambda memory: memory.__setitem__(5, 2.0), [("aten::copy_", written((5, 6)))]),
    (lambda memory: memory.add_(1.0), [("aten::add_.Tensor", written(ALL))]),
    (lambda memory: memory.zero_(), [("aten::zero_", written(ALL))]),
    (lambda memory: torch.ones(4, out=memory[:4]), [("aten::fill_.Scalar", written((0, 4)))]),
    (lambda memory: torch.add(memory[:4], 1, out=memory[4:]), [("aten::add.out", read((0, 4)) + written((4, 8)))]),
    (lambda memory: torch._foreach_add_([memory[:1], memory[7:]], 1.0),
     [("aten::add_.Tensor", written((0, 1))), ("aten::add_.Tensor", written((7, 8)))]),
    # Composite, and yet they read themselves.
    (lambda memory: torch.nn.functional.conv1d(memory.view(1, 1, -1), torch.ones(1, 1, 3)),
     [("aten::_convolution", read(ALL))]),
    (lambda memory: torch.nn.functional.max_pool1d(memory.view(1, 1, -1), 2), [("aten::max_pool1d", read(ALL))]),
    # The device reads a scalar and an index on the host when they are enqueued.
    (lambda memory: filled(SIZE, 1.0).mul_(memory[2]), [("aten::mul_.Tensor", read((2, 3)))]),
    # What there is to say of a copy the copy says.
    (lambda memory: filled(SIZE, 1.0).copy_(memory, non_blocking=True), []),
    (lambda memory: memory.to("sim", non_blocking=True), []),
    (lambda memory: filled(4, 1.0).copy_(memory[::2], non_blocking=True),
     [("aten::copy_", read((0, 1), (2, 3), (4, 5), (6, 7)))]),
    (lambda memory: memory[::4].copy_(filled(2, 1.0), non_blocking=True),
     [("aten::copy_", written((0, 1), (4, 5)))]),
    # Nothing is read or written here.
    (lambda memory: (memory.view(2, 4).t()[1:].unsqueeze(0).expand(3, -1, -1), memory.detach().split(3)), []),
    (lambda memory: (memory.is_pinned(), memory.data_ptr(), memory.pin_memory(), memory.stride()), []),
    (lambda memory: (torch.empty_like(memory), memory.new_zeros(3), filled(3, 1.0).add_(1.0)), []),
]  # fmt: skip


@pytest.mark.parametrize(("use", "expected"), USES)
def test_what_the_host_accesses(native: ModuleType, use: Callable[[torch.Tensor], Any], expected: list[Any]) -> None:
    with with_pinned(native) as (memory, result):
        use(memory)
    assert host_accesses(result) == expected


def test_printing_reads(native: ModuleType) -> None:
    with with_pinned(native) as (memory, result):
        print(memory, file=io.StringIO())
    accesses = host_accesses(result)
    assert accesses and {access for _, runs in accesses for access in runs} == {(ALL, False)}


def test_copies_list_the_bytes_of_pinned_memory(native: ModuleType) -> None:
    with with_pinned(native) as (memory, result):
        with preparing(native):
            value = filled(SIZE, 2.0)
        value[:3].copy_(memory[5:], non_blocking=True)
        memory[1:4].copy_(value[:3])
    host, device = 0, 1  # by first appearance
    assert [entry[8] for entry in result.of_kind("launch")] == [
        ((host, 5 * ITEM, 8 * ITEM, False), (device, 0, 3 * ITEM, True)),
        ((device, 0, 3 * ITEM, False), (host, ITEM, 4 * ITEM, True)),
    ]
    assert len(result.of_kind("sync_stream")) == 1 and result.of_kind("host") == []


def test_the_simulator_s_own_kernels_are_not_the_host(native: ModuleType) -> None:
    (held,) = streams(1)
    with repetition(native, [(held, 0)]) as result:
        with preparing(native):
            memory, value = torch.ones(SIZE).pin_memory(), filled(SIZE, 2.0)
        with held:
            value.add_(1.0)
            memory.copy_(value, non_blocking=True)
            torch.linalg.norm(value)
            value[:4].copy_(torch.ones(4), non_blocking=True)
        held.synchronize()
    assert result.of_kind("host") == [] and memory.tolist() == [3.0] * SIZE


def test_a_conjugate_is_two_accesses(native: ModuleType) -> None:
    with repetition(native) as result:
        with preparing(native):
            memory, value = torch.zeros(4, dtype=torch.complex64).pin_memory(), filled(4, 1.0) * 1j
        memory.copy_(value.conj(), non_blocking=True)
    assert [entry[0] for entry in result.entries] == ["launch", "host"]
    assert host_accesses(result) == [("aten::conj_physical_", written((0, 8)))]


def test_pinned_memory_in_the_trace(native: ModuleType) -> None:
    (stream,) = streams(1)
    with repetition(native) as result:
        with preparing(native):
            value = filled(1000, 1.0)
        memory = torch.empty(1000, pin_memory=True)
        with stream:
            value.copy_(memory, non_blocking=True)
        del memory
        again = torch.empty(1000, pin_memory=True)
    allocated, reused = result.of_kind("allocate")
    (record,) = result.of_kind("record")
    (freed,) = result.of_kind("free")
    assert allocated == ("allocate", 0, 0, 4096, -1, -1, ())
    assert record == ("record", 0, stream.stream_id, 1)
    assert freed[:7] == ("free", 0, 0, 4096, -1, -1, (1,))
    assert reused == ("allocate", 0, 0, 4096, -1, -1, (1,))
    assert [entry[0] for entry in result.entries] == ["allocate", "launch", "record", "free", "allocate"]
    del again


def test_pinned_memory_in_the_common_format(native: ModuleType) -> None:
    instrument = Instrument(native, StreamNames())
    instrument.begin(Plan())
    torch.empty(1000, pin_memory=True).fill_(1.0)
    assert instrument.finish().trace == [
        Allocate(0, 0, 4096, None, ()),
        HostAccess("aten::fill_.Scalar", None, None, (Access(0, 0, 4000, True),)),
        Free(0, 0, 4096, None, (), None),
    ]


def test_an_asynchronous_copy_does_not_keep_its_memory_from_being_freed(native: ModuleType) -> None:
    (held,) = streams(1)
    with repetition(native, [(held, 0)]) as result:
        with preparing(native):
            memory, value = torch.ones(SIZE).pin_memory(), filled(SIZE, 2.0)
        with held:
            value.copy_(memory, non_blocking=True)
        del memory
        assert torch.empty(SIZE, pin_memory=True).tolist() != [1.0] * SIZE
    assert len(result.of_kind("free")) == 2 and value.tolist() == [1.0] * SIZE


def test_a_copy_that_the_allocator_does_not_know_of(native: ModuleType) -> None:
    """A NumPy array over the middle of a block says neither who owns the memory nor where the block begins."""
    (held,) = streams(1)
    with repetition(native, [(held, 0)]) as result:
        with preparing(native):
            memory, value = torch.ones(1 << 12).pin_memory(), filled(SIZE, 2.0)
        address = memory.data_ptr()
        part = torch.from_numpy(memory.numpy()[SIZE : 2 * SIZE])
        with held:
            value.copy_(part, non_blocking=True)
        del part
        del memory
        again = torch.empty(1 << 12, pin_memory=True)
        assert again.data_ptr() == address
        again.fill_(5.0)
    assert value.tolist() == [5.0] * SIZE
    assert [entry[6] for entry in result.of_kind("free")] == [()]


def test_pinned_memory_freed_in_one_repetition_is_poisoned_for_the_next(native: ModuleType) -> None:
    with repetition(native):
        memory = torch.full((1 << 13,), 3.0).pin_memory()
        address = memory.data_ptr()
        del memory
    with repetition(native):
        memory = torch.empty(1 << 13, pin_memory=True)
        assert memory.data_ptr() == address and memory.isnan().all()


def test_host_accesses_have_nodes_and_lines(native: ModuleType) -> None:
    class _Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
            ctx.memory = memory
            return value * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return gradient * ctx.memory[0].item(), None

    with repetition(native, lines=True) as result:
        with preparing(native):
            memory, leaf = torch.ones(SIZE).pin_memory(), filled(SIZE, 2.0).requires_grad_()
        memory.sum()
        _Reads.apply(leaf, memory).sum().backward()
    first, second = result.of_kind("host")
    start = test_host_accesses_have_nodes_and_lines.__code__.co_firstlineno
    assert (first[1:3], first[3], first[4] - start) == (("aten::sum.dim_IntList", None), __file__, 14)
    assert (second[1:3], second[3], second[4] - start) == (("aten::_local_scalar_dense", "_ReadsBackward"), __file__, 9)


@pytest.mark.parametrize("effect", observer_effects.ALL, ids=lambda effect: effect.__name__)
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_autograd_does_the_same_while_the_host_is_observed(native: ModuleType, effect: Any, device: str) -> None:
    with with_pinned(native) as (memory, result):
        seen = effect(device)
        memory.sum()
    assert seen == observer_effects.WANTED[effect] and host_accesses(result) == [("aten::sum.dim_IntList", read(ALL))]


def test_a_hook_that_packs_accesses_memory_itself_although_an_operation_is_running(native: ModuleType) -> None:
    with with_pinned(native) as (memory, result):
        leaf = filled(SIZE, 2.0).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: (tensor, memory[3].item()), lambda packed: packed[0]
        ):
            leaf.square()
    assert host_accesses(result) == [("aten::_local_scalar_dense", read((3, 4)))]


def test_without_a_repetition_or_pinned_memory_nothing_is_observed(native: ModuleType) -> None:
    assert not native.observes_host()
    memory = torch.ones(SIZE).pin_memory()
    assert not native.observes_host()
    with repetition(native):
        assert native.observes_host()
        memory = memory[:1].clone()
        assert not native.observes_host()
        memory = torch.ones(SIZE).pin_memory()
        assert native.observes_host()
    assert not native.observes_host()
