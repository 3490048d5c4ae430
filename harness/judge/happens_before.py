"""Happens-before: which conflicting accesses of a trace nothing orders.

Vector clocks (Lamport 1978; Mattern 1989) over the streams of a trace, with the pruning of FastTrack (Flanagan and
Freund, PLDI 2009). The time of an entry is its index in the trace, and a clock maps a stream to the time of the latest
work of that stream that is ordered before. What orders:

* Work of one stream runs in submission order.
* A wait orders what follows on its stream after everything that the recording it names was ordered after.
* The host works in program order, and whatever it enqueues is ordered after what it did before. It is one actor,
  whatever thread it acted from: races between threads of the host are not looked for.
* A host sync orders what the host does next, and so everything enqueued later, on any stream, after what the host
  waited for.
* An allocation orders the *accesses of its bytes* that come after it, and nothing else, after the recordings that the
  allocator saw completed. In fact the host knew more at that moment, but only because the allocator happened to ask
  late enough: the same program with one launch delayed gets another block and no such order, so other memory must
  not rely on it.

A free of device memory writes the bytes given back, on the owning stream. It has no work of its own: whoever is ordered
after what the owner had been given by then is ordered after the free. It must not overtake an access of another stream,
unless a deferred recording (``record_stream``) covers that access; the deferral delays the reuse and not the owner, so
it orders nothing else. A free of pinned memory is a write by the host, and the deferred recordings are those made after
the copies that the pinned allocator knows of.

Accesses are byte ranges of blocks: disjoint slices of one buffer do not conflict, overlapping views do.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

from harness.observe.trace import Allocate, Free, HostAccess, Launch, Record, RecordStream, Trace, Wait
from harness.perturb.plan import LaunchId

RaceKind: TypeAlias = Literal[
    "read after write",
    "write after write",
    "write after read",
    "freed while in use",
    "read after free",
    "write after free",
]

_Clock: TypeAlias = dict[str, int]
_Visit: TypeAlias = tuple[int, str, bool, int]
"""Time, stream, whether it wrote, and the index of the entry that made it (the time of a free is its owner's)."""
_Cells: TypeAlias = tuple[list[int], list[list[_Visit]]]
"""Where each cell of a block starts, and the visits of each; a cell ends where the next starts. The last is empty."""
_Conflicts: TypeAlias = dict[tuple[int, int, int], tuple[int, int, int]]
"""(second entry, first entry, block) -> (rank of the kind, first byte in conflict, end of the last)."""

_HOST = ""
"""The host's own place in clocks and visits; no stream is called so."""

_KINDS: tuple[RaceKind, ...] = ("read after write", "write after write", "write after read")


@dataclass(frozen=True, slots=True)
class Race:
    """Two conflicting accesses of one block that nothing orders."""

    first: Launch | Free
    """The one submitted first; never the host's own, which is ordered before all that follows."""
    second: Launch | Free | HostAccess
    kind: RaceKind
    """Named from the second's side. Where one pair conflicts in several ways, the first of: read after write, write
    after write, write after read."""
    block: int
    start: int
    """The first byte of the block in conflict."""
    stop: int
    """One past the last byte in conflict; bytes between may be free of conflict."""
    reused: bool
    """Whether bytes in conflict were freed between the two, so that they belong to different tensors."""
    pinned: bool
    """Whether what was freed, by the second or between the two, is pinned memory."""
    hold: LaunchId | None
    """The launch to hold to make the race visible (the aimed plan): the first access, or what the owner was last given
    before a free."""

    @property
    def first_stream(self) -> str | None:
        """The stream of the access submitted first; for a free, the owner of the block. None for the host."""
        return _stream_of(self.first)

    @property
    def second_stream(self) -> str | None:
        """The stream of the access submitted second; for a free, the owner of the block. None for the host."""
        return _stream_of(self.second)

    @property
    def missing_wait(self) -> str:
        """What would have ordered the two, as a sentence."""
        first, stream = describe(self.first), self.first_stream
        if self.second_stream is None:
            wait = f"the host must synchronize stream {stream!r}, or an event recorded on it after {first}, before "
        else:
            wait = f"stream {self.second_stream!r} must wait for stream {stream!r} after {first} and before "
        wait += describe(self.second)
        if isinstance(self.second, Free) or self.reused:
            freed = "is freed" if isinstance(self.second, Free) else "was freed and handed out again"
            cause = f"record_stream of {stream!r} on the tensor is missing, or {wait}."
            if self.pinned:
                cause = (
                    "the pinned allocator does not know of that use, which did not go through the tensor that owns the "
                    f"memory, so {wait}."
                )
            return f"block {self.block} {freed} while {first} on stream {stream!r} may still use it: {cause}"
        if isinstance(self.second, HostAccess):
            wait += " reads it" if self.kind == "read after write" else " writes it"
        return f"{wait}."

    def __str__(self) -> str:
        return (
            f"{self.kind}, bytes {self.start} to {self.stop} of block {self.block}, nothing orders "
            f"{describe(self.first)} and {describe(self.second)}: {self.missing_wait}"
        )


def describe(entry: Launch | Free | HostAccess) -> str:
    """One entry of a race in words: ``ambient:1 (aten::mul.Tensor in MulBackward0, case.py:12)``."""
    if isinstance(entry, HostAccess):
        details = ", ".join(filter(None, [entry.node and f"in {entry.node}", entry.line and str(entry.line)]))
        return f"{entry.operation} on the host" + (f" ({details})" if details else "")
    if isinstance(entry, Free):
        return f"the free of block {entry.block}" + (f" ({entry.line})" if entry.line else "")
    details = entry.operation
    if entry.node:
        details += f" in {entry.node}"
    if entry.line:
        details += f", {entry.line}"
    return f"{entry.id} ({details})"


def find_races(trace: Trace) -> list[Race]:
    """The races of one repetition, by second access and then by first, both in submission order.

    One race for each pair of entries and block. Of the accesses that a second one races with, those are left out that
    an ordered chain leads from to another one that it races with on the same bytes: the wait for the later one
    orders the earlier one as well. So each second access that races with anything is reported with the last accesses
    that it had to wait for.
    """
    host: _Clock = {}
    clocks: dict[str, _Clock] = {}
    recordings: dict[int, _Clock] = {}
    blocks: dict[int, _Cells] = {}
    conflicts: _Conflicts = {}
    for index, entry in enumerate(trace):
        if isinstance(entry, Launch):
            stream, accesses = entry.id.stream, entry.accesses
            clock = clocks.get(stream)
            if clock is None:
                clock = clocks[stream] = host.copy()
            clock[stream] = index
            for block, start, stop, write in accesses:
                if start < stop:
                    _visit(blocks, block, start, stop, (index, stream, write, index), clock, None, conflicts)
        elif isinstance(entry, Record | Wait):
            stream, event = entry
            clock = clocks.get(stream)
            if clock is None:
                clock = clocks[stream] = host.copy()
            clock[stream] = index
            if isinstance(entry, Record):
                recordings[event] = clock.copy()
            elif event in recordings:
                _join(clock, recordings[event])
        elif isinstance(entry, Free):
            block, start, stop, owner, deferred, _ = entry
            if start >= stop:
                continue
            if owner is None:
                _let_host_act(host, clocks, index)
                clock, free = host, (index, _HOST, True, index)
            else:
                clock = clocks.get(owner, host)
                free = (clock.get(owner, -1), owner, True, index)
            covered = _latest(recordings, deferred) if deferred else None
            _visit(blocks, block, start, stop, free, clock, covered, conflicts)
        elif isinstance(entry, Allocate):
            block, start, stop, _, after = entry
            if after and start < stop and block in blocks:
                seen = _latest(recordings, after)
                low, high = _cut(*blocks[block], start, stop)
                cells = blocks[block][1]
                for at in range(low, high):
                    cells[at] = [visit for visit in cells[at] if seen.get(visit[1], -1) < visit[0]]
        elif isinstance(entry, HostAccess):
            _let_host_act(host, clocks, index)
            for block, start, stop, write in entry.accesses:
                if start < stop:
                    _visit(blocks, block, start, stop, (index, _HOST, write, index), host, None, conflicts)
        elif isinstance(entry, RecordStream):
            pass  # What it orders is in the deferred recordings of the free.
        elif entry.stream is None and entry.event is None:
            # Nothing before this can race with anything after it.
            host.clear()
            clocks.clear()
            recordings.clear()
            blocks.clear()
        else:
            known = recordings.get(entry.event) if entry.event is not None else clocks.get(cast(str, entry.stream))
            if known is not None:
                _join(host, known)
                for clock in clocks.values():
                    _join(clock, host)
    return _races(trace, conflicts) if conflicts else []


def _let_host_act(host: _Clock, clocks: dict[str, _Clock], time: int) -> None:
    """The host does something itself, which comes before everything that is enqueued after it."""
    host[_HOST] = time
    for clock in clocks.values():
        clock[_HOST] = time


def _join(clock: _Clock, other: _Clock) -> None:
    for stream, time in other.items():
        if clock.get(stream, -1) < time:
            clock[stream] = time


def _latest(recordings: dict[int, _Clock], events: Iterable[int]) -> _Clock:
    """What is complete when these recordings are."""
    joined: _Clock = {}
    for event in events:
        if event in recordings:
            _join(joined, recordings[event])
    return joined


def _cut(bounds: list[int], cells: list[list[_Visit]], start: int, stop: int) -> tuple[int, int]:
    """Cuts cells so that [start, stop) is a number of whole ones; returns the first of these, and the first after."""
    low = bisect_left(bounds, start)
    if low == len(bounds) or bounds[low] != start:
        bounds.insert(low, start)
        cells.insert(low, cells[low - 1] if low else [])
    high = bisect_left(bounds, stop, low)
    if high == len(bounds) or bounds[high] != stop:
        bounds.insert(high, stop)
        cells.insert(high, cells[high - 1])
    return low, high


def _visit(
    blocks: dict[int, _Cells],
    block: int,
    start: int,
    stop: int,
    newcomer: _Visit,
    clock: _Clock,
    covered: _Clock | None,
    conflicts: _Conflicts,
) -> None:
    """Compares one access with the history of its bytes and enters it there.

    A block is cut into cells at every boundary of an access so far; each cell keeps the visits that a later access
    could still race with. A visit is dropped once a visit that is ordered after it conflicts with at least as much.
    """
    known = blocks.get(block)
    if known is None:
        blocks[block] = ([start, stop], [[newcomer], []])
        return
    bounds, cells = known
    low, high = _cut(bounds, cells, start, stop)
    write = newcomer[2]
    for at in range(low, high):
        kept = []
        for visit in cells[at]:
            time, stream, wrote, first = visit
            if clock.get(stream, -1) >= time:
                if wrote and not write:
                    kept.append(visit)
                continue
            kept.append(visit)
            if (write or wrote) and (covered is None or covered.get(stream, -1) < time):
                pair = newcomer[3], first, block
                rank = 2 if not wrote else 1 if write else 0
                begin, end = bounds[at], bounds[at + 1]
                if pair in conflicts:
                    old_rank, old_begin, old_end = conflicts[pair]
                    rank, begin, end = min(rank, old_rank), min(begin, old_begin), max(end, old_end)
                conflicts[pair] = rank, begin, end
        kept.append(newcomer)
        cells[at] = kept
    if high - low > 1:
        # Neighbours that became equal are one cell again; else a whole buffer would stay as slow as its finest slicing.
        distinct = [at for at in range(low, high) if at == low or cells[at] != cells[at - 1]]
        bounds[low:high] = [bounds[at] for at in distinct]
        cells[low:high] = [cells[at] for at in distinct]


def _races(trace: Trace, conflicts: _Conflicts) -> list[Race]:
    frees: dict[int, list[tuple[int, Free]]] = {}
    for index, entry in enumerate(trace):
        if isinstance(entry, Free):
            frees.setdefault(entry.block, []).append((index, entry))
    races = []
    for (second_index, first_index, block), (rank, start, stop) in sorted(conflicts.items()):
        first = cast(Launch | Free, trace[first_index])
        second = cast(Launch | Free | HostAccess, trace[second_index])
        kind = _KINDS[rank]
        if isinstance(second, Free):
            kind = "freed while in use"
        elif isinstance(first, Free):
            kind = "read after free" if rank == 0 else "write after free"
        between = (
            free
            for index, free in frees.get(block, ())
            if first_index < index < second_index and free.start < stop and start < free.stop
        )
        freed = next(between, None)
        reused = freed is not None
        given_back = second if freed is None else freed
        pinned = isinstance(given_back, Free) and given_back.stream is None
        hold = first.id if isinstance(first, Launch) else _last_launch(trace, first_index, _stream_of(first))
        races.append(Race(first, second, kind, block, start, stop, reused, pinned, hold))
    return races


def _last_launch(trace: Trace, before: int, stream: str | None) -> LaunchId | None:
    for index in range(before - 1, -1, -1):
        entry = trace[index]
        if isinstance(entry, Launch) and entry.id.stream == stream:
            return entry.id
    return None


def _stream_of(entry: Launch | Free | HostAccess) -> str | None:
    if isinstance(entry, Launch):
        return entry.id.stream
    return entry.stream if isinstance(entry, Free) else None
