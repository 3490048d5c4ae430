"""Names of streams, and the instrument that puts them into traces and plans."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.errors import UsageError
from harness.observe.holds import HoldOutcome, HoldState
from harness.observe.instrument import Instrument, ignored_prefixes
from harness.observe.streams import StreamNames
from harness.observe.trace import Access, Allocate, Free, HostSync, Launch, Record, RecordStream, SourceLine, Wait
from harness.perturb.plan import LaunchId, Plan


class FakeNative:
    """A native instrument that gives what the test wrote."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, ...]] = []
        self.outcomes: list[tuple[str, str | None, int]] = []
        self.begun: tuple[list[tuple[int, int, int]], bool, bool] | None = None
        self.preparing: list[bool] = []
        self.ignored: list[str] = []
        self.poisons: bool | None = None
        self.has_poison = True

    def begin_repetition(self, holds: list[tuple[int, int, int]], serial: bool, lines: bool) -> None:
        self.begun = (holds, serial, lines)

    def set_preparing(self, on: bool) -> None:
        self.preparing.append(on)

    def can_poison(self) -> bool:
        return self.has_poison

    def set_poisoning(self, on: bool) -> None:
        self.poisons = on

    def finish_repetition(self) -> tuple[list[tuple[Any, ...]], list[tuple[str, str | None, int]]]:
        return self.entries, self.outcomes

    def set_ignored_prefixes(self, prefixes: list[str]) -> None:
        self.ignored = prefixes


@pytest.fixture
def native() -> FakeNative:
    return FakeNative()


@pytest.fixture
def instrument(native) -> Instrument:
    names = StreamNames()
    names.assign("default", (0, 0))
    names.assign("fill", (0, 5))
    names.assign("far", (1, 5))
    return Instrument(native, names)


# Names.


def test_names_lead_to_streams_and_back():
    names = StreamNames()
    names.assign("fill", (0, 5))
    names.assign("far", (1, 5))
    assert (names.name((0, 5)), names.name((1, 5))) == ("fill", "far")
    assert (names.key("fill"), names.key("far"), names.key("other")) == ((0, 5), (1, 5), None)


@pytest.mark.parametrize(
    ("key", "name"), [((0, 0), "default"), ((1, 0), "default.1"), ((0, 7), "stream7"), ((3, 7), "stream7.3")]
)
def test_a_stream_that_nobody_named_is_called_after_its_id(key, name):
    names = StreamNames()
    assert names.name(key) == name
    assert names.key(name) == key, "a plan may name it from then on"
    assert names.names() == [name]


def test_names_are_listed_sorted_by_device():
    names = StreamNames()
    for name, key in (("fill", (0, 5)), ("ambient", (0, 3)), ("far", (1, 5))):
        names.assign(name, key)
    assert names.names() == ["ambient", "far", "fill"]
    assert names.of_device(0) == ["ambient", "fill"]
    assert names.of_device(1) == ["far"]
    assert names.of_device(2) == []


def test_cleared_names_are_forgotten_both_ways():
    names = StreamNames()
    names.assign("fill", (0, 5))
    names.clear()
    assert names.key("fill") is None
    assert names.name((0, 5)) == "stream5"


# The instrument.


def test_a_plan_reaches_the_native_instrument_in_the_order_of_release(native, instrument):
    plan = Plan((LaunchId("far", 2), LaunchId("fill", 0), LaunchId("unknown", 1)))
    instrument.begin(plan, serial=True)
    assert native.begun == ([(1, 5, 2), (0, 5, 0), (-1, -1, 1)], True, False)
    instrument.begin(Plan(), lines=True)
    assert native.begun == ([], False, True)


def test_preparing_ends_even_if_it_fails(native, instrument):
    instrument.begin(Plan())
    with pytest.raises(ValueError), instrument.preparing():
        assert native.preparing == [True]
        raise ValueError
    assert native.preparing == [True, False]


def test_outcomes_belong_to_the_launches_of_the_plan(native, instrument):
    holds = (LaunchId("far", 2), LaunchId("fill", 0), LaunchId("fill", 1), LaunchId("unknown", 1))
    instrument.begin(Plan(holds))
    native.outcomes = [("pending", None, 0), ("forced", "case.py", 7), ("ran", None, 0), ("missing", None, 0)]
    assert instrument.finish().holds == [
        HoldOutcome(holds[0], HoldState.PENDING, None),
        HoldOutcome(holds[1], HoldState.FORCED, SourceLine("case.py", 7)),
        HoldOutcome(holds[2], HoldState.RAN, None),
        HoldOutcome(holds[3], HoldState.MISSING, None),
    ]


