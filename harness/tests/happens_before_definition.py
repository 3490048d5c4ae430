"""Happens-before as it is defined, an explicit graph and its closure, and traces to compare a judge with it on."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

from hypothesis import strategies as st

from harness.observe.trace import (
    Access,
    Allocate,
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

BLOCK_BYTES = 6


# Traces.


def launch(name: str, *accesses: tuple[int, int, int, bool], operation: str = "op", line: int | None = None) -> Launch:
    """``launch("a:0", (block, start, stop, write))``."""
    stream, index = name.split(":")
    where = SourceLine("case.py", line) if line else None
    return Launch(LaunchId(stream, int(index)), operation, None, where, tuple(map(Access._make, accesses)))


def read(name: str, start: int = 0, stop: int = 4, block: int = 0) -> Launch:
    return launch(name, (block, start, stop, False))


def write(name: str, start: int = 0, stop: int = 4, block: int = 0) -> Launch:
    return launch(name, (block, start, stop, True))


def host(*accesses: tuple[int, int, int, bool], operation: str = "op", line: int | None = None) -> HostAccess:
    where = SourceLine("case.py", line) if line else None
    return HostAccess(operation, None, where, tuple(map(Access._make, accesses)))


def host_read(start: int = 0, stop: int = 4, block: int = 0) -> HostAccess:
    return host((block, start, stop, False))


def host_write(start: int = 0, stop: int = 4, block: int = 0) -> HostAccess:
    return host((block, start, stop, True))


def build_trace(draw: Callable[[int, int], int]) -> Trace:
    """A trace of up to 24 entries, decided by ``draw(low, high)``: both ends included.

    It keeps to no discipline: freed blocks are used, deferrals name any recording, waits name unknown ones.
    """
    streams = "abc"[: draw(2, 3)]
    launches = dict.fromkeys(streams, 0)
    trace: Trace = []
    events = 0

    def stream() -> str:
        return streams[draw(0, len(streams) - 1)]

    def owner() -> str | None:
        return stream() if draw(0, 2) else None  # a stream more often than the host

    def some_events() -> tuple[int, ...]:
        return tuple(sorted({draw(1, events + 1) for _ in range(draw(0, 2))}))

    def some_bytes() -> tuple[int, int]:
        start = draw(0, BLOCK_BYTES)
        return start, draw(start, BLOCK_BYTES)

    def some_accesses() -> tuple[Access, ...]:
        return tuple(Access(draw(0, 1), *some_bytes(), bool(draw(0, 1))) for _ in range(draw(1, 2)))

    for _ in range(draw(2, 24)):
        kind = draw(0, 22)
        if kind < 9:
            name = stream()
            trace.append(Launch(LaunchId(name, launches[name]), "op", None, None, some_accesses()))
            launches[name] += 1
        elif kind < 12:
            events += 1
            trace.append(Record(stream(), events))
        elif kind < 15:
            trace.append(Wait(stream(), draw(1, events + 1)))
        elif kind < 16:
            which = draw(0, 4)
            if which == 0:
                trace.append(HostSync(None, None))
            elif which < 3:
                trace.append(HostSync(stream(), None))
            else:
                trace.append(HostSync(None, draw(1, events + 1)))
        elif kind < 18:
            trace.append(Free(draw(0, 1), *some_bytes(), owner(), some_events(), None))
        elif kind < 20:
            trace.append(HostAccess("op", None, None, some_accesses()))
        elif kind < 21:
            trace.append(RecordStream(draw(0, 1), *some_bytes(), stream()))
        else:
            trace.append(Allocate(draw(0, 1), *some_bytes(), owner(), some_events()))
    return trace


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    return build_trace(lambda low, high: draw(st.integers(low, high)))


@functools.cache
def random_traces() -> list[Trace]:
    generator = random.Random(20)
    return [build_trace(generator.randint) for _ in range(600)]


# The definition.

RaceKey = tuple[int, int, int, str, int, int]
"""Index of the first, of the second, block, kind, start, stop."""


class Definition:
    """What is a race, and which of them are reported, spelt out without any cleverness."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.recorded_at: dict[int, int] = {}
        self.last_work: list[dict[str, int]] = []
        """For each entry: the last launch, record or wait of each stream before it."""
        self.reaches = [[first == second for second in range(len(trace))] for first in range(len(trace))]
        for first, second in self.edges():
            self.reaches[first][second] = True
        for middle in range(len(trace)):
            for first in range(middle):
                if self.reaches[first][middle]:
                    for second in range(middle, len(trace)):
                        self.reaches[first][second] |= self.reaches[middle][second]

    def edges(self) -> set[tuple[int, int]]:
        """What is ordered directly, by index; each edge leads forward."""
        edges: set[tuple[int, int]] = set()
        work: dict[str, int] = {}
        host_actions: list[int] = []
        for index, entry in enumerate(self.trace):
            self.last_work.append(dict(work))
            if isinstance(entry, Allocate | RecordStream):
                continue
            edges |= {(action, index) for action in host_actions}
            if isinstance(entry, HostAccess) or (isinstance(entry, Free) and entry.stream is None):
                host_actions.append(index)
                continue
            if isinstance(entry, HostSync):
                if entry.stream is None and entry.event is None:
                    edges |= {(last, index) for last in work.values()}
                elif entry.event is not None and entry.event in self.recorded_at:
                    edges.add((self.recorded_at[entry.event], index))
                elif entry.stream is not None and entry.stream in work:
                    edges.add((work[entry.stream], index))
                host_actions.append(index)
                continue
            stream = entry.id.stream if isinstance(entry, Launch) else entry.stream
            assert stream is not None
            if stream in work:
                edges.add((work[stream], index))
            if isinstance(entry, Free):
                continue  # It is ordered after others, but is no work that others could be ordered after.
            if isinstance(entry, Wait) and entry.event in self.recorded_at:
                edges.add((self.recorded_at[entry.event], index))
            if isinstance(entry, Record):
                self.recorded_at[entry.event] = index
            work[stream] = index
        return edges

    def chained(self, first: int, to: int) -> bool:
        """Whether an ordered chain leads from an access (or from the last work before a free) to an entry."""
        entry = self.trace[first]
        if isinstance(entry, Free) and entry.stream is not None:
            last = self.last_work[first].get(entry.stream)
            return last is None or self.reaches[last][to]
        return self.reaches[first][to]

    def ordered(self, first: int, second: int, block: int, byte: int) -> bool:
        """Whether two accesses of a byte are ordered, by a chain, by a deferral or by the allocator."""
        if self.chained(first, second):
            return True
        entry = self.trace[second]
        covering = []
        if isinstance(entry, Free):
            covering = [(event, second) for event in entry.deferred]
        for index in range(first + 1, second):
            between = self.trace[index]
            if isinstance(between, Allocate) and between.block == block and between.start <= byte < between.stop:
                covering += [(event, index) for event in between.after]
        return any(
            event in self.recorded_at
            and self.recorded_at[event] < before
            and self.chained(first, self.recorded_at[event])
            for event, before in covering
        )

    def touched(self, index: int, block: int, byte: int) -> tuple[bool, bool]:
        """Whether an entry reads and whether it writes a byte."""
        entry = self.trace[index]
        if isinstance(entry, Free):
            return False, entry.block == block and entry.start <= byte < entry.stop
        if not isinstance(entry, Launch | HostAccess):
            return False, False
        here = [access for access in entry.accesses if access.block == block and access.start <= byte < access.stop]
        return any(not access.write for access in here), any(access.write for access in here)

    def is_superseded(self, first: int, second: int, block: int, byte: int) -> bool:
        """Whether a third access lies between two in the trace, the first is chained to it, and it writes the byte, or
        reads it while the first only reads it."""
        first_writes = self.touched(first, block, byte)[1]
        for third in range(first + 1, second):
            reads, writes = self.touched(third, block, byte)
            if (writes or (reads and not first_writes)) and self.chained(first, third):
                return True
        return False

    def races(self, *, superseded: bool) -> set[RaceKey]:
        """Every unordered conflicting pair; with ``superseded`` False, without the bytes of it that are superseded."""
        found: set[RaceKey] = set()
        for block in range(2):
            for second in range(len(self.trace)):
                for first in range(second):
                    ranks: dict[int, int] = {}
                    for byte in range(BLOCK_BYTES):
                        first_reads, first_writes = self.touched(first, block, byte)
                        second_reads, second_writes = self.touched(second, block, byte)
                        conflict = (first_writes and second_reads) or (second_writes and (first_reads or first_writes))
                        if not conflict or self.ordered(first, second, block, byte):
                            continue
                        if superseded or not self.is_superseded(first, second, block, byte):
                            ranks[byte] = 2 if not first_writes else 0 if second_reads else 1
                    if ranks:
                        kind = self.kind(first, second, min(ranks.values()))
                        found.add((first, second, block, kind, min(ranks), max(ranks) + 1))
        return found

    def kind(self, first: int, second: int, rank: int) -> str:
        if isinstance(self.trace[second], Free):
            return "freed while in use"
        if isinstance(self.trace[first], Free):
            return ("read after free", "write after free")[rank]
        return ("read after write", "write after write", "write after read")[rank]
