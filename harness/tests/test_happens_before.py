"""Happens-before against its definition, and its reports."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings

from harness.judge import happens_before
from harness.judge.happens_before import find_races
from harness.observe.trace import (
    Allocate,
    Free,
    HostSync,
    Launch,
    Record,
    SourceLine,
    Trace,
    Wait,
)
from harness.perturb.plan import LaunchId
from harness.tests.happens_before_definition import (
    Definition,
    RaceKey,
    host,
    host_read,
    host_write,
    launch,
    random_traces,
    read,
    traces,
    write,
)
from harness.tests.mutation import planted
from harness.tests.processor_time import seconds

# The comparison.


def reported(module: Any, trace: Trace) -> list[RaceKey]:
    position = {id(entry): index for index, entry in enumerate(trace)}
    return [
        (position[id(race.first)], position[id(race.second)], race.block, race.kind, race.start, race.stop)
        for race in module.find_races(trace)
    ]


def disagreement(module: Any, trace: Trace) -> str | None:
    """What a module's ``find_races`` and the definition differ in, or None.

    They must report the same races, which are all races but for superseded bytes; and superseding must hide no access:
    an entry that races with anything on a block is reported with something on that block.
    """
    definition = Definition(trace)
    expected = definition.races(superseded=False)
    found = reported(module, trace)
    if set(found) != expected or len(found) != len(expected):
        return f"missing {expected - set(found)}, too many {set(found) - expected} of {found}"
    if found != sorted(found, key=lambda race: (race[1], race[0], race[2])):
        return f"out of order: {found}"
    every = definition.races(superseded=True)
    if {(second, block) for _, second, block, *_ in every} != {(second, block) for _, second, block, *_ in found}:
        return "an access that races is not reported"
    return None


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(traces())
def test_agrees_with_the_definition(trace: Trace) -> None:
    assert disagreement(happens_before, trace) is None


def test_agrees_with_the_definition_where_planted_bugs_must_not() -> None:
    assert [disagreement(happens_before, trace) for trace in random_traces()] == [None] * len(random_traces())


IS_WORK = "clock[stream] = index\n            if isinstance(entry, Record):"
DEFERRED = "covered = _latest(recordings, deferred) if deferred else None"

PLANTED_BUGS = {
    "waits order nothing": ("_join(clock, recordings[event])", "pass"),
    "a wait binds to the latest work": ("recordings[event] = clock.copy()", "recordings[event] = clock"),
    "a wait is not work": (IS_WORK, f"if isinstance(entry, Record): {IS_WORK}"),
    "a record is not work": (IS_WORK, f"if isinstance(entry, Wait): {IS_WORK}"),
    "host syncs order nothing": ("_join(host, known)", "pass"),
    "a full host sync orders nothing": ("blocks.clear()", "pass"),
    "host syncs do not reach new streams": ("host.copy()", "{}"),
    "host syncs do not reach old streams": ("_join(clock, host)", "pass"),
    "a stream is not ordered after itself": (">= time", "> time"),
    "one byte too many": ("bisect_left(bounds, stop, low)", "bisect_left(bounds, stop + 1, low)"),
    "one byte too few": ("low = bisect_left(bounds, start)", "low = bisect_left(bounds, start + 1)"),
    "the first part of a cell forgets": ("cells[low - 1] if low else []", "[]"),
    "the last part of a cell forgets": ("cells.insert(high, cells[high - 1])", "cells.insert(high, [])"),
    "reads do not conflict with writes": ("(write or wrote)", "(write and wrote)"),
    "reads conflict with reads": ("(write or wrote) and", ""),
    "a later read hides a write": ("if wrote and not write:", "if False:"),
    "a later read hides no read": ("if wrote and not write:", "if not write:"),
    "nothing is ever left out": ("if wrote and not write:", "if True:"),
    "cells merge with what differs": ("at == low or cells[at] != cells[at - 1]", "at == low"),
    "frees are ignored": ("_visit(blocks, block, start, stop, free, clock, covered, conflicts)", "pass"),
    "nothing of the owner is pending at a free": ("free = (clock.get(owner, -1),", "free = (-1,"),
    "a free is work of the owner": ("free = (clock.get(owner, -1),", "free = (index,"),
    "record_stream is ignored": (DEFERRED, "covered = None"),
    "record_stream makes the owner wait": (DEFERRED, f"_join(clock, _latest(recordings, deferred)); {DEFERRED}"),
    "a free takes the whole block": (
        "_visit(blocks, block, start, stop, free, clock, covered",
        "_visit(blocks, block, 0, 6, free, clock, covered",
    ),
    "the allocator orders nothing": ("if after and", "if False and"),
    "the allocator orders the whole block": (
        "range(low, high):\n                    cells",
        "range(len(cells)):\n                    cells",
    ),
    "the allocator forgets everything": ("seen.get(visit[1], -1) < visit[0]", "False"),
    "the host is ordered after everything": (
        "(index, _HOST, write, index), host, None,",
        "(index, _HOST, write, index), {**host, **dict.fromkeys(clocks, index)}, None,",
    ),
    "host accesses are ignored": (
        "_visit(blocks, block, start, stop, (index, _HOST, write, index), host, None, conflicts)",
        "pass",
    ),
    "the host is not ordered before old streams": ("clock[_HOST] = time", "pass"),
    "the host is not ordered before itself": ("host[_HOST] = time", "pass"),
    "the host writes nothing": ("(index, _HOST, write, index), host", "(index, _HOST, False, index), host"),
    "the host waits for nothing when it frees": ("clock, free = host, (index", "clock, free = {_HOST: index}, (index"),
    "kinds are mixed up": ("rank = 2 if not wrote else 1 if write else 0", "rank = 2 if not wrote else 0"),
    "the worst kind is forgotten": ("min(rank, old_rank)", "rank"),
    "bytes are forgotten": ("min(begin, old_begin)", "begin"),
    "sorted by the first": ("sorted(conflicts.items())", "sorted(conflicts.items(), key=lambda item: item[0][1])"),
}


@pytest.mark.parametrize("bug", PLANTED_BUGS)
def test_planted_bug_is_noticed(bug: str) -> None:
    """The comparison with the definition is no use if it does not see an oracle that is wrong."""
    copy = planted(happens_before, *PLANTED_BUGS[bug])
    assert any(disagreement(copy, trace) for trace in random_traces())


# Tables.


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        (read, read, None),
        (write, read, "read after write"),
        (read, write, "write after read"),
        (write, write, "write after write"),
    ],
)
def test_what_conflicts(first: Callable[..., Launch], second: Callable[..., Launch], kind: str | None) -> None:
    races = find_races([first("a:0"), second("b:0")])
    assert [race.kind for race in races] == ([kind] if kind else [])
    assert find_races([first("a:0"), second("a:1")]) == []


@pytest.mark.parametrize(
    ("first", "second", "overlap"),
    [
        ((0, 4), (4, 8), None),
        ((4, 8), (0, 4), None),
        ((0, 4), (3, 8), (3, 4)),
        ((3, 8), (0, 4), (3, 4)),
        ((0, 8), (2, 4), (2, 4)),
        ((2, 4), (0, 8), (2, 4)),
        ((0, 0), (0, 8), None),
        ((0, 8), (8, 8), None),
    ],
)
def test_bytes_that_overlap(first: tuple[int, int], second: tuple[int, int], overlap: tuple[int, int] | None) -> None:
    races = find_races([write("a:0", *first), read("b:0", *second)])
    assert [(race.start, race.stop) for race in races] == ([overlap] if overlap else [])


def test_other_blocks_do_not_conflict() -> None:
    assert find_races([write("a:0", block=0), write("b:0", block=1)]) == []


def test_in_place_operation_is_one_race() -> None:
    fill, add = write("a:0"), launch("b:0", (0, 0, 4, False), (0, 0, 4, True))
    assert [race.kind for race in find_races([fill, add])] == ["read after write"]


@pytest.mark.parametrize(
    ("name", "between", "races"),
    [
        ("nothing", [], 1),
        ("record without wait", [Record("a", 1)], 1),
        ("wait", [Record("a", 1), Wait("b", 1)], 0),
        ("wait on the wrong stream", [Record("a", 1), Wait("c", 1)], 1),
        ("wait through a third stream", [Record("a", 1), Wait("c", 1), Record("c", 2), Wait("b", 2)], 0),
        ("wait for a recording made before", [Wait("b", 0)], 1),
        ("stream sync", [HostSync("a", None)], 0),
        ("sync of the other stream", [HostSync("b", None)], 1),
        ("event sync", [Record("a", 1), HostSync(None, 1)], 0),
        ("sync of everything", [HostSync(None, None)], 0),
    ],
)
def test_what_orders(name: str, between: Trace, races: int) -> None:
    new_stream: Trace = [Record("a", 0), write("a:0"), *between, read("b:0")]
    known_stream: Trace = [read("b:0", block=9), Record("a", 0), write("a:0"), *between, read("b:1")]
    assert [len(find_races(trace)) for trace in (new_stream, known_stream)] == [races, races]


def test_wait_binds_to_its_recording_and_not_to_later_work() -> None:
    trace: Trace = [write("a:0"), Record("a", 1), write("a:1"), Record("a", 2), Wait("b", 1), read("b:0")]
    assert [(race.first, race.second) for race in find_races(trace)] == [(trace[2], trace[5])]


MAKE_AND_USE: Trace = [Allocate(0, 0, 4, "a", ()), write("a:0"), Record("a", 1), Wait("b", 1), read("b:0")]
REUSE: Trace = [Allocate(0, 0, 4, "a", ()), write("a:1")]


def test_missing_record_stream_is_named() -> None:
    races = find_races([*MAKE_AND_USE, Free(0, 0, 4, "a", (), SourceLine("case.py", 9)), *REUSE])
    assert [race.kind for race in races] == ["freed while in use", "write after read"]
    freed, reused = races
    assert (freed.reused, reused.reused) == (False, True)
    assert freed.missing_wait == (
        "block 0 is freed while b:0 (op) on stream 'b' may still use it: record_stream of 'b' on the tensor is missing"
        ", or stream 'a' must wait for stream 'b' after b:0 (op) and before the free of block 0 (case.py:9)."
    )
    assert reused.missing_wait == (
        "block 0 was freed and handed out again while b:0 (op) on stream 'b' may still use it: record_stream of 'b' on "
        "the tensor is missing, or stream 'a' must wait for stream 'b' after b:0 (op) and before a:1 (op)."
    )
    assert freed.second_stream == "a" and freed.first_stream == "b"


def test_record_stream_orders_the_reuse_only_if_the_allocator_waited() -> None:
    deferred: Trace = [*MAKE_AND_USE, Record("b", 2), Free(0, 0, 4, "a", (2,), None)]
    assert find_races([*deferred, Allocate(0, 0, 4, "a", (2,)), write("a:1")]) == []
    assert [race.kind for race in find_races([*deferred, *REUSE])] == ["write after read"]


def test_owner_that_waits_may_free() -> None:
    trace: Trace = [*MAKE_AND_USE, Record("b", 2), Wait("a", 2), Free(0, 0, 4, "a", (), None), *REUSE]
    assert find_races(trace) == []


def test_reuse_orders_no_other_memory() -> None:
    """That the allocator saw a recording complete is luck; another block must not rely on it."""
    used_too = launch("b:0", (0, 0, 4, False), (1, 0, 4, True))
    trace = [*MAKE_AND_USE[:-1], used_too, Record("b", 2), Free(0, 0, 4, "a", (2,), None), Allocate(0, 0, 4, "a", (2,))]
    assert [(race.kind, race.block) for race in find_races([*trace, write("a:1"), read("a:2", block=1)])] == [
        ("read after write", 1)
    ]


def test_what_is_freed_and_handed_out_may_be_part_of_a_block() -> None:
    used: Trace = [Allocate(0, 0, 8, "a", ()), launch("a:0", (0, 0, 8, True)), Record("a", 1), Wait("b", 1)]
    used += [launch("b:0", (0, 4, 8, False))]
    assert find_races([*used, Free(0, 0, 4, "a", (), None)]) == []
    (race,) = find_races([*used, Free(0, 2, 6, "a", (), None), write("a:1", 0, 4)])
    assert (race.kind, race.start, race.stop) == ("freed while in use", 4, 6)
    deferred: Trace = [*used, Record("b", 2), Free(0, 0, 8, "a", (2,), None)]
    (race,) = find_races([*deferred, Allocate(0, 0, 6, "a", (2,)), write("a:1", 0, 8)])
    assert (race.kind, race.start, race.stop, race.reused) == ("write after read", 6, 8, True)


def test_memory_counts_as_reused_only_if_bytes_in_conflict_were_freed() -> None:
    used, overwritten = read("b:0", 0, 4), write("a:0", 0, 4)
    assert [race.reused for race in find_races([used, Free(0, 4, 8, "a", (), None), overwritten])] == [False]
    assert [race.reused for race in find_races([used, Free(0, 3, 8, "a", (), None), overwritten])] == [False, True]


def test_use_on_another_stream_must_wait_for_what_the_owner_did_before() -> None:
    trace: Trace = [
        Allocate(0, 0, 4, "a", ()),
        write("a:0"),
        Free(0, 0, 4, "a", (), None),
        Allocate(0, 0, 4, "a", ()),
        write("b:0"),
    ]
    (race,) = find_races(trace)
    assert race.kind == "write after free" and race.hold == LaunchId("a", 0)
    assert find_races([*trace[:2], HostSync("a", None), *trace[2:]]) == []


@pytest.mark.parametrize(
    ("name", "between", "races"),
    [
        ("nothing", [], 1),
        ("wait on another stream", [Record("a", 1), Wait("b", 1)], 1),
        ("stream sync", [HostSync("a", None)], 0),
        ("sync of another stream", [HostSync("b", None)], 1),
        ("sync of a stream that waited", [Record("a", 1), Wait("b", 1), HostSync("b", None)], 0),
        ("event sync", [Record("a", 1), HostSync(None, 1)], 0),
        ("sync of an event recorded before", [HostSync(None, 0)], 1),
        ("sync of everything", [HostSync(None, None)], 0),
    ],
)
def test_what_orders_the_host_after_a_copy(name: str, between: Trace, races: int) -> None:
    copy_to_host: Trace = [Record("a", 0), write("a:0"), *between, host_read()]
    copy_from_host: Trace = [Record("a", 0), read("a:0"), *between, host_write()]
    found = [[race.kind for race in find_races(trace)] for trace in (copy_to_host, copy_from_host)]
    assert found == [["read after write"] * races, ["write after read"] * races]


def test_what_the_host_does_comes_before_what_it_enqueues() -> None:
    assert find_races([host_write(), read("a:0"), read("b:0"), host_read()]) == []
    assert find_races([read("a:0", block=9), host_write(), read("a:1"), read("b:0"), host_read()]) == []
    assert find_races([host_write(), host_write(), host_read()]) == []


def test_host_accesses_of_other_bytes_do_not_conflict() -> None:
    assert find_races([write("a:0", 0, 2), host_read(2, 4), host_write(0, 4, block=1)]) == []
    (race,) = find_races([write("a:0", 0, 3), host_read(2, 4)])
    assert (race.start, race.stop) == (2, 3)


def test_pinned_memory_may_be_freed_while_a_copy_that_the_allocator_knows_of_uses_it() -> None:
    used: Trace = [Allocate(0, 0, 4, None, ()), host_write(), read("a:0")]
    deferred: Trace = [*used, Record("a", 1), Free(0, 0, 4, None, (1,), None)]
    assert find_races([*deferred, Allocate(0, 0, 4, None, (1,)), host_write()]) == []
    freed, reused = find_races(
        [*used, Free(0, 0, 4, None, (), SourceLine("case.py", 9)), Allocate(0, 0, 4, None, ()), host_write()]
    )
    assert (freed.kind, reused.kind) == ("freed while in use", "write after read")
    assert (freed.hold, reused.hold) == (LaunchId("a", 0), LaunchId("a", 0))
    unknown = (
        "while a:0 (op) on stream 'a' may still use it: the pinned allocator does not know of that use, which did not "
        "go through the tensor that owns the memory, so the host must synchronize stream 'a', or an event recorded on "
        "it after a:0 (op), before "
    )
    assert freed.missing_wait == f"block 0 is freed {unknown}the free of block 0 (case.py:9)."
    assert reused.missing_wait == f"block 0 was freed and handed out again {unknown}op on the host."


def test_report_names_the_host_and_what_it_must_wait_for() -> None:
    copy = launch("copy:3", (2, 0, 4, True), operation="aten::copy_", line=7)
    (race,) = find_races([copy, host((2, 0, 4, False), operation="aten::sum", line=9)])
    assert race.missing_wait == (
        "the host must synchronize stream 'copy', or an event recorded on it after copy:3 (aten::copy_, case.py:7), "
        "before aten::sum on the host (case.py:9) reads it."
    )
    assert (race.first_stream, race.second_stream, race.hold) == ("copy", None, copy.id)
    copy = launch("copy:3", (2, 0, 4, False), operation="aten::copy_", line=7)
    (race,) = find_races([copy, host((2, 0, 4, True), operation="aten::fill_.Scalar", line=9)])
    assert race.missing_wait.endswith("before aten::fill_.Scalar on the host (case.py:9) writes it.")


def test_report_names_launches_streams_lines_and_the_wait() -> None:
    fill = launch("fill:0", (3, 0, 4, True), operation="aten::fill_.Scalar", line=7)
    mul = launch("ambient:2", (3, 2, 4, False), operation="aten::mul.Tensor", line=9)._replace(node="MulBackward0")
    (race,) = find_races([fill, mul])
    assert race.missing_wait == (
        "stream 'ambient' must wait for stream 'fill' after fill:0 (aten::fill_.Scalar, case.py:7) and before "
        "ambient:2 (aten::mul.Tensor in MulBackward0, case.py:9)."
    )
    assert str(race).startswith("read after write, bytes 2 to 4 of block 3, nothing orders fill:0 (")
    assert (race.first_stream, race.second_stream, race.hold) == ("fill", "ambient", fill.id)


# Cost.


def typical_trace() -> Trace:
    """Two streams in turn, each waiting for the other: about 40 entries, 12 launches."""
    trace: Trace = []
    for step in range(6):
        for mine, other in (("a", "b"), ("b", "a")):
            event = len(trace)
            accesses = ((step, 0, 64, False), (step + 1, 0, 64, False), (step + 2, 0, 64, True))
            trace += [launch(f"{mine}:{step}", *accesses), Record(mine, event), Wait(other, event)]
    return [*trace, *(Free(block, 0, 64, "a", (), None) for block in range(4)), HostSync("a", None)]


def test_cost_of_a_typical_trace() -> None:
    trace = typical_trace()
    assert len(trace) == 41 and find_races(trace) == []
    assert seconds(lambda: find_races(trace), 50) < 150e-6


def iterations(count: int) -> Trace:
    """Slices of a flat buffer written on one stream, the whole of it reduced on another, its slices read again."""
    trace: Trace = []
    event = 0
    index = {"a": 0, "b": 0}

    def add(stream: str, start: int, stop: int, is_write: bool) -> None:
        trace.append(launch(f"{stream}:{index[stream]}", (0, start, stop, is_write)))
        index[stream] += 1

    for _ in range(count):
        for part in range(20):
            add("a", part, part + 1, True)
        trace.extend([Record("a", event), Wait("b", event)])
        add("b", 0, 20, True)
        trace.extend([Record("b", event + 1), Wait("a", event + 1)])
        for part in range(20):
            add("a", part, part + 1, False)
        event += 2
    return trace


def many_slices(count: int) -> Trace:
    """Each launch writes its own slice of one flat buffer, by turns on two streams."""
    return [write(f"{'ab'[part % 2]}:{part // 2}", part, part + 1) for part in range(count)]


def sliced_once(count: int) -> Trace:
    """A flat buffer filled slice by slice, and then used as a whole."""
    slices: Trace = [write(f"a:{part}", part, part + 1) for part in range(count)]
    return [*slices, Record("a", 0), Wait("b", 0), *(write(f"b:{step}", 0, count) for step in range(count))]


@pytest.mark.parametrize(("make", "base"), [(iterations, 60), (many_slices, 2500), (sliced_once, 1250)])
def test_cost_of_a_long_trace_is_not_quadratic(make: Callable[[int], Trace], base: int) -> None:
    short, long = make(base), make(4 * base)
    assert find_races(long) == []
    assert len(long) > 9_999
    ratio = seconds(lambda: find_races(long), 3) / seconds(lambda: find_races(short), 3)
    assert ratio < 10, f"4 times the trace took {ratio:.1f} times as long"