def test_freed_memory_is_filled_where_that_can_be_had(native, instrument):
    instrument.begin(Plan())
    instrument.finish()
    assert native.poisons is None
    for wanted in (True, False):
        instrument.begin(Plan(), poison_memory=wanted)
        instrument.finish()
        assert native.poisons is wanted
    native.has_poison = False
    with pytest.raises(UsageError, match="cannot be filled"):
        instrument.begin(Plan(), poison_memory=True)


def test_an_outcome_too_few_is_no_outcome(native, instrument):
    instrument.begin(Plan((LaunchId("fill", 0),)))
    with pytest.raises(ValueError):
        instrument.finish()


def test_every_kind_of_raw_entry_has_its_place_in_the_trace(native, instrument):
    native.entries = [
        ("launch", 0, 5, 0, "aten::fill_", None, "case.py", 3, ((0, 0, 16, True), (1, 4, 8, False)), 70, -1, True),
        ("launch", 1, 5, 0, "aten::mul", "MulBackward0", None, 0, (), 71, 35, False),
        ("record", 0, 5, 1),
        ("wait", 1, 5, 1),
        ("sync_stream", 0, 5),
        ("sync_event", 1),
        ("allocate", 2, 0, 512, 0, 5, (1,)),
        ("record_stream", 2, 0, 512, 1, 5),
        ("free", 2, 128, 512, 0, 5, (1,), "case.py", 9),
        ("free", 0, 0, 16, 0, 5, (), None, 0),
    ]
    recording = instrument.finish()
    fill = Launch(
        LaunchId("fill", 0),
        "aten::fill_",
        None,
        SourceLine("case.py", 3),
        (Access(0, 0, 16, True), Access(1, 4, 8, False)),
        thread=0,
        backward=None,
        with_host=True,
    )
    mul = Launch(LaunchId("far", 0), "aten::mul", "MulBackward0", None, (), thread=1, backward=0)
    assert recording.trace == [
        fill,
        mul,
        Record("fill", 1),
        Wait("far", 1),
        HostSync("fill", None),
        HostSync(None, 1),
        Allocate(2, 0, 512, "fill", (1,)),
        RecordStream(2, 0, 512, "far"),
        Free(2, 128, 512, "fill", (1,), SourceLine("case.py", 9)),
        Free(0, 0, 16, "fill", (), None),
    ]
    assert [type(entry) for entry in recording.trace] == [
        Launch,
        Launch,
        Record,
        Wait,
        HostSync,
        HostSync,
        Allocate,
        RecordStream,
        Free,
        Free,
    ]
    assert recording.launches() == [fill, mul]


def test_synchronizing_a_device_is_synchronizing_its_streams_and_no_others(native, instrument):
    native.entries = [
        ("launch", 0, 9, 0, "aten::fill_", None, None, 0, (), 70, -1, False),
        ("sync_device", 0),
        ("sync_device", 1),
    ]
    _, *syncs = instrument.finish().trace
    assert syncs == [HostSync(name, None) for name in ("default", "fill", "stream9", "far")]


def test_an_unknown_entry_is_not_passed_over(native, instrument):
    native.entries = [("teleport", 0)]
    with pytest.raises(AssertionError, match="teleport"):
        instrument.finish()


def test_only_the_callers_files_are_the_callers(native, instrument):
    harness_folder = Path(__file__).parent.parent
    assert native.ignored == ignored_prefixes()
    ignored = tuple(native.ignored)
    assert str(Path(torch.__file__).parent / "autograd" / "graph.py").startswith(ignored)
    assert str(harness_folder / "campaign" / "lab.py").startswith(ignored)
    assert str(harness_folder / "plugin.py").startswith(ignored)
    assert contextlib.__file__.startswith(ignored)
    assert not __file__.startswith(ignored), "the harness' own tests call as cases do"
    assert not str(harness_folder.parent / "suites" / "test_seed_gradient.py").startswith(ignored)
    assert not (str(Path(torch.__file__).parent) + "vision/ops.py").startswith(ignored)
