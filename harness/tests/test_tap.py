"""The tap, on the simulated accelerator: it sees what the autograd engine does and changes nothing of it.

The simulator plays the device. Where a test needs a launch to be pending, the simulator holds the one before it: the
tap's own way to hold, a sleep kernel, exists on real devices only (test_real_device.py).
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import harness.observe.tap as tap_package
from harness.errors import InfrastructureError
from harness.tests import observer_effects
from harness.tests.simulator_support import Repetition, filled, preparing, registered, repetition, streams

Tap = Any


@pytest.fixture(scope="module")
def simulator() -> ModuleType:
    return registered()


@pytest.fixture(scope="module")
def installed(simulator: ModuleType) -> Iterator[Tap]:
    native = tap_package.install("sim")
    native.set_ignored_prefixes([str(Path(torch.__file__).parent), str(Path(contextlib.__file__))])
    native.set_sleep_fallback(lambda cycles: None)
    yield native
    tap_package.remove()


@pytest.fixture
def tap(installed: Tap) -> Tap:
    installed.set_sleep_fallback(lambda cycles: None)
    return installed


def seed_gradient(
    fill: torch.Stream, ambient: torch.Stream, forward: torch.Stream, *, ordered: bool = True
) -> torch.Tensor:
    """A seed filled on one stream, backward called on another; returns a copy of the gradient made there."""
    with forward:
        leaf = filled(8, 2.0).requires_grad_()
        product = leaf * filled(8, 3.0)
    seed = torch.empty_like(product)
    for stream in (fill, ambient):
        stream.wait_stream(forward)
    with fill:
        seed.fill_(5.0)
    with ambient:
        if ordered:
            ambient.wait_stream(fill)
        product.backward(seed)
        assert leaf.grad is not None
        return leaf.grad.clone()


# What it sees.


def orders(result: Repetition) -> list[tuple[Any, ...]]:
    """Launches, waits, and the recordings that are waited for, numbered from 1.

    The simulator's allocator makes recordings of its own when it defers a reuse; they do not pass through the device
    guard.
    """
    waited = {entry[3] for entry in result.of_kind("wait")}
    numbers: dict[int, int] = {}
    found: list[tuple[Any, ...]] = []
    for entry in result.of_kind("launch", "record", "wait"):
        if entry[0] == "launch":
            found.append(entry[:8])
        elif entry[3] in waited:
            found.append((*entry[:3], numbers.setdefault(entry[3], len(numbers) + 1)))
    return found


def test_it_sees_the_launches_waits_and_records_that_the_simulator_sees(tap: Tap, simulator: ModuleType) -> None:
    fill, ambient, forward = streams(3)
    with repetition(simulator, lines=True) as expected, repetition(tap, lines=True) as result:
        gradient = seed_gradient(fill, ambient, forward)
        with ambient:
            (filled(4, 1.0).requires_grad_() + gradient[:4]).relu().sum().backward()
            torch.cat([gradient, gradient]).view(4, 4).t().softmax(0)
            torch._foreach_add_([gradient, gradient.clone()], 1.0)
            gradient.to("sim:1")
    assert orders(result) == orders(expected)
    assert len(result.of_kind("wait")) >= 5


def test_it_sees_launches_in_the_threads_of_the_engine(tap: Tap) -> None:
    threads = set()

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            ctx.save_for_backward(value)
            return value * value

        @staticmethod
        def backward(ctx, gradient):
            threads.add(threading.get_ident())
            return 2 * ctx.saved_tensors[0] * gradient

    with repetition(tap) as result:
        Square.apply(filled(4, 3.0).requires_grad_()).sum().backward()
    assert threads and threading.get_ident() not in threads, "the engine ran backward in this thread"
    in_backward = [entry[4] for entry in result.of_kind("launch") if entry[5] == "SquareBackward"]
    assert in_backward == ["aten::mul.Tensor", "aten::mul.Tensor"]


def test_launches_are_counted_for_each_stream_of_each_device(tap: Tap) -> None:
    first, second = streams(2)
    (other,) = streams(1, device=1)
    with repetition(tap) as result:
        with preparing(tap):
            values = [filled(4, 1.0), filled(4, 1.0), filled(4, 1.0, device=1)]
        for _ in range(2):
            for stream, value in zip((first, second, other), values, strict=True):
                with stream:
                    value.add_(1)
    keys = [(stream.device_index, stream.stream_id) for stream in (first, second, other)]
    assert [entry[1:4] for entry in result.of_kind("launch")] == [(*key, i) for i in range(2) for key in keys]


def test_views_allocations_and_queries_are_no_launches(tap: Tap) -> None:
    with repetition(tap) as result:
        value = torch.empty(4, 4, device="sim")
        value.view(16).t()
        value[1:, 0].detach().unsqueeze(0).expand(2, 3)
        torch.empty_like(value).resize_(2, 2)
        value.new_empty(3).set_()  # type: ignore[call-overload]
        value.record_stream(torch.accelerator.current_stream())
        value.is_pinned()
        value.data_ptr()
    assert result.operations() == []


def test_an_operation_on_other_devices_is_no_launch(tap: Tap) -> None:
    with repetition(tap) as result:
        (torch.ones(4) + 1).sum().item()
        torch.empty(4).copy_(torch.ones(4))
    assert result.entries == []


def test_operations_inside_a_launch_are_part_of_it(tap: Tap) -> None:
    with repetition(tap) as result:
        with preparing(tap):
            value = filled(4, 1.0)
        value.to("sim:1")  # on the simulator this copies by an operation of its own
        torch.nn.functional.linear(value.view(1, 4), value.view(1, 4))  # composite: what it calls is the launch
    assert result.operations() == ["aten::copy_", "aten::mm"]


@pytest.mark.parametrize(
    ("operation", "launches"),
    [
        ("aten::mul.Tensor", True),
        ("aten::add_.Tensor", True),
        ("aten::fill_.Scalar", True),
        ("aten::copy_", True),
        ("aten::_local_scalar_dense", True),
        ("aten::mm", True),
        ("aten::_foreach_add_.Scalar", True),
        ("aten::equal", True),
        ("aten::_assert_async", True),
        ("aten::tril_indices", True),
        ("aten::view", False),
        ("aten::as_strided", False),
        ("aten::detach", False),
        ("aten::empty.memory_format", False),
        ("aten::empty_strided", False),
        ("aten::resize_", False),
        ("aten::set_.source_Tensor", False),
        ("aten::record_stream", False),
        ("aten::is_pinned", False),
        ("aten::_fused_sdp_choice", False),
        ("aten::ones_like", False),
        ("aten::clone", False),
        ("aten::linear", False),
        ("aten::item", False),
        ("aten::_to_copy", False),
    ],
)
@pytest.mark.parametrize("device_type", ["sim", "cuda"])
def test_what_counts_as_a_launch(tap: Tap, device_type: str, operation: str, launches: bool) -> None:
    if device_type == "cuda" and not torch.backends.cuda.is_built():
        pytest.skip("not covered: this torch was built without CUDA, so no kernel is registered for it")
    assert tap.is_launch(operation, device_type) is launches


def test_every_virtual_of_the_device_guard_is_forwarded() -> None:
    header = Path(torch.__file__).parent / "include/c10/core/impl/DeviceGuardImplInterface.h"
    interface = header.read_text().partition("struct C10_API DeviceGuardImplInterface")[2].partition("\n};")[0]
    virtuals = set(re.findall(r"virtual\s+[\w:*\s]+?[\s*](\w+)\(", interface))
    assert {"record", "block", "synchronizeDevice", "recordDataPtrOnStream", "elapsedTime"} <= virtuals
    source = (Path(tap_package.__file__).parent / "forwarding_guard.h").read_text()
    forwarded = set(re.findall(r"(\w+)\([^()]*\) const (?:noexcept )?override \{", source))
    assert virtuals <= forwarded, f"not forwarded: {virtuals - forwarded}"


# Host synchronization.


def test_host_synchronizations_are_seen(tap: Tap) -> None:
    (stream,) = streams(1)
    event = torch.Event(device="sim")
    with repetition(tap) as result:
        with preparing(tap):
            value = filled(4, 1.0)
        with stream:
            value.add_(1)
        event.record(stream)
        event.synchronize()
        stream.synchronize()
        torch.accelerator.synchronize(1)
        assert event.query()
    synchronizations = result.of_kind("sync_stream", "sync_event", "sync_device")
    assert synchronizations == [
        ("sync_event", 1),
        ("sync_stream", 0, stream.stream_id),
        ("sync_device", 1),
        ("sync_event", 1),
    ]


def test_copies_that_block_and_item_synchronize_their_stream(tap: Tap) -> None:
    (stream,) = streams(1)
    with repetition(tap) as result, stream:
        with preparing(tap):
            value = filled(4, 1.0)
        value.cpu()
        torch.ones(4).to("sim")
        value.sum().item()
        torch.ones(4).to("sim", non_blocking=True)
    entries = result.of_kind("launch", "sync_stream")
    pairs = zip(entries, [*entries[1:], ("end",)], strict=True)
    followers = [following[0] for entry, following in pairs if entry[0] == "launch"]
    assert result.operations() == [
        "aten::copy_",
        "aten::copy_",
        "aten::sum.dim_IntList",
        "aten::_local_scalar_dense",
        "aten::copy_",
    ]
    assert followers == ["sync_stream", "sync_stream", "launch", "sync_stream", "end"]


def test_waits_for_recordings_of_before_are_left_out(tap: Tap) -> None:
    first, second = streams(2)
    event = torch.Event(device="sim")
    event.record(first)
    with repetition(tap) as result:
        event.wait(second)
        event.synchronize()
        with preparing(tap):
            event.record(first)
        event.wait(second)
    assert result.entries == []


def test_recordings_of_the_repetition_before_are_forgotten(tap: Tap) -> None:
    first, second = streams(2)
    event = torch.Event(device="sim")
    with repetition(tap) as result:
        event.record(first)
    assert [entry[0] for entry in result.entries] == ["record"]
    with repetition(tap) as result:
        event.wait(second)
        event.synchronize()
    assert result.entries == []


# Preparation, and threads of the harness.


def test_what_is_prepared_is_not_counted(tap: Tap) -> None:
    with repetition(tap) as result:
        with preparing(tap):
            with preparing(tap):
                value = filled(4, 1.0)
            value.add_(1)
            torch.accelerator.synchronize(0)
        value.mul_(2)
    assert [entry[3:5] for entry in result.entries] == [(0, "aten::mul_.Tensor")]


def test_a_thread_of_the_harness_is_ignored(tap: Tap) -> None:
    stream, event = streams(1)[0], torch.Event(device="sim")

    def load() -> None:
        tap.ignore_this_thread(True)
        with stream:
            filled(4, 1.0).add_(1)
        event.record(stream)
        stream.synchronize()

    with repetition(tap) as result:
        event.record(stream)
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
        event.wait(streams(1)[0])  # for the recording of the harness
    assert [entry[0] for entry in result.entries] == ["record"]


# Holds.


def test_a_hold_is_pending_at_the_end_of_the_body(tap: Tap, simulator: ModuleType) -> None:
    held, other = streams(2)
    with repetition(simulator, [(held, 0)]), repetition(tap, [(held, 1), (other, 0), (other, 7)]) as result:
        with preparing(tap), preparing(simulator):
            values = [filled(4, 1.0), filled(4, 1.0)]
        for stream, value in zip((held, other), values, strict=True):
            with stream:
                value.add_(1)
                value.add_(1)
    assert result.outcomes == [("pending", None, 0), ("ran", None, 0), ("missing", None, 0)]


def test_a_hold_in_a_thread_of_the_engine_is_pending(tap: Tap, simulator: ModuleType) -> None:
    fill, ambient, forward = streams(3)
    with repetition(simulator, [(fill, 0)]), repetition(tap, [(forward, 3)]) as result:
        seed_gradient(fill, ambient, forward)
    assert result.of_kind("launch")[4][1:6] == (0, forward.stream_id, 3, "aten::mul.Tensor", "MulBackward0")
    assert result.outcomes == [("pending", None, 0)], "its launch waits for the fill, which the simulator holds"


def test_each_hold_sleeps_longer_than_the_one_before(tap: Tap) -> None:
    slept: list[int] = []
    tap.set_sleep_fallback(slept.append)
    tap.set_hold_cycles(1000)
    first, second = streams(2)
    with repetition(tap, [(second, 0), (first, 0)]):
        with preparing(tap):
            value = filled(4, 1.0)
        for stream in (first, second):
            with stream:
                value.add_(1)
    assert slept == [2000, 1000]


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
@pytest.mark.parametrize("prepares", [False, True])
def test_a_host_synchronization_forces_a_pending_hold(
    tap: Tap, simulator: ModuleType, synchronize: Any, prepares: bool
) -> None:
    held, waiting = streams(2)
    with repetition(simulator, [(held, 0)]), repetition(tap, [(held, 1)]) as result:
        with preparing(tap), preparing(simulator):
            value = filled(4, 1.0)
        with held:
            value.add_(1)
            value.add_(1)
        waiting.wait_stream(held)
        event = waiting.record_event()
        with preparing(tap) if prepares else contextlib.nullcontext():
            synchronize(waiting, event, value)
    first_line = synchronize.__code__.co_firstlineno
    line = first_line + (2 if synchronize in {read_item, copy_to_host} else 1)
    assert result.outcomes == [("forced", __file__, line)]


def test_asking_until_the_answer_is_yes_forces_a_hold(tap: Tap, simulator: ModuleType) -> None:
    (held,) = streams(1)

    def somebody_else() -> None:
        tap.ignore_this_thread(True)
        held.synchronize()

    with repetition(simulator, [(held, 0)]), repetition(tap, [(held, 1)]) as result:
        with preparing(tap), preparing(simulator):
            value = filled(4, 1.0)
        with held:
            value.add_(1)
            value.add_(1)
        line, complete = sys._getframe().f_lineno, held.query()
        assert not complete
        thread = threading.Thread(target=somebody_else)
        thread.start()
        thread.join()
        assert held.query()
    assert result.outcomes == [("forced", __file__, line)]


def test_a_synchronization_that_does_not_reach_a_hold_leaves_it_pending(tap: Tap, simulator: ModuleType) -> None:
    held, other = streams(2)
    with repetition(simulator, [(held, 0)]), repetition(tap, [(held, 1)]) as result:
        with preparing(tap), preparing(simulator):
            values = [filled(4, 1.0), filled(4, 1.0)]
        event = held.record_event()
        with held:
            values[0].add_(1)
            values[0].add_(1)
        with other:
            other.wait_event(event)  # recorded before the held launch
            values[1].add_(1)
        other.synchronize()
    assert result.outcomes == [("pending", None, 0)]


def test_a_hold_that_had_run_at_the_first_synchronization_proves_nothing(tap: Tap) -> None:
    (held,) = streams(1)
    with repetition(tap, [(held, 0)]) as result:
        with preparing(tap):
            value = filled(4, 1.0)
        with held:
            value.add_(1)
        held.synchronize()
    assert result.outcomes == [("ran", None, 0)]


def test_events_of_holds_are_used_again(tap: Tap) -> None:
    (held,) = streams(1)
    for _ in range(3):
        with repetition(tap, [(held, 0), (held, 1)]) as result:
            with preparing(tap):
                value = filled(4, 1.0)
            with held:
                value.add_(1)
                value.add_(1)
        assert [outcome[0] for outcome in result.outcomes] == ["ran", "ran"]


def test_the_end_of_a_repetition_completes_all_work(tap: Tap, simulator: ModuleType) -> None:
    held, other = streams(1)[0], streams(1, device=1)[0]
    with repetition(simulator, [(held, 0), (other, 0)]) as expected:
        with repetition(tap):
            with preparing(tap), preparing(simulator):
                values = [filled(4, 1.0), filled(4, 1.0, device=1)]
            for stream, value in zip((held, other), values, strict=True):
                with stream:
                    value.add_(1)
        assert held.query() and other.query()
    assert [state for state, _, _ in expected.outcomes] == ["forced", "forced"]


# The fully synchronized reference.


@pytest.mark.parametrize("serial", [False, True])
def test_serial_completes_every_launch_before_the_next(tap: Tap, simulator: ModuleType, serial: bool) -> None:
    fill, ambient, forward = streams(3)
    with repetition(simulator, [(fill, 0)]), repetition(tap, serial=serial) as result:
        gradient = seed_gradient(fill, ambient, forward, ordered=False)
    assert (gradient.cpu().tolist() == [15.0] * 8) is serial
    assert not result.of_kind("sync_stream", "sync_event", "sync_device"), "the tap's own are not the body's"


# Source lines.


def test_lines_of_forward_launches_are_the_callers(tap: Tap) -> None:
    with repetition(tap, lines=True) as result:
        value = filled(4, 1.0)
        line = sys._getframe().f_lineno + 1
        value.add_(1)
    launch = result.of_kind("launch")[-1]
    assert launch[4:8] == ("aten::add_.Tensor", None, __file__, line)


def test_lines_of_backward_launches_are_those_of_the_forward(tap: Tap) -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2  # the launch in Python

    with repetition(tap, lines=True) as result:
        with preparing(tap):
            leaf = filled(4, 1.0).requires_grad_()
            line, product = sys._getframe().f_lineno, leaf * filled(4, 3.0)
        python_line = Twice.backward.__code__.co_firstlineno + 2
        total = Twice.apply(product)
        for _ in range(2):
            backward_line = sys._getframe().f_lineno + 1
            total.backward(filled(4, 5.0), retain_graph=True)
    nodes = {entry[5]: entry[6:8] for entry in result.of_kind("launch") if entry[5] is not None}
    assert nodes == {
        "MulBackward0": (__file__, line),
        "TwiceBackward": (__file__, python_line),
        "torch::autograd::AccumulateGrad": (__file__, backward_line),
    }


def test_lines_are_known_where_backward_runs_in_the_callers_thread(tap: Tap) -> None:
    with repetition(tap, lines=True) as result:
        leaf = filled(4, 1.0).requires_grad_()
        line, product = sys._getframe().f_lineno, leaf * filled(4, 3.0)
        with torch.autograd.set_multithreading_enabled(False):
            product.backward(filled(4, 5.0))
    assert [entry[6:8] for entry in result.of_kind("launch") if entry[5] == "MulBackward0"] == [(__file__, line)]


def test_without_lines_none_are_recorded(tap: Tap) -> None:
    with repetition(tap) as result:
        filled(4, 1.0)
    assert result.of_kind("launch")[0][6:8] == (None, 0)


# It changes nothing.


@pytest.mark.parametrize("lines", [False, True])
@pytest.mark.parametrize("effect", observer_effects.ALL, ids=lambda effect: effect.__name__)
def test_the_observer_changes_nothing(tap: Tap, effect: Any, lines: bool) -> None:
    without = effect("sim")
    with repetition(tap, lines=lines) as result:
        under_observation = effect("sim")
    assert result.of_kind("launch")
    assert under_observation == without == observer_effects.WANTED[effect]


def test_a_dispatch_mode_would_change_something() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            return function(*arguments, **(keywords or {}))

    effect = observer_effects.sums_of_gradients_are_made_in_place
    with Mode():
        assert effect("cpu") != observer_effects.WANTED[effect], "the effect that these tests look for is not there"


# Coming and going.


def test_it_is_gone_after_remove(simulator: ModuleType, installed: Tap) -> None:
    def observe() -> list[str]:
        with repetition(installed) as result:
            filled(4, 1.0).cpu()
            streams(1)[0].record_event()
        return [entry[0] for entry in result.entries]

    before = observe()
    tap_package.remove()
    try:
        with pytest.raises(RuntimeError, match="no tap is installed"):
            installed.begin_repetition([], False, False)
    finally:
        assert tap_package.install("sim") is installed
        installed.set_sleep_fallback(lambda cycles: None)
    assert before[-1] == "record"
    assert observe() == before, "once each: the first installation is not underneath"


def test_a_second_device_type_is_refused(installed: Tap) -> None:
    assert tap_package.install("sim") is installed
    with pytest.raises(InfrastructureError, match="one backend a process"):
        tap_package.install("cuda")


def test_a_device_that_does_not_exist_is_refused(installed: Tap) -> None:
    tap_package.remove()
    try:
        with pytest.raises(InfrastructureError, match="cannot be installed on hpu"):
            tap_package.install("hpu")
        with pytest.raises(InfrastructureError, match="cannot be installed on nonsense"):
            tap_package.install("nonsense")
    finally:
        tap_package.install("sim")


def test_a_hold_without_a_way_to_hold_is_refused(installed: Tap) -> None:
    tap_package.remove()
    try:
        tap_package.install("sim")
        with pytest.raises(RuntimeError, match="no sleep kernel"):
            installed.begin_repetition([(0, 0, 0)], False, False)
    finally:
        installed.set_sleep_fallback(lambda cycles: None)


def test_an_error_while_observing_is_raised_at_the_end(tap: Tap) -> None:
    def fail(cycles: int) -> None:
        raise ValueError("no sleep today")

    tap.set_sleep_fallback(fail)
    (stream,) = streams(1)
    tap.begin_repetition([(0, stream.stream_id, 0)], False, False)
    with stream:
        filled(4, 1.0)
    with pytest.raises(RuntimeError, match=r"observing aten::fill_ failed: .*no sleep today"):
        tap.finish_repetition()
    with repetition(tap) as result:
        filled(4, 1.0)
    assert result.operations() == ["aten::fill_.Scalar"]
