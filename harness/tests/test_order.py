"""Which synchronizations are implied: against the definition, by hand, and what leaving them out changes."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.judge import order
from harness.judge.happens_before import find_races
from harness.judge.order import Chain, implied, last_covered_launch
from harness.observe.trace import (
    Allocate,
    Entry,
    Free,
    HostAccess,
    HostSync,
    Launch,
    Record,
    RecordStream,
    SourceLine,
    Trace,
    Wait,
)
from harness.perturb.plan import LaunchId
from harness.tests.happens_before_definition import (
    BLOCK_BYTES,
    Definition,
    host_read,
    host_write,
    random_traces,
    read,
    traces,
    write,
)
from harness.tests.mutation import planted
from harness.tests.processor_time import seconds

# The definition.


def is_work(entry: Entry) -> bool:
    return isinstance(entry, Launch | HostAccess) or (isinstance(entry, Free) and entry.stream is None)


def is_device_free(entry: Entry) -> bool:
    return isinstance(entry, Free) and entry.stream is not None


def order_of(trace: Trace, left_out: tuple[int, ...] = ()) -> set[tuple[Any, ...]]:
    """Every ordered pair that counts; the ends are a launch on each stream and a host access after all others."""
    streams = sorted(
        {entry.id.stream for entry in trace if isinstance(entry, Launch)}
        | {entry.stream for entry in trace if isinstance(entry, Record | Wait)}
    )
    names: list[Any] = [index for index in range(len(trace)) if index not in left_out]
    kept: Trace = [trace[index] for index in names]
    kept += [Launch(LaunchId(stream, 999), "end", None, None, ()) for stream in streams]
    kept += [HostAccess("end", None, None, ())]
    names += [*streams, "host"]
    definition = Definition(kept)
    touched = [
        {
            (block, byte)
            for block in range(2)
            for byte in range(BLOCK_BYTES)
            if any(definition.touched(index, block, byte))
        }
        for index in range(len(kept))
    ]
    pairs: set[tuple[Any, ...]] = set()
    for second, later in enumerate(kept):
        for first, earlier in enumerate(kept[:second]):
            if is_work(earlier) and is_work(later) and definition.reaches[first][second]:
                pairs.add((names[first], names[second]))
            if isinstance(later, Free) or is_device_free(earlier):
                for block, byte in touched[first] & touched[second]:
                    if definition.ordered(first, second, block, byte):
                        pairs.add((names[first], names[second], block, byte))
    return pairs


def overlap(one: Free | Allocate | RecordStream, other: Free | Allocate | RecordStream) -> bool:
    return one.block == other.block and max(one.start, other.start) < min(one.stop, other.stop)


def disciplined(trace: Trace) -> Trace:
    """The same trace with an allocator that waits for what the frees of the bytes deferred them to."""
    result: Trace = []
    for entry in trace:
        if isinstance(entry, Allocate):
            frees = [free for free in result if isinstance(free, Free) and overlap(free, entry)]
            entry = entry._replace(after=tuple(sorted({event for free in frees for event in free.deferred})))
        result.append(entry)
    return result


def free_of(trace: Trace, index: int) -> int | None:
    recorded = trace[index]
    assert isinstance(recorded, RecordStream)
    later = range(index + 1, len(trace))
    return next((at for at in later if isinstance(free := trace[at], Free) and overlap(free, recorded)), None)


def without_deferral(trace: Trace, index: int) -> Trace:
    """The same trace where the free that a RecordStream counts for defers nothing until its stream's recordings."""
    recorded, freed = trace[index], free_of(trace, index)
    assert isinstance(recorded, RecordStream) and freed is not None
    stream = recorded.stream
    on_stream = {entry.event for entry in trace[:freed] if isinstance(entry, Record) and entry.stream == stream}
    free = trace[freed]
    assert isinstance(free, Free)
    kept = tuple(event for event in free.deferred if event not in on_stream)
    return [*trace[:freed], free._replace(deferred=kept), *trace[freed + 1 :]]


