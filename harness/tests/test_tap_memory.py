"""The tap's memory, on the simulated accelerator: the same bytes, allocations and frees as the simulator's own trace.

The simulator's allocator hands out whole blocks. What another allocator does, such as splitting and joining them, is
reported to the tap as that allocator would, through c10.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import harness.observe.tap as tap_package
from harness.judge.happens_before import find_races
from harness.observe.instrument import Instrument
from harness.observe.streams import StreamNames
from harness.observe.trace import Trace
from harness.perturb.plan import Plan
from harness.tests.simulator_support import Repetition, filled, preparing, registered, repetition, streams

Tap = Any

PRIVATE_USE_1 = 20  # c10/core/DeviceType.h
TENSOR, STORAGE = 1 << 20, 1 << 12


@pytest.fixture(scope="module")
def simulator() -> ModuleType:
    return registered()


@pytest.fixture(scope="module")
def tap(simulator: ModuleType) -> Iterator[Tap]:
    native = tap_package.install("sim")
    native.set_ignored_prefixes([str(Path(torch.__file__).parent), str(Path(contextlib.__file__))])
    yield native
    tap_package.remove()
    gc.collect()  # the optimizer's memory, or it is freed in a repetition of another test


# The same as the simulator.


def comparable(result: Repetition) -> list[tuple[Any, ...]]:
    """The entries without lines and without what the host itself does; accesses of a launch in any order.

    The tap enters the wait of a copy twice on the simulator, where a copy is two operations, one inside the other.
    """
    kept = [
        entry
        for entry in result.entries
        if entry[0] != "host" and not (entry[0] in ("allocate", "free") and entry[4] < 0)
    ]
    blocks: dict[int, int] = {}

    def number(block: int) -> int:
        return blocks.setdefault(block, len(blocks))

    found: list[tuple[Any, ...]] = []
    for entry in kept:
        if entry[0] == "launch":
            accesses = sorted(
                {(number(block), *rest) for block, *rest in sorted(entry[8], key=lambda access: access[3])}
            )
            found.append((*entry[:6], accesses))
        elif entry[0] in ("allocate", "free", "record_stream"):
            found.append((entry[0], number(entry[1]), *entry[2:7]))
        elif entry[0] != "sync_stream" or entry != found[-1]:
            found.append(entry)
    return found


def train(streams_: list[torch.Stream]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    model.to("sim")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    value = filled(30, 1.0).view(5, 6)
    for _ in range(2):
        optimizer.zero_grad()
        model(value).square().sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    model(value)


def use_views(streams_: list[torch.Stream]) -> None:
    base = filled(64, 1.0)
    base[::16].add_(1)
    base.view(4, 16)[:, 2:5].copy_(base.view(4, 16)[:, 5:8])
    base.view(8, 8).t().softmax(0)
    base.as_strided((3, 4), (2, 1), 8).sum()
    base[:4].expand(3, 4).mul(base[4:8])
    out = torch.empty(0, device="sim")
    torch.mul(base, 2.0, out=out)
    torch.cat([base[:8], base[8:24]])
    torch._foreach_add_([base[:8], base[8:16]], [base[16:24], base[24:32]])
    base[torch.arange(4, device="sim")]
    base.view(8, 8).index_put_((torch.arange(4, device="sim"), torch.arange(4, device="sim")), base[0].clone())
    base.view(8, 8).sort(0)
    base.double().to(torch.int64).bool().any()


def use_several_streams(streams_: list[torch.Stream]) -> None:
    first, second = streams_[:2]
    with first:
        leaf = filled(8, 2.0).requires_grad_()
        product = leaf * 3
    second.wait_stream(first)
    with second:
        other = leaf * 5
    first.wait_stream(second)
    with first:
        (product.sum() + other.sum()).backward()


def defer_a_reuse(streams_: list[torch.Stream]) -> None:
    owner, reader = streams_[:2]
    with owner:
        value = filled(1000, 1.0)
    reader.wait_stream(owner)
    with reader:
        value.sum()
    value.record_stream(reader)
    value.record_stream(owner)
    del value
    reader.synchronize()
    with owner:
        value = filled(1000, 2.0)
        del value
        filled(1000, 3.0)


def copy_between_devices(streams_: list[torch.Stream]) -> None:
    here, there = streams_[0], streams_[2]
    with there, here:
        value = filled(16, 1.0)
        far = value.to("sim:1")
        far.view(4, 4)[:, :2].copy_(value.view(4, 4)[:, 2:])
        value.cpu()
        value.copy_(torch.ones(16), non_blocking=True)
        value[0].item()


def add_sparse_tensors(streams_: list[torch.Stream]) -> None:
    table = filled(40, 1.0).view(10, 4)
    rows, values = torch.tensor([[1, 3, 3]], device="sim"), filled(12, 1.0).view(3, 4)
    table.add_(torch.sparse_coo_tensor(rows, values, (10, 4), check_invariants=False), alpha=-0.1)


@pytest.mark.parametrize(
    "program",
    [train, use_views, use_several_streams, defer_a_reuse, copy_between_devices, add_sparse_tensors],
    ids=lambda program: program.__name__,
)
def test_it_sees_the_bytes_that_the_simulator_sees(
    tap: Tap, simulator: ModuleType, program: Callable[..., None]
) -> None:
    used = [*streams(2), *streams(1, device=1)]
    gc.collect()  # what was handed out before has an owner that the tap does not know
    with repetition(tap) as result, repetition(simulator) as expected:
        program(used)
    assert comparable(result) == comparable(expected)
    assert {"launch", "allocate", "free"} <= {entry[0] for entry in result.entries}


def test_what_is_prepared_is_known_and_not_in_the_trace(tap: Tap, simulator: ModuleType) -> None:
    (owner, reader) = streams(2)
    with repetition(tap) as result, repetition(simulator) as expected:
        tap.set_preparing(True)
        with preparing(simulator), owner:
            values = [filled(1000, 1.0) for _ in range(3)]
            values[1].record_stream(reader)
            values[2].record_stream(reader)
            del values[2]
        tap.set_preparing(False)
        values[0].add_(1)
        del values[1]
        del values[0]
    assert comparable(result) == comparable(expected)
    assert [entry[0] for entry in result.entries] == ["launch", "record", "free", "free"]


def test_batch_normalization_in_evaluation_only_reads_its_statistics(tap: Tap, simulator: ModuleType) -> None:
    value, mean, variance = filled(12, 1.0).view(4, 3), filled(3, 0.0), filled(3, 1.0)
    with repetition(tap) as result, repetition(simulator) as expected:
        torch.ops.aten._native_batch_norm_legit_no_training(value, None, None, mean, variance, 0.1, 1e-5)
    (launch,) = expected.of_kind("launch")
    assert [access[3] for access in launch[8]] == [False, False, False, True]
    assert comparable(result) == comparable(expected)


def test_an_output_is_written_once(tap: Tap) -> None:
    with repetition(tap) as result:
        with preparing(tap):
            value = filled(8, 1.0)
        value.add_(value)
        torch.sin(value)
    in_place, fresh = result.of_kind("launch")
    assert [access[3] for access in in_place[8]] == [True, False]
    assert [(access[0], access[3]) for access in fresh[8]] == [(in_place[8][0][0], False), (1, True)]


def test_a_free_inside_an_operation_comes_after_the_recordings_that_it_names(tap: Tap) -> None:
    (reader,) = streams(1)
    with repetition(tap) as result:
        values, indices = filled(4, 1.0), torch.zeros(4, dtype=torch.int64, device="sim")
        values.record_stream(reader)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that they are resized: one is freed before the other is handed out
            torch.sort(filled(2000, 1.0), out=(values, indices))
    kinds = [entry[0] for entry in result.entries]
    record, launch = kinds.index("record"), kinds.index("launch", kinds.index("record"))
    assert kinds[record : launch + 1] == ["record", "free", "allocate", "launch"]
    assert result.entries[record + 1][6] == (result.entries[record][3],)


def test_an_operation_of_somebody_else_s_does_not_write_what_operations_inside_it_made(tap: Tap) -> None:
    library = torch.library.Library("tap_memory", "DEF")
    library.define("nested(Tensor value) -> Tensor")
    library.define("own(Tensor value) -> Tensor")
    library.impl("nested", lambda value: value * 2, "PrivateUse1")
    library.impl("own", lambda value: torch.empty_like(value), "PrivateUse1")  # as if a kernel of its own wrote it
    with repetition(tap) as result:
        with preparing(tap):
            value = filled(4, 1.0)
        results = [torch.ops.tap_memory.nested(value), torch.ops.tap_memory.own(value)]
    del library, results
    accesses = {entry[4]: [access[3] for access in entry[8]] for entry in result.of_kind("launch")}
    assert accesses == {
        "tap_memory::nested": [False],
        "aten::mul.Tensor": [False, True],
        "tap_memory::own": [False, True],
    }
    assert [entry[0] for entry in result.entries] == ["launch", "allocate", "launch", "allocate", "launch"]


# Memory that an allocator reports.


def report(address: int, size_bytes: int, *, holding_the_gil: bool = False) -> None:
    """What ``c10::reportMemoryUsageToProfiler`` is told of a block; a free has a negative size."""
    library = str(Path(torch.__file__).parent / "lib" / "libc10.so")
    kind = ctypes.PyDLL if holding_the_gil else ctypes.CDLL
    function = kind(library)._ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_uint16]
    function.restype = None
    function(address, size_bytes, 0, 0, PRIVATE_USE_1)  # the device is two bytes: its type and its index, 0


BASE = 1 << 40  # where no memory is


def memory_events(result: Repetition) -> list[tuple[Any, ...]]:
    """(kind, block, start, stop, stream id, recordings)."""
    return [(entry[0], *entry[1:4], *entry[5:7]) for entry in result.of_kind("allocate", "free")]


def test_bytes_that_ever_overlapped_are_one_block(tap: Tap) -> None:
    (owner,) = streams(1)
    own = owner.stream_id
    with repetition(tap) as result, owner:
        report(BASE + 4096, 512)
        report(BASE + 1024, 512)
        report(BASE + 1024, -512)
        report(BASE, 2048)  # joined
        report(BASE, -2048)
        report(BASE + 1536, 1024)  # split
        report(BASE + 1536, -1024)
        report(BASE + 2560, 512)  # only adjacent
    assert memory_events(result) == [
        ("allocate", 0, 0, 512, own, ()),
        ("allocate", 1, 1024, 1536, own, ()),
        ("free", 1, 1024, 1536, own, ()),
        ("allocate", 1, 0, 2048, own, ()),
        ("free", 1, 0, 2048, own, ()),
        ("allocate", 1, 1536, 2560, own, ()),
        ("free", 1, 1536, 2560, own, ()),
        ("allocate", 2, 0, 512, own, ()),
    ]


def block_of(address: int, size_bytes: int) -> torch.Tensor:
    """A tensor whose memory is what ``report`` was told of; nothing may touch it."""
    storage = torch._C._construct_storage_from_data_pointer(address, torch.device("sim:0"), size_bytes)
    return torch.empty(0, dtype=torch.uint8, device="sim").set_(storage)


def test_each_part_of_a_deferred_block_waits_for_its_recordings(tap: Tap) -> None:
    owner, reader = streams(2)
    with repetition(tap) as result, owner:
        report(BASE, 2048)
        block_of(BASE, 2048).record_stream(reader)
        report(BASE, -2048)
        report(BASE + 512, 512)
        report(BASE + 512, -512)
        report(BASE, 2048)
    events = [(kind, start, stop, recordings) for kind, _, start, stop, _, recordings in memory_events(result)]
    assert [entry[:4] for entry in result.of_kind("record")] == [("record", 0, reader.stream_id, 1)]
    assert events == [
        ("allocate", 0, 2048, ()),
        ("free", 0, 2048, (1,)),
        ("allocate", 512, 1024, (1,)),
        ("free", 512, 1024, ()),
        ("allocate", 0, 2048, (1,)),
    ]


def test_a_block_that_is_handed_out_again_has_been_freed_unseen(tap: Tap) -> None:
    owner, reader = streams(2)
    with repetition(tap) as result, owner:
        report(BASE, 1024)
        block_of(BASE, 1024).record_stream(reader)
        report(BASE + 512, 1024)
    assert [(kind, start, stop, recordings) for kind, _, start, stop, _, recordings in memory_events(result)] == [
        ("allocate", 0, 1024, ()),
        ("free", 0, 1024, (1,)),
        ("allocate", 512, 1536, (1,)),
    ]


def test_the_free_of_memory_from_before_the_repetition_has_no_known_owner(tap: Tap) -> None:
    owner, reader = streams(2)
    with owner:
        plain, deferred = filled(TENSOR, 1.0), filled(2 * TENSOR, 1.0)
        plain.resize_(2 * TENSOR)
    with repetition(tap) as result:
        with owner:
            deferred.add_(plain)
        deferred.record_stream(reader)
        del plain
        del deferred
        reader.synchronize()
        with owner:
            again = torch.empty(2 * TENSOR, device="sim")
    assert [entry[0] for entry in result.entries] == ["launch", "record_stream", "record", "sync_stream", "allocate"]
    deferred_block = result.of_kind("launch")[0][8][0][0]
    assert result.of_kind("record_stream")[0][1:4] == (deferred_block, 0, 8 * TENSOR)
    (allocated,) = result.of_kind("allocate")
    assert (allocated[1], allocated[6]) == (deferred_block, (1,))
    del again


def test_threads_of_the_case_report_their_memory_too(tap: Tap) -> None:
    def work() -> None:
        filled(TENSOR, 1.0)

    with repetition(tap) as result:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert [entry[0] for entry in result.entries] == ["allocate", "launch", "free"]


def test_memory_of_others_and_outside_repetitions_is_none_of_the_trace(tap: Tap) -> None:
    report(BASE, 512)
    with repetition(tap) as result:
        torch.ones(100).add_(1)
        with preparing(tap):
            report(BASE, 512)
        tap.ignore_this_thread(True)
        report(BASE + 512, 512)
        report(BASE + 512, -512)
        tap.ignore_this_thread(False)
    report(BASE, -512)
    assert result.entries == []


def test_the_line_of_a_free_is_found_without_waiting_for_the_gil(tap: Tap) -> None:
    with repetition(tap, lines=True) as result:
        for holding_the_gil in (True, False):
            report(BASE, 512)
            line = sys._getframe().f_lineno + 1
            report(BASE, -512, holding_the_gil=holding_the_gil)
    line_of_report = report.__code__.co_firstlineno + 7
    assert line > line_of_report
    assert [entry[7:9] for entry in result.of_kind("free")] == [(__file__, line_of_report), (None, 0)]


def test_the_line_of_a_free_in_a_thread_of_the_engine_is_that_of_the_forward(tap: Tap) -> None:
    with repetition(tap, lines=True) as result:
        leaf = filled(TENSOR, 1.0).requires_grad_()
        line, product = sys._getframe().f_lineno, leaf * filled(TENSOR, 2.0)
        product.sum().backward()
    assert (__file__, line) in [entry[7:9] for entry in result.of_kind("free")]


def test_the_free_of_a_thread_that_only_enters_a_stream_is_seen(tap: Tap, simulator: ModuleType) -> None:
    (stream,) = streams(1)

    def give_up(values: list[torch.Tensor]) -> None:
        with stream:
            values.clear()

    with repetition(tap) as result, repetition(simulator) as expected:
        thread = threading.Thread(target=give_up, args=([filled(1000, 1.0)],))
        thread.start()
        thread.join()
    assert len(result.of_kind("free")) == len(expected.of_kind("free")) == 1


# Somebody else's profiler.


def test_the_thread_s_profiler_is_as_before_after_a_repetition(tap: Tap) -> None:
    for fails in (False, True):
        with contextlib.suppress(ZeroDivisionError), repetition(tap):
            _ = 1 / (0 if fails else 1)
        assert not torch._C._autograd._profiler_enabled()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            filled(TENSOR, 1.0)
        memory = [event.device_memory_usage for event in profiler.events() if event.name == "[memory]"]
        assert memory == [-4 * TENSOR]  # of the free; an allocation is its operation's


def test_a_repetition_inside_a_profile_has_no_accesses_to_judge(tap: Tap) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]), repetition(tap) as result:
        filled(TENSOR, 1.0).add_(1)
    assert [(entry[0], entry[8]) for entry in result.entries] == [("launch", ()), ("launch", ())]


# Judged.


def judged(native: Any, program: Callable[[], object]) -> Trace:
    instrument = Instrument(native, StreamNames())
    instrument.begin(Plan())
    try:
        program()
    finally:
        recording = instrument.finish()
    return recording.trace


@pytest.mark.parametrize("recorded", [False, True])
def test_a_missing_record_stream_is_named(tap: Tap, simulator: ModuleType, recorded: bool) -> None:
    def program() -> None:
        owner, reader = streams(2)
        with owner:
            value = filled(STORAGE, 1.0)
        reader.wait_stream(owner)
        with reader:
            value.sum()
        if recorded:
            value.record_stream(reader)
        del value
        with owner:
            filled(STORAGE, 2.0)

    kinds = [[race.kind for race in find_races(judged(native, program))] for native in (tap, simulator)]
    assert kinds[0] == kinds[1]
    assert kinds[0] == ([] if recorded else ["freed while in use", "write after read", "freed while in use"])


def test_disjoint_slices_of_one_buffer_are_no_race_and_overlapping_ones_are(tap: Tap) -> None:
    def program(step: int) -> Callable[[], None]:
        def run() -> None:
            base = filled(STORAGE, 1.0)
            torch.accelerator.synchronize(0)
            for number, stream in enumerate(streams(2)):
                with stream:
                    base[number * step : number * step + 8].add_(1)
            torch.accelerator.synchronize(0)

        return run

    assert find_races(judged(tap, program(8))) == []
    (race,) = find_races(judged(tap, program(6)))
    assert (race.stop - race.start, race.kind) == (8, "write after write")
