"""The tap sees of pinned memory, and of hooks inside an operation, what the simulated accelerator itself sees.

The tap knows a block from the first copy on that uses it, so each program begins with one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import harness.observe.tap as tap_package
from harness.judge.happens_before import find_races
from harness.observe.instrument import Instrument
from harness.observe.streams import StreamNames
from harness.observe.trace import Trace
from harness.perturb.plan import Plan
from harness.tests.simulator_support import Repetition, filled, preparing, registered, repetition, streams
from harness.tests.test_simulator_host import SIZE, USES, host_accesses

Tap = Any


@pytest.fixture(scope="module")
def simulator() -> ModuleType:
    return registered()


@pytest.fixture(scope="module")
def tap(simulator: ModuleType) -> Iterator[Tap]:
    native = tap_package.install("sim")
    native.set_ignored_prefixes([str(Path(torch.__file__).parent), str(Path(contextlib.__file__))])
    native.set_sleep_fallback(lambda cycles: None)
    yield native
    tap_package.remove()


@contextlib.contextmanager
def observed_by_both(tap: Tap, simulator: ModuleType) -> Iterator[tuple[torch.Tensor, Repetition, Repetition]]:
    """A repetition with a pinned tensor of 8 ones that a copy has used."""
    with repetition(tap) as result, repetition(simulator) as expected:
        tap.set_preparing(True)
        with preparing(simulator):
            memory, value = torch.ones(SIZE).pin_memory(), filled(SIZE, 2.0)
        tap.set_preparing(False)
        value.copy_(memory)
        yield memory, result, expected


def reads_first(access: tuple[int, int, int, bool]) -> bool:
    return access[3]


def copies(result: Repetition) -> list[list[tuple[int, int, int, bool]]]:
    """What each copy accesses, blocks numbered in the order of the launches."""
    blocks: dict[int, int] = {}
    return [
        sorted((blocks.setdefault(block, len(blocks)), *rest) for block, *rest in sorted(entry[8], key=reads_first))
        for entry in result.of_kind("launch")
        if entry[4].startswith("aten::copy_")
    ]


@pytest.mark.parametrize("use", [use for use, _ in USES])
def test_it_sees_what_the_host_accesses(tap: Tap, simulator: ModuleType, use: Callable[[torch.Tensor], Any]) -> None:
    with observed_by_both(tap, simulator) as (memory, result, expected):
        use(memory)
    assert host_accesses(result) == host_accesses(expected)
    assert copies(result) == copies(expected)


def test_accesses_have_the_block_of_the_copies(tap: Tap, simulator: ModuleType) -> None:
    with observed_by_both(tap, simulator) as (memory, result, _):
        memory[2:4].tolist()
        torch.from_numpy(memory.numpy()[2:])[1].item()
    (upload,) = result.of_kind("launch")
    (block,) = {block for block, _, _, write in upload[8] if not write}
    assert [access[:3] for entry in result.of_kind("host") for access in entry[5]] == [
        (block, 8, 16),
        (block, 0, 32),
        (block, 12, 16),
    ]


def test_pinned_memory_is_the_host_s_own(tap: Tap, simulator: ModuleType) -> None:
    with observed_by_both(tap, simulator) as (memory, result, _):
        memory.copy_(filled(SIZE, 3.0))
    (handed_out,) = [entry for entry in result.of_kind("allocate") if entry[4] < 0]
    assert handed_out[2:] == (0, 4 * SIZE, -1, 0, ())
    assert [entry[0] for entry in result.entries][:2] == ["allocate", "launch"]


def test_what_no_copy_uses_is_not_traced(tap: Tap, simulator: ModuleType) -> None:
    with observed_by_both(tap, simulator) as (memory, result, _):
        (torch.ones(SIZE).pin_memory() + torch.ones(SIZE)).tolist()
        filled(SIZE, 1.0).copy_(torch.ones(SIZE))
    assert host_accesses(result) == [] and memory.is_pinned()


def test_nothing_is_traced_while_inputs_are_prepared_nor_of_an_ignored_thread(tap: Tap, simulator: ModuleType) -> None:
    with observed_by_both(tap, simulator) as (memory, result, _):
        tap.set_preparing(True)
        memory.add_(1).tolist()
        tap.set_preparing(False)
        tap.ignore_this_thread(True)
        memory.add_(1).tolist()
        tap.ignore_this_thread(False)
    assert host_accesses(result) == []


def test_reads_are_as_they_were_once_the_tap_is_removed(tap: Tap) -> None:
    watched = torch.Tensor.tolist, torch._C._autograd._push_saved_tensors_default_hooks
    tap_package.remove()
    plain = torch.Tensor.tolist, torch._C._autograd._push_saved_tensors_default_hooks
    again = tap_package.install("sim")
    again.set_ignored_prefixes([str(Path(torch.__file__).parent), str(Path(contextlib.__file__))])
    again.set_sleep_fallback(lambda cycles: None)
    assert all(one is not other for one, other in zip(watched, plain, strict=True))
    assert np.asarray(torch.ones(2)).tolist() == [1.0, 1.0]


# Judged.


def judged(native: Any, program: Callable[[list[torch.Stream]], None]) -> Trace:
    used = streams(2)
    instrument = Instrument(native, StreamNames())
    instrument.begin(Plan())
    try:
        program(used)
    finally:
        recording = instrument.finish()
    return recording.trace


def download(used: list[torch.Stream], wait: Callable[[torch.Stream], object]) -> None:
    memory, value = torch.zeros(SIZE).pin_memory(), filled(SIZE, 3.0)
    used[0].wait_stream(torch.accelerator.current_stream())
    with used[0]:
        memory.copy_(value, non_blocking=True)
    wait(used[0])
    memory.sum()
    torch.accelerator.synchronize(0)


def upload(used: list[torch.Stream], wait: Callable[[torch.Stream], object]) -> None:
    memory, value = torch.ones(SIZE).pin_memory(), filled(SIZE, 3.0)
    used[0].wait_stream(torch.accelerator.current_stream())
    with used[0]:
        value.copy_(memory, non_blocking=True)
    wait(used[0])
    memory[2:].fill_(5.0)
    torch.accelerator.synchronize(0)


def synchronize_event(stream: torch.Stream) -> None:
    stream.record_event().synchronize()


@pytest.mark.parametrize(("program", "kind"), [(download, "read after write"), (upload, "write after read")])
def test_the_host_races_with_a_copy_unless_it_waits(tap: Tap, program: Callable[..., None], kind: str) -> None:
    for wait in (torch.Stream.synchronize, synchronize_event):
        assert find_races(judged(tap, functools.partial(program, wait=wait))) == []
    (race,) = find_races(judged(tap, lambda used: program(used, lambda stream: None)))
    assert (race.kind, race.second_stream) == (kind, None)


def test_a_block_that_the_allocator_hands_out_again_is_no_race(tap: Tap) -> None:
    addresses = []

    def program(used: list[torch.Stream]) -> None:
        value = filled(1 << 13, 3.0)
        used[0].wait_stream(torch.accelerator.current_stream())
        for _ in range(3):
            memory = torch.empty(1 << 13, pin_memory=True).fill_(1.0)
            addresses.append(memory.data_ptr())
            with used[0]:
                value.copy_(memory, non_blocking=True)
            del memory
        used[0].synchronize()

    assert find_races(judged(tap, program)) == []
    assert len(set(addresses)) < len(addresses), "nothing was handed out again"


# The caller's hooks inside an operation.


def launches(result: Repetition) -> list[tuple[Any, ...]]:
    return [entry[:6] for entry in result.of_kind("launch", "wait")]


def pack_on(stream: torch.Stream) -> saved_tensors_hooks:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            return tensor + 1

    return saved_tensors_hooks(pack, lambda packed: packed - 1)


def train(leaf: torch.Tensor) -> None:
    other = filled(SIZE, 3.0).requires_grad_()
    ((leaf * other).exp() + leaf.sigmoid()).sum().backward()


def with_hooks_of_its_own_stream(used: list[torch.Stream], leaf: torch.Tensor) -> None:
    with pack_on(torch.accelerator.current_stream()):
        train(leaf)


def with_hooks_of_another_stream(used: list[torch.Stream], leaf: torch.Tensor) -> None:
    with pack_on(used[0]):
        train(leaf)


def with_tensors_saved_on_the_host(used: list[torch.Stream], leaf: torch.Tensor) -> None:
    with save_on_cpu(pin_memory=True):
        train(leaf)


def with_a_checkpoint_that_stops_early(used: list[torch.Stream], leaf: torch.Tensor) -> None:
    # A hook stops it: with an error, in the midst of the operation whose arguments are the last that are needed.
    checkpoint(lambda value: (value * 2).square().square(), leaf, use_reentrant=False).sum().backward()


HOOKED = [
    with_hooks_of_its_own_stream,
    with_hooks_of_another_stream,
    with_tensors_saved_on_the_host,
    with_a_checkpoint_that_stops_early,
]


@pytest.mark.parametrize("program", HOOKED, ids=lambda program: program.__name__)
def test_what_hooks_launch_inside_an_operation_is_numbered_as_on_the_simulator(
    tap: Tap, simulator: ModuleType, program: Callable[..., None]
) -> None:
    used = streams(1)
    with repetition(tap) as result, repetition(simulator) as expected:
        program(used, filled(SIZE, 2.0).requires_grad_())

    def without_numbers(entries: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        return [entry[:3] if entry[0] == "wait" else entry for entry in entries]

    assert without_numbers(launches(result)) == without_numbers(launches(expected))


def test_a_hold_comes_right_before_its_launch_whatever_a_hook_puts_first(tap: Tap) -> None:
    packed: list[int] = []
    held: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        result = tensor + 1
        packed.append(1)
        return result

    tap.set_sleep_fallback(lambda cycles: held.append(len(packed)))
    leaf = filled(SIZE, 2.0).requires_grad_()
    for index, packed_before in enumerate([0, 1, 1, 1]):
        packed.clear()
        held.clear()
        with repetition(tap, [(torch.accelerator.current_stream(), index)]) as result, saved_tensors_hooks(pack, abs):
            leaf.square().exp()
        # One operation saves its argument, the other one its result.
        assert result.operations() == ["aten::add.Tensor", "aten::pow.Tensor_Scalar", "aten::exp", "aten::add.Tensor"]
        assert held == [packed_before] and result.outcomes[0][0] != "missing"
    tap.set_sleep_fallback(lambda cycles: None)