def is_implied(trace: Trace, indices: tuple[int, ...]) -> bool:
    """What ``implied`` must decide."""
    recorded = trace[indices[0]]
    if not isinstance(recorded, RecordStream):
        return order_of(trace) <= order_of(trace, indices)
    freed = free_of(trace, indices[0])
    if freed is None:
        return False
    free = trace[freed]
    assert isinstance(free, Free)
    if free.stream == recorded.stream:
        return True
    for at, entry in enumerate(trace[:freed]):
        if isinstance(entry, RecordStream) and at != indices[0] and entry.stream == recorded.stream:
            same_bytes = entry.block == recorded.block and entry.start <= recorded.start < recorded.stop <= entry.stop
            if same_bytes and not any(
                isinstance(other, Free) and overlap(other, recorded) for other in trace[at + 1 : indices[0]]
            ):
                return True
    if not order_of(trace) <= order_of(without_deferral(trace, indices[0])):
        return False
    definition = Definition(trace)
    records = [
        at
        for at, entry in enumerate(trace[:freed])
        if isinstance(entry, Record) and entry.stream == recorded.stream and entry.event in free.deferred
    ]
    return any(
        isinstance(entry, Launch)
        and entry.id.stream != free.stream
        and definition.reaches[at][record]
        and any(
            any(definition.touched(at, free.block, byte)) and free.start <= byte < free.stop
            for byte in range(BLOCK_BYTES)
        )
        for at, entry in enumerate(trace[:freed])
        for record in records
    )


def questions(trace: Trace) -> list[tuple[int, ...]]:
    """What can be left out: each synchronization alone, and the first two that are no RecordStream."""
    alone = [index for index, entry in enumerate(trace) if isinstance(entry, Wait | HostSync | RecordStream)]
    syncs = [index for index in alone if not isinstance(trace[index], RecordStream)]
    return [(index,) for index in alone] + ([tuple(syncs[:2])] if len(syncs) > 1 else [])


def actor(entry: Entry) -> str | None:
    """The stream of an entry, None for the host."""
    if isinstance(entry, Launch):
        return entry.id.stream
    return None if isinstance(entry, HostAccess | HostSync) else entry.stream


def is_link(earlier: Entry, later: Entry) -> bool:
    """Whether no wait or host sync is missing between the two."""
    if isinstance(later, Wait | HostSync) and later.event is not None:
        return isinstance(earlier, Record) and earlier.event == later.event
    if isinstance(later, HostSync):
        return later.stream in (None, actor(earlier))
    return actor(earlier) in (None, actor(later))


def check_chain(trace: Trace, indices: tuple[int, ...], chain: Chain) -> None:
    """A chain must hold link by link without what it is to replace."""
    recorded = trace[indices[0]]
    if isinstance(recorded, RecordStream):
        other = trace[chain.entries[0]]
        if isinstance(other, RecordStream):
            assert (other.block, other.stream) == (recorded.block, recorded.stream)
            assert chain.entries[0] not in indices and chain.entries[1:] == (free_of(trace, indices[0]),)
            return
        trace = without_deferral(trace, indices[0])
        indices = ()
    kept = [index for index in range(len(trace)) if index not in indices]
    end: Trace = []
    if chain.end_of is not None:
        end = [Launch(LaunchId(chain.end_of, 999), "end", None, None, ())] if chain.end_of else [host_read()]
    definition = Definition([*(trace[index] for index in kept), *end])
    places = [kept.index(entry) for entry in chain.entries] + [len(kept)] * len(end)
    assert len(places) > 1 and places[1:] == sorted(set(places[1:]))
    for position, (first, second) in enumerate(itertools.pairwise(places)):
        earlier, later = definition.trace[first], definition.trace[second]
        if isinstance(earlier, Allocate):
            assert second == places[-1]
        elif isinstance(later, Allocate):
            assert isinstance(earlier, Record) and earlier.event in later.after
        elif isinstance(later, Free) and isinstance(earlier, Record) and position:
            assert earlier.event in later.deferred
        else:
            assert definition.chained(first, second) and is_link(earlier, later)


