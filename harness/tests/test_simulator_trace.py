"""The simulator's trace: which entries a body leaves, the bytes they touch, and the lines they come from."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import pytest
import torch

from harness.tests.simulator_support import Repetition, filled, preparing, registered, repetition, streams

NAN = float("nan")
ITEM = 4  # bytes of a float


@pytest.fixture(scope="module")
def native() -> ModuleType:
    return registered()


def _here() -> int:
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def _seed_body(native: ModuleType, holds: Any = (), *, waits: bool = True) -> tuple[float, Repetition]:
    """A seed filled on one stream, backward on another."""
    fill, ambient = streams(2)
    with repetition(native, [((fill, ambient)[which], index) for which, index in holds]) as result:
        with preparing(native):
            leaf = filled(8, 2.0).requires_grad_()
            product = leaf * filled(8, 3.0)
            seed, seen = filled(8, NAN), filled(8, NAN)
        with fill:
            seed.fill_(5.0)
        with ambient:
            if waits:
                ambient.wait_stream(fill)
            product.backward(seed)
            assert leaf.grad is not None
            seen.copy_(leaf.grad)
    return seen[0].item(), result


def test_a_seed_from_another_stream_is_right_under_every_hold_when_waited_for(native: ModuleType) -> None:
    value, baseline = _seed_body(native)
    assert value == 15.0
    assert baseline.operations() == ["aten::fill_.Scalar", "aten::mul.Tensor", "aten::copy_"]
    assert [entry[5] for entry in baseline.of_kind("launch")] == [None, "MulBackward0", None]
    for hold in ([(0, 0)], [(1, 0)], [(0, 0), (1, 0)], [(1, 0), (0, 0)]):
        value, result = _seed_body(native, hold)
        assert value == 15.0
        assert {outcome[0] for outcome in result.outcomes} == {"pending"}


def test_a_seed_from_another_stream_is_stale_under_its_hold_when_not_waited_for(native: ModuleType) -> None:
    value, result = _seed_body(native, [(0, 0)], waits=False)
    assert value != value
    assert result.outcomes[0][0] == "pending"
    assert _seed_body(native, waits=False)[0] == 15.0


def test_the_engine_s_recordings_and_waits_are_traced(native: ModuleType) -> None:
    _, result = _seed_body(native)
    assert [entry[0] for entry in result.of_kind("record", "wait")] == ["record", "wait"] * 3
    records, waits = result.of_kind("record"), result.of_kind("wait")
    assert [entry[3] for entry in records] == [entry[3] for entry in waits] == [1, 2, 3]


@pytest.mark.parametrize(
    ("view", "runs"),
    [
        (lambda base: base, [(0, 64)]),
        (lambda base: base[3:7], [(3, 7)]),
        (lambda base: base[::16], [(0, 1), (16, 17), (32, 33), (48, 49)]),
        (lambda base: base.view(4, 16)[:, 2:5], [(2, 5), (18, 21), (34, 37), (50, 53)]),
        (lambda base: base.view(4, 16).t(), [(0, 64)]),
        (lambda base: base.view(4, 16)[1:3], [(16, 48)]),
        (lambda base: base.view(2, 2, 16)[:, 1, ::8], [(16, 17), (24, 25), (48, 49), (56, 57)]),
        (lambda base: base.as_strided((3, 4), (2, 1), 8), [(8, 16)]),
        (lambda base: base[5:5], []),
    ],
)
def test_an_access_is_the_maximal_contiguous_runs_of_its_view(native: ModuleType, view: Any, runs: Any) -> None:
    with repetition(native) as result:
        with preparing(native):
            base = filled(64, 1.0)
        view(base).sum()
    (launch,) = result.of_kind("launch")
    assert [(start // ITEM, stop // ITEM) for _, start, stop, write in launch[8] if not write] == runs


def test_expanded_and_many_run_tensors(native: ModuleType) -> None:
    with repetition(native) as result:
        with preparing(native):
            row, wide = filled(4, 1.0), filled(3 * 5000, 1.0)
        row.expand(100, 4).sum()
        wide.view(5000, 3)[:, 0].sum()  # more runs than are listed: the covering range
    first, second = ([access[1:3] for access in launch[8] if not access[3]] for launch in result.of_kind("launch"))
    assert first == [(0, 4 * ITEM)]
    assert second == [(0, (3 * 4999 + 1) * ITEM)]


def test_views_launch_nothing(native: ModuleType) -> None:
    with repetition(native) as result:
        with preparing(native):
            base = filled(24, 1.0)
        base.view(4, 6).t().unsqueeze(0).expand(3, 6, 4)[1].reshape(6, 4).unfold(0, 2, 2).select(0, 1).detach()
        torch.view_as_complex(base.view(12, 2)).real.split(3)
    assert result.entries == []


def test_reads_and_writes_of_a_launch(native: ModuleType) -> None:
    with repetition(native) as result:
        with preparing(native):
            a, b = filled(4, 1.0), filled(4, 2.0)
        c = a + b
        torch.mul(a, b, out=c)
        a.add_(b)
        torch._foreach_add_([a, b], [c, c])
    modes = [[(access[0], access[3]) for access in launch[8]] for launch in result.of_kind("launch")]
    # blocks by first appearance: c is allocated before the first launch
    assert modes == [
        [(1, False), (2, False), (0, True)],
        [(1, False), (2, False), (0, True)],
        [(1, True), (2, False)],
        [(1, True), (2, True), (0, False), (0, False)],
    ]
    assert result.operations()[-1] == "aten::_foreach_add_.List"


def test_batch_normalization_writes_its_running_statistics(native: ModuleType) -> None:
    for training in (True, False):
        with repetition(native) as result:
            with preparing(native):
                value = torch.randn(8, 4, device="sim")
                mean, variance = filled(4, 0.0), filled(4, 1.0)
            torch.native_batch_norm(value, None, None, mean, variance, training, 0.1, 1e-5)
        (launch,) = result.of_kind("launch")
        written = [access[3] for access in launch[8]]
        assert written[:3] == [False, training, training]


def test_a_copy_between_devices_is_ordered_with_both_current_streams(native: ModuleType) -> None:
    source_stream, destination_stream = streams(1, 0)[0], streams(1, 1)[0]
    with repetition(native) as result:
        with preparing(native):
            source, destination = filled(4, 1.0, 0), filled(4, 2.0, 1)
        with source_stream, destination_stream:
            destination.copy_(source)
    assert [entry[:3] for entry in result.entries] == [
        ("record", 1, destination_stream.stream_id),
        ("wait", 0, source_stream.stream_id),
        ("launch", 0, source_stream.stream_id),
        ("record", 0, source_stream.stream_id),
        ("wait", 1, destination_stream.stream_id),
    ]
    assert destination[0].item() == 1.0


def test_host_syncs_are_traced(native: ModuleType) -> None:
    (stream,) = streams(1)
    with repetition(native) as result:
        with preparing(native):
            value = filled(4, 1.0)
        with stream:
            event = stream.record_event()
            stream.synchronize()
            event.synchronize()
            torch.accelerator.synchronize(1)
            value.cpu()
            value.copy_(torch.ones(4))
            value.copy_(torch.ones(4), non_blocking=True)
            value[0].item()
            assert event.query() and stream.query()
    stream_id = stream.stream_id
    assert [entry for entry in result.entries if entry[0] != "launch"] == [
        ("record", 0, stream_id, 1),
        ("sync_stream", 0, stream_id),
        ("sync_event", 1),
        ("sync_device", 1),
        ("sync_stream", 0, stream_id),
        ("sync_stream", 0, stream_id),
        ("sync_stream", 0, stream_id),
        ("sync_event", 1),
        ("sync_stream", 0, stream_id),
    ]


def test_waits_for_recordings_from_before_the_repetition_are_left_out(native: ModuleType) -> None:
    first, second = streams(2)
    before, never = first.record_event(), torch.Event(device="sim")
    with repetition(native) as result:
        with preparing(native):
            prepared = first.record_event()
        for event in (before, never, prepared):
            second.wait_event(event)
            event.synchronize()
    assert result.entries == []


def test_preparation_is_not_traced(native: ModuleType) -> None:
    with repetition(native) as result:
        with preparing(native):
            value = filled(4, 1.0)
            value.add_(1).cpu()
        value.add_(1)
    assert [entry[:4] for entry in result.entries] == [("launch", 0, 0, 0)]


def test_lines_of_launches_and_frees(native: ModuleType) -> None:
    fill, ambient = streams(2)
    with repetition(native, lines=True) as result:
        with preparing(native):
            leaf = filled(8, 2.0).requires_grad_()
            multiplied = _here() + 1
            product = leaf * 3
            seed = filled(8, 1.0)
        with fill:
            filled_at = _here() + 1
            seed.fill_(5.0)
        ambient.wait_stream(fill)
        with ambient:
            squared = _here() + 1
            loss = product.square()
            backward = _here() + 1
            loss.backward(seed)
        product.detach().clone()
        freed = _here() + 1
        del seed
    lines = [(entry[4], entry[5], entry[6], entry[7]) for entry in result.of_kind("launch")]
    assert lines[0] == ("aten::fill_.Scalar", None, __file__, filled_at)
    assert lines[1][3] == squared
    nodes = {entry[1]: entry[3] for entry in lines if entry[1]}
    assert nodes["PowBackward0"] == squared
    assert nodes["MulBackward0"] == multiplied
    assert {entry[2] for entry in lines} == {__file__}
    assert result.of_kind("free")[-1][7:] == (__file__, freed)
    assert backward in {entry[8] for entry in result.of_kind("free")}


def test_lines_of_a_python_function_s_backward_are_its_own(native: ModuleType) -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2

    with repetition(native, lines=True) as result:
        with preparing(native):
            output = Twice.apply(filled(8, 2.0).requires_grad_())
            seed = filled(8, 1.0)
        output.backward(seed)
    (launch,) = [entry for entry in result.of_kind("launch") if entry[5] == "TwiceBackward"]
    assert launch[6:8] == (__file__, inspect.getsourcelines(Twice.backward)[1] + 2)


def test_without_lines_none_are_recorded(native: ModuleType) -> None:
    with repetition(native) as result:
        value = filled(4, 1.0)
        del value
    assert {entry[6:8] for entry in result.of_kind("launch")} == {(None, 0)}
    assert {entry[7:9] for entry in result.of_kind("free")} == {(None, 0)}


def test_equal_bodies_give_equal_traces(native: ModuleType) -> None:
    def run() -> list[tuple[Any, ...]]:
        _, result = _seed_body(native)
        names: dict[tuple[int, int], int] = {}
        streams = {"launch": 2, "record": 2, "wait": 2, "allocate": 5, "free": 5, "record_stream": 5}
        places = {
            kind: {place, 10} if kind == "launch" else {place} for kind, place in streams.items()
        }  # and backwards
        return [
            tuple(
                names.setdefault((position, item), len(names)) if position in places[entry[0]] else item
                for position, item in enumerate(entry)
            )
            for entry in result.entries
        ]

    assert run() == run() == run()
