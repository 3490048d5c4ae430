"""The real device: the tap, holds and load where they matter.

These tests need a CUDA (or ROCm) device and a process in which the simulator is not registered, since a process has one
accelerator: run this file alone, ``pytest harness/tests/test_real_device.py``. Elsewhere they are skipped as not
covered.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import harness.observe.tap as tap_package
from harness.backends import hardware_queues, module_loading, visible_devices
from harness.backends.real import RealBackend
from harness.campaign.reader import read_run
from harness.campaign.store import RepetitionRecord
from harness.errors import UsageError
from harness.judge.happens_before import Race, find_races
from harness.observe.instrument import Instrument
from harness.observe.streams import StreamNames
from harness.observe.trace import Allocate, Free, Launch, Trace
from harness.perturb.hold import GATE_LIMIT_MS, KINDS
from harness.perturb.load import DIMENSIONS, parse_loads
from harness.perturb.load.loads import Loads
from harness.perturb.plan import Plan
from harness.tests import observer_effects
from harness.tests.simulator_support import Repetition, repetition
from harness.tests.suite_runner import SAFE, Ran, Suite, new_suite
from harness.tests.test_fault_drill import IMPORTS, faulty

# CUDA reads these when it is initialised. A kernel that is loaded at its first launch can wait for a hold.
hardware_queues.use_all(os.environ)
module_loading.load_at_start(os.environ)

ROOT = Path(__file__).parents[2]
HOLD_MS = 20.0
NAN = float("nan")

Tap = Any


@pytest.fixture(scope="module")
def backend() -> RealBackend:
    if not torch.cuda.is_available():
        pytest.skip("not covered: torch finds no CUDA device here")
    if torch._C._get_privateuse1_backend_name() != "privateuseone":
        pytest.skip("not covered: this process has the simulator as its accelerator; run this file alone")
    return RealBackend(torch.device("cuda"))


@pytest.fixture(scope="module")
def cycles_per_ms(backend: RealBackend) -> float:
    return backend.calibrate_sleep_cycles_per_ms()


@pytest.fixture(scope="module")
def installed(backend: RealBackend) -> Iterator[Tap]:
    native = tap_package.install("cuda")
    native.set_ignored_prefixes([str(Path(torch.__file__).parent), str(Path(contextlib.__file__))])
    yield native
    tap_package.remove()


@pytest.fixture
def tap(installed: Tap, cycles_per_ms: float) -> Tap:
    installed.set_hold_cycles(int(HOLD_MS * cycles_per_ms))
    return installed


@pytest.fixture
def two_devices(backend: RealBackend) -> None:
    if backend.device_count < 2:
        pytest.skip("not covered: needs two devices")


def streams(count: int, device: int = 0) -> list[torch.Stream]:
    found = [torch.Stream(device=f"cuda:{device}") for _ in range(count)]
    assert len({stream.stream_id for stream in found}) == count, "streams from the pool alias"
    return found


@contextlib.contextmanager
def preparing(tap: Tap) -> Iterator[None]:
    tap.set_preparing(True)
    try:
        yield
        for device in range(torch.cuda.device_count()):
            torch.accelerator.synchronize(device)
    finally:
        tap.set_preparing(False)


class SeedPattern:
    """A seed filled on one stream, backward called on another, the gradient copied there: four launches."""

    LAUNCHES = ("fill", "mul", "add", "copy")

    def __init__(self) -> None:
        self.fill, self.ambient, self.forward = streams(3)

    def launch(self, name: str) -> tuple[torch.Stream, int]:
        return {
            "fill": (self.fill, 0),
            "mul": (self.forward, 0),
            "add": (self.forward, 1),
            "copy": (self.ambient, 0),
        }[name]

    def run(
        self, tap: Tap, holds: Sequence[str] = (), *, wait: bool = True, serial: bool = False, lines: bool = False
    ) -> tuple[Repetition, list[float]]:
        """One repetition; returns what was seen of it and the distinct values of the gradient as copied."""
        with repetition(tap, [self.launch(name) for name in holds], serial=serial, lines=lines) as result:
            with preparing(tap), self.forward:
                leaf = torch.full((256,), 2.0, device="cuda", requires_grad=True)
                product = leaf * torch.full((256,), 3.0, device="cuda")
                leaf.grad = torch.zeros(256, device="cuda")
                seed = torch.full((256,), NAN, device="cuda")
                copied = torch.full((256,), NAN, device="cuda")
            with self.fill:
                seed.fill_(5.0)
            with self.ambient:
                if wait:
                    self.ambient.wait_stream(self.fill)
                product.backward(seed)
                copied.copy_(leaf.grad)
        return result, sorted(set(copied.tolist()))


@pytest.fixture
def pattern(tap: Tap) -> SeedPattern:
    pattern = SeedPattern()
    for _ in range(2):
        pattern.run(tap)  # loads the kernels, which can wait for a held stream
    return pattern


def states(result: Repetition) -> list[str]:
    return [state for state, _, _ in result.outcomes]


# The backend.


def test_the_backend_says_what_it_is(backend: RealBackend) -> None:
    described = backend.describe()
    assert torch.cuda.get_device_name(0) in described["device"]
    assert all(described.values())
    assert backend.device == torch.device("cuda", 0)
    assert backend.device_count == torch.cuda.device_count()


def test_a_calibrated_sleep_lasts_as_long_as_it_should(backend: RealBackend, cycles_per_ms: float) -> None:
    torch.cuda._sleep(int(cycles_per_ms))
    backend.synchronize()
    started = time.perf_counter()
    torch.cuda._sleep(int(50 * cycles_per_ms))
    backend.synchronize()
    assert 40 <= (time.perf_counter() - started) * 1e3 <= 60


def test_another_device_type_cannot_be_calibrated(backend: RealBackend) -> None:
    other = RealBackend.__new__(RealBackend)
    other.device = torch.device("xpu", 0)
    with pytest.raises(UsageError, match="cannot be held"):
        other.calibrate_sleep_cycles_per_ms()


def run_script(script: str, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        env=None if environment is None else {**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_sticky_error_is_told_from_one_that_passes(backend: RealBackend) -> None:
    assert not backend.is_sticky_error(RuntimeError("shapes do not match"))
    printed = run_script(
        """
        import os
        import torch
        from harness.backends.real import RealBackend

        backend = RealBackend(torch.device("cuda"))
        try:
            torch.ones(4, device="cuda") + torch.ones(5, device="cuda")
        except RuntimeError as error:
            print(backend.is_sticky_error(error))
        try:
            torch.arange(4, device="cuda")[torch.tensor([9], device="cuda")]
            backend.synchronize()
        except RuntimeError as error:
            print(backend.is_sticky_error(error), flush=True)
        os._exit(0)  # the teardown of a broken context can abort
        """
    )
    assert printed.split() == ["False", "True"]


def test_gpus_are_counted_without_initialising_cuda(backend: RealBackend) -> None:
    printed = run_script(
        """
        import os, sys
        from harness.backends import visible_devices
        print(visible_devices.count(os.environ), "torch" in sys.modules)
        """
    )
    assert printed.split() == [str(backend.device_count), "False"]


@pytest.mark.usefixtures("two_devices")
def test_a_worker_sees_its_own_gpu_first(backend: RealBackend) -> None:

    changes = visible_devices.environment_of_worker(os.environ, 1)
    printed = run_script(
        """
        import torch
        print(*[torch.cuda.get_device_properties(i).uuid for i in range(torch.cuda.device_count())])
        """,
        changes,
    )
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(backend.device_count)]
    assert printed.split() == [*uuids[1:], uuids[0]]


# What the tap sees.


def test_the_sleep_kernel_is_called_without_python(tap: Tap) -> None:
    assert tap.can_sleep()
    printed = run_script(
        """
        import torch
        torch.cuda.init()
        from harness.observe import tap
        torch.cuda._sleep = None  # would be the fallback
        native = tap.install("cuda")
        print(native.can_sleep())
        """
    )
    assert printed.splitlines()[-1] == "True"


def test_it_sees_launches_records_and_waits(tap: Tap, pattern: SeedPattern) -> None:
    result, values = pattern.run(tap, lines=True)
    assert values == [15.0]
    fill, ambient, forward = ((0, stream.stream_id) for stream in (pattern.fill, pattern.ambient, pattern.forward))
    launches = {entry[1:4]: (entry[4], entry[5]) for entry in result.of_kind("launch")}
    assert launches == {
        (*fill, 0): ("aten::fill_.Scalar", None),
        (*forward, 0): ("aten::mul.Tensor", "MulBackward0"),
        (*forward, 1): ("aten::add_.Tensor", "torch::autograd::AccumulateGrad"),
        (*ambient, 0): ("aten::copy_", None),
    }
    assert all(entry[6] == __file__ for entry in result.of_kind("launch"))
    waits = [entry[1:3] for entry in result.of_kind("wait")]
    assert waits[:1] == [ambient], "the body's own"
    assert forward in waits and ambient in waits[1:], "the engine's: for the seed, and at the end of backward"
    assert not result.of_kind("sync_stream", "sync_event", "sync_device")


def test_copies_that_block_and_item_synchronize_their_stream(tap: Tap) -> None:
    (stream,) = streams(1)
    with repetition(tap) as result, stream:
        with preparing(tap):
            value, pinned = torch.ones(4, device="cuda"), torch.ones(4).pin_memory()
        value.cpu()
        torch.ones(4).to("cuda")
        value.sum().item()
        pinned.to("cuda", non_blocking=True)
        pinned.copy_(value, non_blocking=True)
        torch.empty(4).copy_(value, non_blocking=True)
    entries = result.of_kind("launch", "sync_stream")
    pairs = zip(entries, [*entries[1:], ("end",)], strict=True)
    followed = [(entry[4], following[0]) for entry, following in pairs if entry[0] == "launch"]
    assert followed[:2] == [("aten::copy_", "sync_stream")] * 2
    assert followed[2][0].startswith("aten::sum") and followed[2][1] == "launch"
    assert followed[3:] == [
        ("aten::_local_scalar_dense", "sync_stream"),
        ("aten::copy_", "launch"),
        ("aten::copy_", "launch"),
        ("aten::copy_", "sync_stream"),  # into pageable memory
    ]


@pytest.mark.usefixtures("two_devices")
def test_a_copy_between_devices_orders_both_streams(tap: Tap) -> None:
    here, there = streams(1)[0], streams(1, device=1)[0]
    with repetition(tap) as result, there, here:
        with preparing(tap):
            value = torch.ones(4, device="cuda:0")
            other = torch.zeros(4, device="cuda:1")
        other.copy_(value, non_blocking=True)
    source, destination = (0, here.stream_id), (1, there.stream_id)
    assert [entry[:4] for entry in result.entries] == [
        ("record", *destination, 1),
        ("wait", *source, 1),
        ("launch", *source, 0),
        ("record", *source, 2),
        ("wait", *destination, 2),
    ]


# Happens-before: what the tap knows of memory.


def judged(native: Tap, program: Callable[[], object], *, poison_memory: bool = False) -> tuple[Trace, list[Race]]:
    """The trace of a program, run once to load its kernels and once observed, and what races in it."""
    instrument = Instrument(native, StreamNames())
    for _ in range(2):
        instrument.begin(Plan(), poison_memory=poison_memory)
        try:
            program()
        finally:
            recording = instrument.finish()
    return recording.trace, find_races(recording.trace)


@pytest.mark.parametrize("waits", [True, False])
def test_the_seed_pattern_races_between_the_fill_and_its_first_use_alone(
    tap: Tap, pattern: SeedPattern, waits: bool
) -> None:
    pattern.run(tap, wait=waits)
    instrument = Instrument(tap, StreamNames())
    instrument.begin(Plan())
    with preparing(tap), pattern.forward:
        leaf = torch.full((256,), 2.0, device="cuda", requires_grad=True)
        product = leaf * torch.full((256,), 3.0, device="cuda")
        seed = torch.full((256,), NAN, device="cuda")
    with pattern.fill:
        seed.fill_(5.0)
    with pattern.ambient:
        if waits:
            pattern.ambient.wait_stream(pattern.fill)
        product.backward(seed)
    races = find_races(instrument.finish().trace)
    found = [(race.first.operation, race.second.operation, race.kind) for race in races]  # type: ignore[union-attr]
    assert found == ([] if waits else [("aten::fill_.Scalar", "aten::mul.Tensor", "read after write")])


@pytest.mark.parametrize("by", ["nobody", "record_stream", "wait"])
def test_a_missing_record_stream_is_named(tap: Tap, by: str) -> None:
    owner, reader = streams(2)

    def program() -> None:
        with owner:
            value = torch.full((1 << 20,), 1.0, device="cuda")
        reader.wait_stream(owner)
        with reader:
            value.sum()
        if by == "record_stream":
            value.record_stream(reader)
        elif by == "wait":
            owner.wait_stream(reader)
        del value
        with owner:
            torch.full((1 << 20,), 2.0, device="cuda")

    trace, races = judged(tap, program)
    assert any(isinstance(entry, Free) for entry in trace)
    kinds = [race.kind for race in races]
    if by == "nobody":
        assert kinds[0] == "freed while in use"
        assert "record_stream" in races[0].missing_wait
    else:
        assert kinds == []


def test_reuse_by_the_owner_is_no_race(tap: Tap) -> None:
    (owner,) = streams(1)

    def program() -> None:
        with owner:
            for value in range(4):
                torch.full((1000,), float(value), device="cuda").add_(1)

    trace, races = judged(tap, program)
    blocks = {entry.block for entry in trace if isinstance(entry, Allocate)}
    assert len(blocks) == 1, "the allocator hands the same memory out again"
    assert races == []


@pytest.mark.parametrize("step", [6, 8])
def test_disjoint_slices_of_one_buffer_are_no_race_and_overlapping_ones_are(tap: Tap, step: int) -> None:
    first, second = streams(2)

    def program() -> None:
        base = torch.zeros(64, device="cuda")
        torch.accelerator.synchronize(0)
        for number, stream in enumerate((first, second)):
            with stream:
                base[number * step : number * step + 8].add_(1)
        torch.accelerator.synchronize(0)

    _, races = judged(tap, program)
    assert [race.stop - race.start for race in races] == ([8] if step == 6 else [])


def test_blocks_that_the_allocator_splits_and_joins_are_one_block(tap: Tap) -> None:
    (owner,) = streams(1)
    torch.cuda.empty_cache()

    def program() -> None:
        with owner:
            values = [torch.empty(300_000, dtype=torch.uint8, device="cuda") for _ in range(3)]
            del values
            torch.empty(1_000_000, dtype=torch.uint8, device="cuda").zero_()

    trace, races = judged(tap, program)
    assert {(type(entry), entry.block) for entry in trace if isinstance(entry, Allocate | Free)} == {
        (Allocate, 0),
        (Free, 0),
    }
    assert max(entry.start for entry in trace if isinstance(entry, Allocate)) > 0
    assert races == []


def test_every_allocation_of_a_backward_is_seen(tap: Tap) -> None:
    def program() -> None:
        leaf = torch.ones(4096, device="cuda", requires_grad=True)
        (leaf * 2).exp().sum().backward()

    trace, races = judged(tap, program)
    handed_out = [(entry.block, entry.start) for entry in trace if isinstance(entry, Allocate)]
    written = {
        (access.block, access.start)
        for entry in trace
        if isinstance(entry, Launch)
        for access in entry.accesses
        if access.write
    }
    assert written <= set(handed_out), "each output was handed out in the repetition"
    assert races == []


def test_a_training_step_on_one_stream_has_no_race(tap: Tap) -> None:
    def program() -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3),
            torch.nn.BatchNorm2d(8),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(288, 4),
        ).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(5, 3, 8, 8, device="cuda")).square().sum().backward()
            optimizer.step()

    trace, races = judged(tap, program)
    statistics = [
        entry for entry in trace if isinstance(entry, Launch) and "batch_norm" in entry.operation and entry.node is None
    ]
    assert statistics and all(sum(access.write for access in entry.accesses) >= 5 for entry in statistics)
    assert races == []


@pytest.mark.parametrize("recorded", [False, True])
def test_a_poisoned_free_shows_that_record_stream_is_missing(tap: Tap, recorded: bool) -> None:
    assert tap.can_poison()
    owner, reader = streams(2)
    tap.set_poisoning(True)
    try:
        for holds in ([], [(reader, 0)]):
            with repetition(tap, holds) as result:
                with preparing(tap):
                    seen = torch.zeros(1000, device="cuda")
                    with owner:
                        value = torch.ones(1000, device="cuda")
                reader.wait_stream(owner)
                with reader:
                    seen.copy_(value)
                if recorded:
                    value.record_stream(reader)
                del value
    finally:
        tap.set_poisoning(False)
    assert states(result) == ["pending"]
    assert [entry[4] for entry in result.of_kind("launch")] == ["aten::copy_"]
    assert (seen.tolist() == [1.0] * 1000) is recorded
    assert bool(seen.isnan().all()) is not recorded


@pytest.mark.usefixtures("two_devices")
def test_a_poisoned_free_goes_to_the_device_of_the_memory(tap: Tap) -> None:
    (owner,) = streams(1, device=1)
    tap.set_poisoning(True)
    try:
        with repetition(tap):
            with owner:
                value = torch.ones(1000, device="cuda:1")
                pointer = value.data_ptr()
                del value
                value = torch.empty(1000, device="cuda:1")
                assert value.data_ptr() == pointer
                found = value.isnan().all().item()
            assert torch.cuda.current_device() == 0
    finally:
        tap.set_poisoning(False)
    assert found


def test_the_seed_suite_has_no_race_but_its_controls(backend: RealBackend) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "suites", "--device", "cuda", "--count", "4"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr  # a race that no control has makes it 1


# Pinned memory, and what the caller's hooks launch.


@pytest.mark.parametrize("to_host", [True, False])
@pytest.mark.parametrize("waits", [True, False])
def test_the_host_races_with_a_copy_unless_it_waits(tap: Tap, to_host: bool, waits: bool) -> None:
    (copying,) = streams(1)
    memory, value = torch.ones(256).pin_memory(), torch.ones(256, device="cuda")
    torch.accelerator.synchronize()

    def program() -> None:
        with copying:
            if to_host:
                memory.copy_(value, non_blocking=True)
            else:
                value.copy_(memory, non_blocking=True)
        if waits:
            copying.synchronize()
        if to_host:
            memory[3].item()
        else:
            memory.fill_(2.0)

    _, races = judged(tap, program)
    torch.accelerator.synchronize()
    kind, operation = (
        ("read after write", "aten::_local_scalar_dense") if to_host else ("write after read", "aten::fill_.Scalar")
    )
    found = [(race.kind, race.second.operation, race.second_stream) for race in races]  # type: ignore[union-attr]
    assert found == ([] if waits else [(kind, operation, None)])


def test_pinned_memory_that_is_handed_out_again_is_no_race(tap: Tap) -> None:
    (copying,) = streams(1)
    value = torch.ones(1 << 16, device="cuda")
    torch.accelerator.synchronize()
    addresses = []

    def program() -> None:
        for number in range(4):
            memory = torch.empty(1 << 16, pin_memory=True).fill_(float(number))
            addresses.append(memory.data_ptr())
            with copying:
                value.copy_(memory, non_blocking=True)
            del memory
            time.sleep(0.01)  # the copy is done, and nobody but the allocator has asked

    _, races = judged(tap, program)
    assert races == []
    assert len(set(addresses)) < len(addresses), "nothing was handed out again"


def test_what_hooks_launch_inside_an_operation_is_counted_where_it_is_enqueued(tap: Tap) -> None:
    (packing,) = streams(1)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packing.wait_stream(torch.accelerator.current_stream())
        with packing:
            return tensor.to("cpu", non_blocking=True)

    with preparing(tap):
        leaf = torch.ones(256, device="cuda", requires_grad=True)
    with repetition(tap) as result, torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.cuda()):
        leaf.square().exp()
    here = torch.accelerator.current_stream().stream_id
    assert [entry[2:5] for entry in result.of_kind("launch")] == [
        (packing.stream_id, 0, "aten::copy_"),
        (here, 0, "aten::pow.Tensor_Scalar"),
        (here, 1, "aten::exp"),
        (packing.stream_id, 1, "aten::copy_"),
    ]


# It changes nothing.


@pytest.mark.parametrize("how", ["traced", "lines", "held"])
@pytest.mark.parametrize("effect", observer_effects.ALL, ids=lambda effect: effect.__name__)
def test_the_observer_changes_nothing(tap: Tap, effect: Any, how: str) -> None:
    without = effect("cuda")
    default = torch.accelerator.current_stream(0)
    holds = [(default, index) for index in range(3)] if how == "held" else []
    with repetition(tap, holds, lines=how == "lines") as result:
        under_observation = effect("cuda")
    assert result.of_kind("launch")
    assert under_observation == without == observer_effects.WANTED[effect]


def test_memory_does_not_grow(tap: Tap, pattern: SeedPattern) -> None:
    allocated = []
    for _ in range(3):
        for _ in range(100):
            pattern.run(tap, lines=True)
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[0] == allocated[-1]


# Holds.


@pytest.fixture(params=sorted(KINDS))
def holding(request: pytest.FixtureRequest, tap: Tap) -> Iterator[Tap]:
    """The tap, with each kind of hold."""
    if request.param == "gate":
        if torch.version.hip is not None:
            pytest.skip("not covered: gates are CUDA's alone")
        tap.use_gates(GATE_LIMIT_MS)
    yield tap
    tap.use_sleeps()


@pytest.fixture
def gated(tap: Tap) -> Iterator[Tap]:
    if torch.version.hip is not None:
        pytest.skip("not covered: gates are CUDA's alone")
    tap.use_gates(GATE_LIMIT_MS)
    yield tap
    tap.use_sleeps()


@pytest.mark.parametrize("held", SeedPattern.LAUNCHES)
def test_the_pattern_is_right_whatever_is_held(holding: Tap, pattern: SeedPattern, held: str) -> None:
    for _ in range(3):
        result, values = pattern.run(holding, [held])
        assert states(result) == ["pending"]
        assert values == [15.0]


@pytest.mark.parametrize("held", SeedPattern.LAUNCHES)
def test_only_the_held_fill_shows_that_the_wait_is_missing(holding: Tap, pattern: SeedPattern, held: str) -> None:
    for _ in range(3):
        result, values = pattern.run(holding, [held], wait=False)
        assert states(result) == ["pending"]
        assert (values == [15.0]) is (held != "fill")


def test_it_is_the_hold_that_shows_the_missing_wait(holding: Tap, pattern: SeedPattern) -> None:
    by_chance = sum(pattern.run(holding, wait=False)[1] != [15.0] for _ in range(50))
    held = sum(pattern.run(holding, ["fill"], wait=False)[1] != [15.0] for _ in range(10))
    assert held == 10
    assert by_chance < 25


def test_holds_of_a_set_are_released_in_the_order_of_the_plan(holding: Tap) -> None:
    first, second, watcher = streams(3)
    # Unheld first: a kernel is loaded at its first launch, and loading waits for the device, holds included.
    for holds in ([], [(first, 0), (second, 0)]):
        with repetition(holding, holds) as result:
            with preparing(holding):
                values = [torch.ones(4, device="cuda") for _ in range(2)]
                seen = torch.zeros(4, device="cuda")
            for stream, value in zip((second, first), values, strict=True):
                with stream:
                    value.add_(1)
            # Looked at on the device, when the first is over: the host may be late.
            watcher.wait_event(first.record_event())
            with watcher:
                seen.copy_(values[0])
        assert [value.tolist() for value in values] == [[2.0] * 4] * 2
    assert states(result) == ["pending", "pending"]
    assert seen.tolist() == [1.0] * 4, "the second is held until what is behind the first has run"


def test_a_launch_that_is_not_made_is_missing(holding: Tap, pattern: SeedPattern) -> None:
    with repetition(holding, [(pattern.fill, 0)]) as result:
        pass
    assert result.outcomes == [("missing", None, 0)]


def synchronize_stream(stream: torch.Stream, event: torch.Event, value: torch.Tensor) -> None:
    stream.synchronize()


def synchronize_event(stream: torch.Stream, event: torch.Event, value: torch.Tensor) -> None:
    event.synchronize()


def synchronize_device(stream: torch.Stream, event: torch.Event, value: torch.Tensor) -> None:
    torch.accelerator.synchronize(0)


def read_item(stream: torch.Stream, event: torch.Event, value: torch.Tensor) -> None:
    with stream:
        value[0].item()


def copy_to_host(stream: torch.Stream, event: torch.Event, value: torch.Tensor) -> None:
    with stream:
        value.cpu()


SYNCHRONIZATIONS = [synchronize_stream, synchronize_event, synchronize_device, read_item, copy_to_host]


@pytest.mark.parametrize("synchronize", SYNCHRONIZATIONS)
def test_a_host_synchronization_forces_a_hold(holding: Tap, synchronize: Any) -> None:
    held, waiting = streams(2)
    for _ in range(2):
        with repetition(holding, [(held, 0)]) as result:
            with preparing(holding):
                value = torch.ones(4, device="cuda")
            with held:
                value.add_(1)
            waiting.wait_stream(held)
            event = waiting.record_event()
            synchronize(waiting, event, value)
    line = synchronize.__code__.co_firstlineno + (2 if synchronize in {read_item, copy_to_host} else 1)
    assert result.outcomes == [("forced", __file__, line)]


def test_a_synchronization_that_does_not_reach_a_hold_leaves_it_pending(holding: Tap) -> None:
    held, other = streams(2)
    with repetition(holding, [(held, 0)]) as result:
        with preparing(holding):
            values = [torch.ones(4, device="cuda") for _ in range(2)]
        for stream, value in zip((held, other), values, strict=True):
            with stream:
                value.add_(1)
        other.synchronize()
    assert states(result) == ["pending"]


def test_a_hold_that_ended_while_the_host_waited_for_another_is_proved_too(tap: Tap) -> None:
    shorter, longer = streams(2)
    with repetition(tap, [(shorter, 0), (longer, 0)]) as result:
        with preparing(tap):
            values = [torch.ones(4, device="cuda") for _ in range(2)]
        for stream, value in zip((shorter, longer), values, strict=True):
            with stream:
                value.add_(1)
        line = sys._getframe().f_lineno + 1
        longer.synchronize()
    assert result.outcomes == [("forced", __file__, line)] * 2


def test_a_hold_that_was_too_short_proves_nothing(tap: Tap) -> None:
    tap.set_hold_cycles(1)
    (held,) = streams(1)
    with repetition(tap, [(held, 0)]) as result:
        with preparing(tap):
            value = torch.ones(4, device="cuda")
        with held:
            value.add_(1)
        time.sleep(0.1)
    assert states(result) == ["ran"]


def test_a_hold_leaves_device_and_stream_as_they_were(holding: Tap) -> None:
    device, default = torch.cuda.current_device(), torch.accelerator.current_stream(0)
    held = streams(1)[0]
    with repetition(holding, [(held, 0)]):
        value = torch.ones(4, device="cuda")
        with held:
            value.add_(1)
            assert torch.accelerator.current_stream(0) == held
    assert torch.cuda.current_device() == device
    assert torch.accelerator.current_stream(0) == default


@pytest.mark.usefixtures("two_devices")
def test_a_launch_on_the_other_device_can_be_held(holding: Tap) -> None:
    (held,) = streams(1, device=1)
    for _ in range(2):
        with repetition(holding, [(held, 0)]) as result:
            with preparing(holding):
                leaf = torch.full((4,), 2.0, device="cuda:1", requires_grad=True)
                with held:
                    product = leaf * 3.0
            product.sum().backward()  # in the engine's thread of device 1
            assert torch.cuda.current_device() == 0
        launches = result.of_kind("launch")
    assert [entry[1:3] for entry in launches if entry[5] == "MulBackward0"] == [(1, held.stream_id)]
    assert states(result) == ["pending"]
    assert leaf.grad is not None and leaf.grad.tolist() == [3.0] * 4


# Gates.

GATE_ENVIRONMENT = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}


def test_a_gate_costs_no_fixed_milliseconds(backend: RealBackend) -> None:
    printed = run_script(
        """
        from harness.campaign import bench
        costs = bench.measure("cuda", 300, hold="gate")
        print(costs["smallest"]["median_us"], costs["smallest"]["races"], costs["seed"]["races"])
        """,
        GATE_ENVIRONMENT,
    )
    median_us, *races = printed.split()[-3:]
    assert float(median_us) < 3000
    assert races == ["0", "0"]


def test_a_gate_is_closed_for_as_long_as_the_body_takes(gated: Tap, pattern: SeedPattern) -> None:
    with repetition(gated, [pattern.launch("fill")]) as result:
        with preparing(gated):
            value = torch.ones(4, device="cuda")
        with pattern.fill:
            value.add_(1)
        time.sleep(0.5)
        assert not pattern.fill.query()
    assert states(result) == ["pending"]
    assert value.tolist() == [2.0] * 4


def copy_from_host(stream: torch.Stream, value: torch.Tensor, pageable: torch.Tensor) -> None:
    with stream:
        value.copy_(pageable)


def copy_from_host_without_waiting(stream: torch.Stream, value: torch.Tensor, pageable: torch.Tensor) -> None:
    with stream:
        value.copy_(pageable, non_blocking=True)


def copy_to_host_without_waiting(stream: torch.Stream, value: torch.Tensor, pageable: torch.Tensor) -> None:
    with stream:
        pageable.copy_(value, non_blocking=True)


@pytest.mark.parametrize("copy", [copy_from_host, copy_from_host_without_waiting, copy_to_host_without_waiting])
@pytest.mark.parametrize("elements", [4, 1 << 22])
def test_a_copy_of_pageable_memory_does_not_wait_for_a_gate(gated: Tap, copy: Any, elements: int) -> None:
    (held,) = streams(1)
    pageable = torch.ones(elements)
    for holds in ([], [(held, 0)]):
        with repetition(gated, holds) as result:
            with preparing(gated):
                value = torch.ones(elements, device="cuda")
            with held:
                value.add_(1)
            started = time.perf_counter()
            copy(held, value, pageable)
            took_s = time.perf_counter() - started
    assert took_s < GATE_LIMIT_MS / 2e3
    assert states(result)[0] in {"forced", "pending"}


def test_the_watchdog_opens_a_forgotten_gate(tap: Tap, pattern: SeedPattern) -> None:
    tap.use_gates(100.0)
    try:
        for _ in range(2):
            with repetition(tap, [pattern.launch("fill")]) as result:
                with preparing(tap):
                    value = torch.ones(4, device="cuda")
                with pattern.fill:
                    value.add_(1)
                started = time.perf_counter()
                torch.cuda.synchronize()  # goes around the device guard, and nobody tells the tap of it here
                assert 0.05 < time.perf_counter() - started < 1.0
            assert states(result) == ["expired"]
        assert pattern.run(tap, ["fill"])[1] == [15.0]
    finally:
        tap.use_sleeps()


def test_more_launches_than_fit_into_a_queue_do_not_hang_behind_a_gate(gated: Tap) -> None:
    (held,) = streams(1)
    for holds in ([], [(held, 0)]):
        with repetition(gated, holds) as result:
            with preparing(gated):
                value = torch.zeros(4, device="cuda")
            started = time.perf_counter()
            with held:
                for _ in range(5000):
                    value.add_(1)
            assert time.perf_counter() - started < 2 * GATE_LIMIT_MS / 1e3
        assert value.tolist() == [5000.0] * 4
    assert states(result)[0] in {"pending", "expired"}


def test_an_allocation_does_not_hang_behind_a_gate(gated: Tap, pattern: SeedPattern) -> None:
    with repetition(gated, [pattern.launch("fill")]) as result:
        with preparing(gated):
            value = torch.ones(4, device="cuda")
        with pattern.fill:
            value.add_(1)
        started = time.perf_counter()
        with pattern.ambient:
            torch.cuda.empty_cache()
            torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        assert time.perf_counter() - started < 2 * GATE_LIMIT_MS / 1e3
    assert states(result)[0] in {"pending", "expired"}


def test_gates_find_every_control_of_the_seed_suite(backend: RealBackend) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "suites/test_seed_gradient.py", "--device", "cuda", "--hold", "gate"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "inconclusive" not in done.stdout
    controls = re.search(r"(\d+) of (\d+) controls were seen", done.stdout)
    assert controls is not None and controls[1] == controls[2] != "0"
    assert "hold: gate" in done.stdout


# The fully synchronized reference.


def test_serial_gives_right_values_even_where_a_wait_is_missing(tap: Tap, pattern: SeedPattern) -> None:
    for _ in range(20):
        _, values = pattern.run(tap, wait=False, serial=True)
        assert values == [15.0]


def test_serial_completes_an_operation_before_what_it_reads_is_freed_and_filled(tap: Tap) -> None:
    owner, reader = streams(2)
    found = []
    tap.set_poisoning(True)
    try:
        for _ in range(5):
            with repetition(tap, serial=True):
                with owner:
                    value = torch.ones(2**28, device="cuda")
                with reader:
                    total = value.sum()  # a millisecond or so, in which its input would be filled
                del value
            found.append(total.item())
    finally:
        tap.set_poisoning(False)
    assert found == [2.0**28] * 5


# Load.

ON_DEVICE = [name for name in DIMENSIONS if name != "host"]


def load_of(backend: RealBackend, tap: Tap, text: str, **settings: Any) -> Loads:
    return Loads(parse_loads(text), backend.device, tap, **settings)


@pytest.mark.parametrize("dimensions", [*DIMENSIONS, "compute:0.3", "memory,alloc:0.5", "h2d,d2h"])
def test_a_load_is_delivered_where_nothing_else_runs_and_stops_within_a_second(
    backend: RealBackend, tap: Tap, dimensions: str
) -> None:
    load = load_of(backend, tap, dimensions)
    load.start()
    time.sleep(0.7)
    reports = load.report()
    started = time.perf_counter()
    load.stop()
    assert time.perf_counter() - started < 1.0
    for report in reports:
        assert report.share is not None and 0.7 < report.share < 1.5, report
    started = time.perf_counter()
    backend.synchronize()
    assert time.perf_counter() - started < 0.1, "its queue is empty"


@pytest.mark.parametrize(
    ("dimension", "least"),
    [
        ("compute", 1e11),
        ("memory", 1e11),
        ("h2d", 1e9),
        ("d2h", 1e9),
        ("alloc", 1e4),
        ("launch", 1e4),
        ("streams", 1e4),
    ],
)
def test_a_load_alone_is_one(backend: RealBackend, tap: Tap, dimension: str, least: float) -> None:
    with load_of(backend, tap, dimension) as load:
        (report,) = load.report()
    assert report.alone is not None and report.alone > least


def test_loads_keep_to_their_memory(backend: RealBackend, tap: Tap) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    with load_of(backend, tap, "compute,memory,h2d,d2h,alloc,launch,streams", memory_mib=256.0):
        used_mib = (before - torch.cuda.mem_get_info()[0]) / 2**20
    # Segments are of 20 MiB, and the libraries have workspaces of their own.
    assert used_mib < 256 + 7 * 40


@pytest.mark.parametrize("dimension", ON_DEVICE)
def test_the_memory_of_a_load_is_no_memory_of_the_cases(backend: RealBackend, tap: Tap, dimension: str) -> None:
    def default_pool() -> int:
        segments = torch.cuda.memory_snapshot()
        return sum(each["total_size"] for each in segments if tuple(each.get("segment_pool_id", (0, 0))) == (0, 0))

    before = default_pool()
    with load_of(backend, tap, dimension):
        grown = default_pool() - before
    if dimension == "alloc":
        assert grown >= 0, "it is there to use the same allocator"
    else:
        assert grown == 0


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("dimension", ON_DEVICE)
def test_a_load_is_no_launch_of_the_case_and_leaves_holds_proved(
    backend: RealBackend, tap: Tap, cycles_per_ms: float, dimension: str, kind: str
) -> None:
    pattern = SeedPattern()
    pattern.run(tap)
    expected = sorted(entry[1:6] for entry in pattern.run(tap)[0].of_kind("launch"))
    if kind == "gate":
        if torch.version.hip is not None:
            pytest.skip("not covered: gates are CUDA's alone")
        tap.use_gates(GATE_LIMIT_MS)
    load = load_of(backend, tap, dimension)
    try:
        with load:
            streams_of_case = {stream.stream_id for stream in (pattern.fill, pattern.ambient, pattern.forward)}
            assert not streams_of_case & set(load.stream_ids)
            tap.set_hold_cycles(int(5 * HOLD_MS * cycles_per_ms))
            for held in SeedPattern.LAUNCHES:
                result, values = pattern.run(tap, [held])
                assert values == [15.0]
                assert states(result) == ["pending"]
                assert sorted(entry[1:6] for entry in result.of_kind("launch")) == expected
            # Without the wait the load may delay the fill by itself, so only the hold of the fill says something.
            assert pattern.run(tap, ["fill"], wait=False)[1] != [15.0]
            (report,) = load.report()
    finally:
        tap.use_sleeps()
    assert report.achieved is not None and report.achieved > 0


def test_mixed_lets_each_load_have_its_turn(backend: RealBackend, tap: Tap) -> None:
    with load_of(backend, tap, "mixed", seed=1) as load:
        time.sleep(8.0)
        reports = load.report()
    assert [report.dimension for report in reports] == list(DIMENSIONS)
    assert all(report.is_delivered for report in reports), reports


@pytest.mark.parametrize("dimension", ON_DEVICE)
def test_a_load_does_not_touch_the_random_numbers_of_the_case(backend: RealBackend, tap: Tap, dimension: str) -> None:
    torch.manual_seed(1)
    expected = torch.rand(64, device="cuda").tolist()
    torch.manual_seed(1)
    with load_of(backend, tap, dimension):
        assert torch.rand(64, device="cuda").tolist() == expected


def test_a_thread_of_the_harness_is_ignored(tap: Tap) -> None:
    (stream,) = streams(1)

    def load() -> None:
        tap.ignore_this_thread(True)
        with stream:
            torch.ones(4, device="cuda").add_(1)
        stream.synchronize()

    with repetition(tap) as result:
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
    assert result.entries == []


# Whether this machine can find races.


@pytest.mark.parametrize("hold", sorted(KINDS))
def test_every_planted_race_is_found(backend: RealBackend, hold: str) -> None:
    if hold == "gate" and torch.version.hip is not None:
        pytest.skip("not covered: gates need CUDA")
    done = subprocess.run(
        [sys.executable, "-m", "harness", "canary", "--device", "cuda", "--hold", hold, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for race in json.loads(done.stdout)["races"]:
        assert race["oracles"] == ["values", "happens-before"], race


def test_a_setting_that_hides_races_keeps_the_doctor_from_saying_yes(backend: RealBackend) -> None:
    fine, hidden = (
        subprocess.run(
            [sys.executable, "-m", "harness", "doctor", "--json"],
            cwd=ROOT,
            env={**os.environ, "CUDA_LAUNCH_BLOCKING": blocking},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        for blocking in ("0", "1")
    )
    assert fine.returncode == 0, fine.stdout + fine.stderr
    names = [check["name"] for check in json.loads(fine.stdout)["checks"]]
    assert {"GPUs", "races on sim", "races on cuda, held by sleep"} <= set(names)
    if torch.version.hip is None:
        assert {"driver", "compute mode", "MPS", "persistence", "clocks"} <= set(names)
    assert hidden.returncode == 6, hidden.stdout + hidden.stderr


# What a case can do to its device, as a user meets it. test_fault_drill.py has the rest, on the simulator.


def run_faulty(folder: Path, name: str, *lines: str, workers: str) -> tuple[Ran, list[RepetitionRecord], Suite]:
    suite = new_suite(folder, IMPORTS + faulty(name, *lines) + SAFE)
    ran = suite.run("--device", "cuda", "--count", "30", "-n", workers, f"--results={folder / 'run'}")
    return ran, list(read_run(folder / "run")), suite


def test_a_device_side_assert_ends_the_worker_and_another_one_goes_on(backend: RealBackend, tmp_path: Path) -> None:
    assertion = "torch.ones(2, device=lab.device)[torch.full((2,), 7, device=lab.device)]"
    ran, kept, suite = run_faulty(tmp_path, "asserts", assertion, workers="1")
    assert ran.code == 3, ran.output
    assert "1 failed, 1 passed" in ran.output
    said = re.search(r"the device is unusable after test_written.py::test_asserts, repetition (\d+) under ", ran.output)
    assert said is not None, ran.output
    verdicts = [record.verdict for record in kept if "asserts" in record.nodeid]
    assert verdicts == ["pass"] * int(said[1]) + ["infra"], "what had ended is kept, and nothing after it was run"
    assert [record.verdict for record in kept if "ordered" in record.nodeid] == ["pass"] * 30
    again = suite.run("--device", "cuda", "--count", "30", "-n", "1", f"--resume={tmp_path / 'run'}")
    assert again.code == 0, again.output
    assert "60 repetitions in" in again.output
    assert suite.processes() == []


def test_memory_that_runs_out_is_infrastructure_of_its_repetition(backend: RealBackend, tmp_path: Path) -> None:
    ran, kept, _ = run_faulty(tmp_path, "demands", "torch.empty(1 << 46, device=lab.device)", workers="0")
    assert ran.code == 3, ran.output
    assert re.search(r"infra: memory ran out in repetition \d+ under .*Tried to allocate", ran.output), ran.output
    assert re.search(r"cuda:0: [\d,]+ MiB allocated, [\d,]+ MiB reserved by PyTorch, [\d,]+ MiB of", ran.output)
    assert Counter(record.verdict for record in kept) == {"pass": 59, "infra": 1}