def disagreement(module: Any, trace: Trace, indices: tuple[int, ...], expected: bool) -> str | None:
    """How a module's ``implied`` is wrong, or None."""
    proof = module.implied(trace, indices)
    if (proof is not None) != expected:
        return f"leaving out {indices}: {proof}"
    if proof is not None:
        assert proof.indices == indices
        for chain in proof.chains:
            try:
                check_chain(trace, indices, chain)
            except (AssertionError, ValueError):
                return f"leaving out {indices}: no chain {chain}"
        if len(indices) == 1 and (forgotten := unproved(trace, indices[0], proof.chains)):
            return f"leaving out {indices}: no chain for {forgotten}"
    return None


def unproved(trace: Trace, index: int, chains: tuple[Chain, ...]) -> set[int]:
    """The work that a wait orders before what is next on its stream, and that no chain orders before that."""
    wait = trace[index]
    if not isinstance(wait, Wait):
        return set()
    definition = Definition([*trace, Launch(LaunchId(wait.stream, 999), "end", None, None, ())])
    record = definition.recorded_at.get(wait.event)
    if record is None or record > index:
        return set()
    ends = [None] * len(trace) + [wait.stream]
    later = next(
        at
        for at, entry in enumerate(definition.trace[index:], index)
        if isinstance(entry, Launch) and entry.id.stream == wait.stream
    )
    proved = {
        first
        for first, entry in enumerate(trace[:index])
        for chain in chains
        if is_work(entry) and definition.reaches[first][chain.entries[0]]
        if (
            chain.end_of == ends[later] if chain.end_of or ends[later] else definition.reaches[chain.entries[-1]][later]
        )
    }
    given = {at for at, entry in enumerate(trace[:record]) if is_work(entry) and definition.reaches[at][record]}
    return {at for at in given if actor(trace[at]) != wait.stream} - proved


def program(generator: random.Random) -> Trace:
    """A trace of about 30 entries as a real program leaves one.

    Waits are for what was recorded, the allocator keeps its promises, and often several synchronizations do what one
    would.
    """
    streams = "abc"[: generator.randint(2, 3)]
    launches = dict.fromkeys(streams, 0)
    owners: dict[int, str] = {}
    users: dict[int, set[str]] = {0: set(), 1: set()}
    deferred: dict[int, tuple[int, ...]] = {0: (), 1: ()}
    trace: Trace = []
    events = 0

    def record(stream: str) -> int:
        nonlocal events
        events += 1
        trace.append(Record(stream, events))
        return events

    while len(trace) < 26:
        stream, kind, block = generator.choice(streams), generator.randint(0, 19), generator.randint(0, 1)
        if block not in owners:
            owners[block] = stream
            trace.append(Allocate(block, 0, 4, stream, deferred[block]))
        if kind < 8:
            access = write if generator.randint(0, 1) else read
            trace.append(access(f"{stream}:{launches[stream]}", block=block))
            launches[stream] += 1
        elif kind < 10:
            record(stream)
        elif kind < 13 and events:
            trace.append(Wait(stream, generator.randint(max(1, events - 3), events)))
        elif kind < 16:
            users[block].add(stream)
            trace.append(RecordStream(block, 0, 4, stream))
        elif kind < 18:
            deferred[block] = tuple(record(user) for user in sorted(users[block] - {owners[block]}))
            users[block].clear()
            trace.append(Free(block, 0, 4, owners.pop(block), deferred[block], None))
        elif kind == 18:
            trace.append(HostSync(stream, None) if generator.randint(0, 1) else HostSync(None, max(events, 1)))
        elif generator.randint(0, 3) == 0:
            trace.append(HostSync(None, None))
    return trace


REUSED: Trace = [
    read("b:0"),
    Record("b", 1),
    Free(0, 0, 4, "a", (1,), None),
    Allocate(0, 0, 4, "a", (1,)),
    write("a:0"),
    write("b:1", block=1),
    Record("b", 2),
    Wait("a", 2),
    Free(0, 0, 4, "a", (), None),
    Wait("a", 2),
]
"""Where the first wait orders b:0 before the second free, as the allocator has done already."""


@functools.cache
def examples() -> list[tuple[Trace, tuple[int, ...], bool]]:
    """Traces, what is left out of them, and whether it is implied."""
    generator = random.Random(7)
    found = []
    for trace in [*random_traces()[:150], *(program(generator) for _ in range(250))]:
        possible = questions(trace)
        for indices in generator.sample(possible, min(3, len(possible))):
            found.append((trace, indices, is_implied(trace, indices)))
    for index in (7, 9):
        found.append((REUSED, (index,), is_implied(REUSED, (index,))))
    return found


def test_agrees_with_the_definition_where_planted_bugs_must_not() -> None:
    assert [wrong for example in examples() if (wrong := disagreement(order, *example))] == []
    decisions = {(type(trace[indices[0]]), decision) for trace, indices, decision in examples()}
    assert decisions == {(kind, decision) for kind in (Wait, HostSync, RecordStream) for decision in (True, False)}


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(traces(), st.data())
def test_agrees_with_the_definition(trace: Trace, data: st.DataObject) -> None:
    if possible := questions(trace):
        indices = data.draw(st.sampled_from(possible))
        assert disagreement(order, trace, indices, is_implied(trace, indices)) is None


PLANTED_BUGS = {
    "everything is implied": ("if _lost(complete, reduced):", "if False:"),
    "nothing is implied": ("if _lost(complete, reduced):", "if True:"),
    "waits order nothing": ("| host | given | anchored", "| host | anchored"),
    "a wait binds to the latest work": (
        "given = self.recordings.get(entry.event, 0)\n                after",
        "given = own.get(self.trace[self.recorded_at[entry.event]].stream, 0) if entry.event in self.recordings else 0"
        "\n                after",
    ),
    "host syncs order nothing": ("host |= given | self", "host |= self"),
    "a full host sync orders nothing": ("given = _union(own.values())", "given = 0"),
    "event syncs order nothing": (
        "if entry.event is not None:\n                    given",
        "if 0:\n                    given",
    ),
    "the host does nothing itself": ("elements.append(_Element(index, host, self.work))", "pass"),
    "the ends of streams do not count": ("for stream in streams]", "for stream in ()]"),
    "the end of the host does not count": ("elements.append(_Element(_HOST, host, self.work))", "pass"),
    "frees do not count": ("cell.touched, True,", "0, True,"),
    "every access counts at a free": ("cell.touched, True,", "self.work, True,"),
    "record_stream is ignored": ("before |= _union(self.recordings[event] for event in covering)", "pass"),
    "the allocator orders nothing": ("before | cell.waited, cell.touched", "before, cell.touched"),
    "accesses after a free do not count": ("if cell.freed:", "if False:"),
    "a free is ordered before everything": ("last is None:", "True:"),
    "a free is where the left-out entry was": (
        "if index in self.left_out:\n                    streams",
        "if 0:\n                    streams",
    ),
    "what is ordered before may be lost": ("before.before & before.matters", "before.before & before.matters & 1"),
    "any later free is that of the bytes": (
        "isinstance(entry, Free) and _overlap(entry, recorded):\n            return at\n    return None",
        "isinstance(entry, Free):\n            return at\n    return None",
    ),
    "owners need record_stream": ("if free.stream == recorded.stream:", "if False:"),
    "a second record_stream does not help": ("and at != index", "and False"),
    "the same record_stream helps": ("and at != index", ""),
    "another block's record_stream helps": (
        "(entry.block, entry.stream) == (recorded.block, recorded.stream)",
        "entry.stream == recorded.stream",
    ),
    "another stream's record_stream helps": (
        "(entry.block, entry.stream) == (recorded.block, recorded.stream)",
        "entry.block == recorded.block",
    ),
    "an earlier tenant's record_stream helps": ("range(_previous_free(trace, index), freed)", "range(freed)"),
    "no access is enough": ("    if not pairs:\n        return None\n", ""),
    "the owner's own access is enough": ("and entry.id.stream != free.stream", ""),
    "the deferral of other streams goes as well": ("and record.stream == recorded.stream", ""),
    "a chain goes through what is left out": ("if index in left_out or isinstance", "if isinstance"),
    "a chain misses the waits": ("(other, at, *carried) if by_event else (at, *carried)", "carried"),
    "chains for later things only": ("and not element.before & later", "and element.before & later"),
    "chains for the last source only": (
        "if element.before & sooner:",
        "if element.before & sooner or first != pairs[-1][0]:",
    ),
    "all sources are one": ("if any(before[other] >> first & 1", "if any(True"),
    "a free of pinned memory hides what follows": (
        " and not element.of_bytes:\n                later",
        ":\n                later",
    ),
}


@pytest.mark.parametrize("bug", PLANTED_BUGS)
def test_planted_bug_is_noticed(bug: str) -> None:
    copy = planted(order, *PLANTED_BUGS[bug])

    def is_noticed(trace: Trace, indices: tuple[int, ...], decision: bool) -> bool:
        try:
            return disagreement(copy, trace, indices, decision) is not None
        except (AssertionError, LookupError):
            return True

    assert any(is_noticed(*example) for example in examples())


# By hand.


def left_out(trace: Trace, *indices: int) -> Trace:
    return [entry for index, entry in enumerate(trace) if index not in indices]


def decisions(trace: Trace) -> dict[int, bool]:
    """Whether each synchronization is implied, by its index."""
    return {indices[0]: implied(trace, indices[0]) is not None for indices in questions(trace) if len(indices) == 1}


def test_second_wait_for_one_recording_is_implied_and_the_first_is_not_if_work_lies_between() -> None:
    trace: Trace = [write("a:0"), Record("a", 1), Wait("b", 1), read("b:0"), Wait("b", 1), read("b:1")]
    assert decisions(trace) == {2: False, 4: True}
    proof = implied(trace, 4)
    assert proof is not None and (proof.indices, proof.chains) == ((4,), (Chain((0, 1, 2, 5)),))
    assert str(proof) == (
        "the wait of 'b' for event 1 recorded on 'a' is implied: "
        "b:1 comes after a:0 by the wait of 'b' for event 1 recorded on 'a'."
    )


def test_of_two_waits_with_nothing_between_each_is_implied_but_not_both() -> None:
    trace: Trace = [write("a:0"), Record("a", 1), Record("a", 2), Wait("b", 1), Wait("b", 2), read("b:0")]
    assert decisions(trace) == {3: True, 4: True}
    assert implied(trace, [3, 4]) is None
    proof = implied(trace, 3)
    assert proof is not None and proof.chains == (Chain((0, 2, 4, 5)),)


def test_wait_at_the_end_of_its_stream_is_not_implied() -> None:
    trace: Trace = [read("b:0"), write("a:0"), Record("a", 1), Wait("b", 1)]
    assert decisions(trace) == {3: False}
    trace += [Wait("b", 1)]
    proof = implied(trace, 3)
    assert proof is not None and proof.chains == (Chain((1, 2, 4), "b"),)
    assert str(proof).endswith("the end of stream 'b' comes after a:0 by the wait of 'b' for event 1 recorded on 'a'.")


def test_chain_through_a_third_stream() -> None:
    trace: Trace = [
        write("a:0"), Record("a", 1), Wait("c", 1), Record("c", 2), Wait("b", 2), Wait("b", 1), read("b:0"), read("c:0")
    ]  # fmt: skip
    assert decisions(trace) == {2: False, 4: True, 5: True}
    proof = implied(trace, 5)
    assert proof is not None and proof.chains == (Chain((0, 1, 2, 3, 4, 6)),)
    assert str(proof) == (
        "the wait of 'b' for event 1 recorded on 'a' is implied: b:0 comes after a:0 by the wait of 'c' for event 1 "
        "recorded on 'a', then the wait of 'b' for event 2 recorded on 'c'."
    )


@pytest.mark.parametrize("sync", [HostSync("a", None), HostSync(None, 1), HostSync(None, None)])
def test_host_sync_instead_of_a_wait(sync: HostSync) -> None:
    trace: Trace = [write("a:0"), Record("a", 1), sync, Wait("b", 1), read("b:0")]
    assert decisions(trace) == {2: False, 3: True}  # The host's own end comes after a:0 by the sync alone.
    proof = implied(trace, 3)
    assert proof is not None
    assert proof.chains == (Chain((0, 1, 2, 4) if sync.event else (0, 2, 4)),)


def test_wait_and_host_access_instead_of_a_host_sync() -> None:
    trace: Trace = [write("a:0"), HostSync("a", None), host_read(), HostSync(None, None), read("b:0")]
    assert decisions(trace) == {1: False, 3: True}
    proof = implied(trace, 3)
    assert proof is not None and proof.chains == (Chain((0, 1, 4)), Chain((0, 1), ""))


def test_wait_for_the_own_stream_is_implied_by_its_order() -> None:
    trace: Trace = [write("a:0"), Record("a", 1), Wait("a", 1), read("a:1")]
    proof = implied(trace, 2)
    assert proof is not None and proof.chains == (Chain((0, 3)),)
    assert str(proof).endswith("is implied: a:1 comes after a:0 by the order of stream 'a'.")


def test_wait_for_nothing_orders_nothing() -> None:
    nothing = "orders nothing: no work comes before what is waited for."
    assert str(implied([Record("a", 1), Wait("b", 1), read("b:0")], 1)) == (
        f"the wait of 'b' for event 1 recorded on 'a' {nothing}"
    )
    assert str(implied([write("a:0"), Wait("b", 1), read("b:0")], 1)) == f"the wait of 'b' for event 1 {nothing}"


def test_synchronization_of_a_device_is_left_out_as_a_whole() -> None:
    trace: Trace = [
        write("a:0"), write("b:0", block=1), HostSync("a", None), HostSync("b", None), read("c:0"),
        HostSync("a", None), HostSync("b", None), HostSync("c", None), HostSync("c", None), host_read(block=1),
    ]  # fmt: skip
    assert implied(trace, [5, 6]) is not None and implied(trace, [2, 3]) is None
    assert implied(trace, [5, 6, 7]) is not None and implied(trace, [5, 6, 7, 8]) is None
    proof = implied(trace, {7, 6, 5})
    assert proof is not None and proof.indices == (5, 6, 7) and Chain((4, 8, 9)) in proof.chains
    assert str(proof).startswith("the host's wait for stream 'a' with the host's wait for stream 'b' with ")


def test_event_recorded_again_is_another_recording() -> None:
    trace: Trace = [write("a:0"), Record("a", 1), Wait("b", 1), write("a:1"), Record("a", 2), Wait("b", 2), read("b:0")]
    assert decisions(trace) == {2: True, 5: False}


def test_host_frees_and_deferrals_count() -> None:
    """A wait before a free counts at the free, although a later one gives the stream the same order."""
    trace: Trace = [read("b:0"), Record("b", 1), Wait("a", 1), Free(0, 0, 4, "a", (), None), Wait("a", 1), write("a:0")]
    assert decisions(trace) == {2: False, 4: True}
    trace[3] = Free(1, 0, 4, "a", (), None)
    assert decisions(trace) == {2: True, 4: True}
    trace[3] = Free(0, 0, 4, "a", (1,), None)
    assert decisions(trace) == {2: True, 4: True}


MAKE: Trace = [Allocate(0, 0, 4, "a", ()), write("a:0"), Record("a", 1), Wait("b", 1), read("b:0")]


def freed(*deferred: int) -> Free:
    return Free(0, 0, 4, "a", deferred, None)


def test_record_stream_of_one_stream_is_not_implied() -> None:
    trace: Trace = [*MAKE, RecordStream(0, 0, 4, "b"), Record("b", 2), freed(2)]
    assert implied(trace, 5) is None


def test_record_stream_is_implied_if_the_owner_waits_before_the_free() -> None:
    trace: Trace = [*MAKE, RecordStream(0, 0, 4, "b"), Record("b", 2), Wait("a", 2), Record("b", 3), freed(3)]
    proof = implied(trace, 5)
    assert proof is not None and proof.chains == (Chain((4, 6, 7, 9)),)
    assert str(proof) == (
        "the record_stream of block 0 on 'b' is implied: the free of block 0 comes after b:0 by the wait of 'a' for "
        "event 2 recorded on 'b'."
    )
    late: Trace = [*trace[:7], Record("b", 3), freed(3), trace[7]]
    assert implied(late, 5) is None


def test_record_stream_is_implied_if_that_of_another_stream_covers_the_access() -> None:
    trace: Trace = [
        *MAKE, Record("b", 2), Wait("c", 2), read("c:0"), RecordStream(0, 0, 4, "b"), RecordStream(0, 0, 4, "c"),
        Record("b", 3), Record("c", 4), freed(3, 4),
    ]  # fmt: skip
    assert decisions(trace)[8] and not decisions(trace)[9]
    proof = implied(trace, 8)
    assert proof is not None and proof.chains == (Chain((4, 5, 6, 11, 12)),)
    assert str(proof).endswith(
        "the free of block 0 comes after b:0 by the wait of 'c' for event 2 recorded on 'b', then the deferral until "
        "event 4 recorded on 'c'."
    )


def test_record_stream_called_twice_is_implied_until_the_next_free() -> None:
    recorded = RecordStream(0, 0, 4, "b")
    trace: Trace = [*MAKE, recorded, recorded, Record("b", 2), freed(2)]
    assert decisions(trace) == {3: False, 5: True, 6: True}
    assert str(implied(trace, 5)) == (
        "the record_stream of block 0 on 'b' is implied: it was called twice for the same bytes."
    )
    trace = [*MAKE, recorded, Record("b", 2), freed(2), Allocate(0, 0, 4, "a", (2,)), recorded]
    trace += [Record("a", 3), Wait("b", 3), read("b:1"), Record("b", 4), freed(4)]
    assert decisions(trace) == {3: False, 5: False, 9: False, 11: True}


def test_record_stream_of_part_of_a_block_counts_for_the_free_of_its_bytes() -> None:
    trace: Trace = [
        read("b:0", 0, 2), RecordStream(0, 0, 2, "b"), Free(0, 2, 4, "a", (), None), Record("b", 1),
        Free(0, 0, 2, "a", (1,), None),
    ]  # fmt: skip
    assert decisions(trace) == {1: False}
    trace[3:4] = [Record("b", 1), Wait("a", 1)]
    assert decisions(trace) == {1: True, 4: False}


def test_record_stream_that_nothing_shows_is_not_implied() -> None:
    assert implied([*MAKE, RecordStream(0, 0, 4, "b")], 5) is None  # never freed
    assert implied([*MAKE, RecordStream(0, 0, 4, "c"), Record("c", 2), freed(2)], 5) is None  # covers no access


def test_record_stream_on_the_owner_has_no_effect() -> None:
    proof = implied([*MAKE, RecordStream(0, 0, 4, "a"), freed()], 5)
    assert str(proof) == "the record_stream of block 0 on 'a' has no effect: the stream owns the bytes."


def test_only_synchronizations_can_be_left_out() -> None:
    trace: Trace = [*MAKE, RecordStream(0, 0, 4, "b"), freed()]
    for index in (1, 2, [3, 4], [], -4, 7):
        with pytest.raises(ValueError, match="not all waits"):
            implied(trace, index)
    with pytest.raises(ValueError, match="left out alone"):
        last_covered_launch(trace, [3, 5])


def test_launch_to_hold_is_the_last_one_that_is_waited_for() -> None:
    trace: Trace = [write("a:0"), write("a:1"), Record("a", 1), write("a:2"), Wait("b", 1), read("b:0")]
    assert last_covered_launch(trace, 4) == LaunchId("a", 1)
    assert last_covered_launch([*trace, HostSync("a", None), host_write()], 6) == LaunchId("a", 2)
    assert last_covered_launch([*trace, HostSync(None, 1), host_write()], 6) == LaunchId("a", 1)
    assert last_covered_launch([*trace, HostSync(None, None), host_write()], 6) == LaunchId("b", 0)
    assert last_covered_launch([*trace, HostSync("b", None), HostSync("a", None)], [6, 7]) == LaunchId("b", 0)
    assert last_covered_launch([Record("a", 1), Wait("b", 1)], 1) is None
    assert last_covered_launch([write("a:0"), Wait("b", 1)], 1) is None


def test_launch_to_hold_is_one_whose_order_depends_on_the_wait() -> None:
    trace: Trace = [
        write("a:0"), Record("a", 1), write("b:0"), Record("b", 2), Wait("c", 2), read("c:0"), Wait("b", 1),
        Record("b", 3), Wait("c", 3), read("c:1"),
    ]  # fmt: skip
    assert last_covered_launch(trace, 8) == LaunchId("a", 0)
    trace.insert(8, Wait("c", 1))
    assert implied(trace, 9) is not None and last_covered_launch(trace, 9) == LaunchId("b", 0)


def test_launch_to_hold_of_a_record_stream_is_the_last_access_before_the_free() -> None:
    trace: Trace = [
        *MAKE, RecordStream(0, 0, 4, "b"), read("b:1"), read("b:2", block=1), Record("b", 2), freed(2), read("b:3")
    ]  # fmt: skip
    assert last_covered_launch(trace, 5) == LaunchId("b", 1)
    assert last_covered_launch(trace[:9], 5) == LaunchId("b", 1)
    again: Trace = [*trace, RecordStream(0, 0, 4, "c"), RecordStream(0, 0, 4, "b")]
    assert last_covered_launch(again, 11) is None and last_covered_launch(again, 12) == LaunchId("b", 3)


# What leaving out an implied entry changes.


def races_of(trace: Trace) -> set[tuple[Any, ...]]:
    def name(entry: Launch | HostAccess | Free) -> Entry:
        return entry._replace(deferred=()) if isinstance(entry, Free) else entry

    return {
        (name(race.first), name(race.second), race.kind, race.block, race.start, race.stop)
        for race in find_races(trace)
    }


def named(trace: Trace) -> Trace:
    """The same trace where no two entries that can race are equal."""
    return [
        entry._replace(line=SourceLine("case.py", index)) if isinstance(entry, Launch | HostAccess | Free) else entry
        for index, entry in enumerate(trace)
    ]


def test_leaving_out_an_implied_entry_changes_no_race() -> None:
    """The races are the same, but for those with a free just before which the entry was enqueued on the owner: without
    it, more is ordered after the free."""
    compared = 0
    for example, indices, _ in examples():
        trace = named(disciplined(example))
        proof = implied(trace, indices)
        if proof is None:
            continue
        without = left_out(trace, *indices)
        if isinstance(trace[indices[0]], RecordStream) and not any(
            isinstance(trace[chain.entries[0]], RecordStream) for chain in proof.chains
        ):
            without = left_out(without_deferral(trace, indices[0]), *indices)
        before, after = races_of(trace), races_of(without)
        compared += bool(before)
        assert after <= before
        assert all(is_device_free(race[0]) for race in before - after)
    assert compared > 50


# Cost.


def test_cost_of_a_trace_of_300_entries() -> None:
    trace: Trace = []
    for step in range(42):
        mine, other = ("a", "b") if step % 2 else ("b", "a")
        trace += [write(f"{mine}:{step}", block=step), Record(mine, step), Wait(other, step), Wait(other, step)]
        trace += [
            read(f"{other}:{step}", block=step),
            RecordStream(step, 0, 4, other),
            Free(step, 0, 4, mine, (), None),
        ]
    twice, recorded = 7 * 21 + 3, 7 * 21 + 5
    assert len(trace) == 294 and implied(trace, twice) is not None and implied(trace, recorded) is None
    assert seconds(lambda: implied(trace, twice), 5) < 5e-3
    assert seconds(lambda: implied(trace, recorded), 5) < 5e-3
    assert seconds(lambda: last_covered_launch(trace, twice), 5) < 5e-3
