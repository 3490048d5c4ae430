"""Which synchronizations of a trace are implied by its others, so that the order is the same without them.

What orders is what ``happens_before`` says; here an entry is left out and the two orders are compared. The order is
that of *work* (launches, and what the host does itself: its accesses and its frees of pinned memory), and it is looked
at from three sides:

* Each piece of work, and the end of each stream and of the host: which work is ordered before it. The ends stand for
  whatever may follow, so a wait after the last launch of its stream is not implied for want of a launch.
* Each free: which accesses of its bytes cannot be overtaken by their reuse, because the owner comes after them, because
  a deferred recording covers them, or because an allocation waited for them since.
* Each access of bytes that were freed before: which of these frees are ordered before it.

Records, waits and host syncs are no work: only what they order counts. Sets of entries are integers, one bit an entry.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from harness.observe.trace import (
    Access,
    Allocate,
    Entry,
    Free,
    HostAccess,
    HostSync,
    Launch,
    Record,
    RecordStream,
    Trace,
    Wait,
)
from harness.perturb.plan import LaunchId

_HOST = ""
"""The host's name where streams have theirs; no stream is called so."""


class Chain(NamedTuple):
    """Why one thing comes after another although an entry was left out."""

    entries: tuple[int, ...]
    """Indices into the trace: the earlier work or free, then the records, waits, host syncs and allocations that carry
    its order on (none where a stream's or the host's own order does), then the later work or free unless ``end_of``.
    For a RecordStream that another one implies: the other, and the free."""
    end_of: str | None = None
    """The stream whose end comes after; ``""`` for the host."""


@dataclass(frozen=True, slots=True)
class Implied:
    """The proof that the order of a trace is the same without some of its entries."""

    indices: tuple[int, ...]
    """What was left out."""
    chains: tuple[Chain, ...]
    """One for each pair of an earlier and a later thing that these entries order directly, without those that
    others of these pairs imply. Empty where they order nothing."""
    sentence: str

    def __str__(self) -> str:
        """One sentence."""
        return self.sentence


def implied(trace: Trace, index: int | Collection[int]) -> Implied | None:
    """The proof that the order is the same without a Wait, HostSync or RecordStream; None if it is not.

    Args:
        trace: the repetition, as ``find_races`` takes it.
        index: where the entry is in the trace. Several indices are left out together, as the HostSyncs of the streams
            of one synchronized device must be.

    A RecordStream is implied if the free that it counts for defers nothing on its account that would not be safe all
    the same: by the owner's own order, by the recordings of other streams, or by another ``record_stream`` of these
    bytes on its stream. It is not if the bytes are never freed in the trace, or if it covers no access of another
    stream than the owner: nothing shows then what it is for.

    Raises:
        ValueError: an entry is of another kind, or a RecordStream is among several.
    """
    indices = _checked(trace, index)
    if isinstance(trace[indices[0]], RecordStream):
        return _implied_record_stream(trace, indices[0])
    left_out = frozenset(indices)
    cells = _Cells(trace)
    complete = _Order(trace, cells, watched=left_out)
    reduced = _Order(trace, cells, left_out=left_out)
    if _lost(complete, reduced):
        return None
    pairs = []
    for left in indices:
        mark = 1 << left
        later = 0
        for element in complete.elements:
            if element.before & mark and isinstance(element.at, int) and not element.of_bytes:
                later |= (1 << element.at) & complete.work
        for element, same in zip(complete.elements, reduced.elements, strict=True):
            # What comes after other such work gets its order from there.
            if element.before & mark and not element.before & later:
                pairs += [(first, same) for first in _bits(complete.given[left] & element.matters & ~reduced.always)]
    # That a stream is ordered after its own work goes without saying, unless there is nothing else to say.
    across = [pair for pair in pairs if _actor(trace[pair[0]]) != _actor_of(trace, pair[1])]
    chains = _chains(trace, reduced, across or pairs, left_out)
    return Implied(indices, chains, _sentence(trace, indices, chains))


def last_covered_launch(trace: Trace, index: int | Collection[int]) -> LaunchId | None:
    """The launch to hold if one wants to see what a Wait, HostSync or RecordStream orders; None if it orders none.

    For a Wait or HostSync, the last launch on the stream waited for whose order depends on it, else the last on any
    stream; where it is implied, of the launches that it waits for. For a RecordStream, the last access of its bytes
    by its stream before they are freed.

    Raises:
        ValueError: as for ``implied``.
    """
    indices = _checked(trace, index)
    cells = _Cells(trace)
    recorded = trace[indices[0]]
    if isinstance(recorded, RecordStream):
        freed = _next_free(trace, indices[0])
        start = _previous_free(trace, indices[0])
        accesses = [
            entry.id
            for entry in trace[start:freed]
            if isinstance(entry, Launch) and entry.id.stream == recorded.stream and _touches(entry.accesses, recorded)
        ]
        return accesses[-1] if accesses else None
    left_out = frozenset(indices)
    complete = _Order(trace, cells, watched=left_out)
    reduced = _Order(trace, cells, left_out=left_out)
    lost = _lost(complete, reduced)
    given = 0
    streams = set()
    for left in indices:
        given |= complete.given[left]
        entry = trace[left]
        assert isinstance(entry, Wait | HostSync)
        if entry.event is not None and entry.event in complete.recorded_at:
            record = trace[complete.recorded_at[entry.event]]
            assert isinstance(record, Record)
            streams.add(record.stream)
        elif isinstance(entry, HostSync) and entry.stream is not None:
            streams.add(entry.stream)
    for entries in (given & lost, given):
        launches = [entry for at in _bits(entries) if isinstance(entry := trace[at], Launch)]
        there = [launch for launch in launches if launch.id.stream in streams] or launches
        if there:
            return there[-1].id
    return None


def _checked(trace: Trace, index: int | Collection[int]) -> tuple[int, ...]:
    indices = (index,) if isinstance(index, int) else tuple(sorted(set(index)))
    kinds = {type(trace[at]) if 0 <= at < len(trace) else None for at in indices}
    if not kinds or not kinds <= {Wait, HostSync, RecordStream}:
        raise ValueError(f"entries {indices} of the trace are not all waits, host syncs or record_streams.")
    if RecordStream in kinds and len(indices) > 1:
        raise ValueError(f"of entries {indices} one is a record_stream, which is left out alone.")
    return indices


# The order.


class _Element(NamedTuple):
    """Something that can come after others: work, the free of a cell, or an end."""

    at: int | str
    """Its index in the trace; for an end, whose end it is."""
    before: int
    """The entries that are ordered before it."""
    matters: int
    """The entries whose order before it counts."""
    of_bytes: bool = False
    """Whether this is about one cell that the entry frees or accesses, and not about the entry's work."""
    by: tuple[int, ...] = ()
    """The recordings and allocations that order entries before this element alone, and nothing that follows it."""


@dataclass(slots=True)
class _Cell:
    """Bytes of a block that are only ever accessed, freed or handed out together."""

    touched: int = 0
    """The accesses and frees so far."""
    freed: int = 0
    """The frees of device memory so far."""
    waited: int = 0
    """What allocations waited for."""
    allocations: tuple[int, ...] = ()
    """Those that waited."""


class _Cells:
    """Where the cells of each block of a trace start and stop."""

    def __init__(self, trace: Trace) -> None:
        bounds: dict[int, set[int]] = {}
        for entry in trace:
            ranges: Iterable[Access | Allocate | Free] = ()
            if isinstance(entry, Launch | HostAccess):
                ranges = entry.accesses
            elif isinstance(entry, Allocate | Free):
                ranges = (entry,)
            for item in ranges:
                bounds.setdefault(item.block, set()).update((item.start, item.stop))
        self._bounds = {block: sorted(of_block) for block, of_block in bounds.items()}
        self._known: dict[tuple[int, int, int], list[tuple[int, int]]] = {}

    def of(self, item: Access | Allocate | Free) -> list[tuple[int, int]]:
        """The cells of a range of bytes, each as its block and its first byte."""
        key = item.block, item.start, item.stop
        if key not in self._known:
            self._known[key] = [(item.block, at) for at in self._bounds[item.block] if item.start <= at < item.stop]
        return self._known[key]


@dataclass(slots=True)
class _Order:
    """What each element of a trace is ordered after."""

    trace: Trace
    cells: _Cells
    left_out: frozenset[int] = frozenset()
    """Entries that are passed over."""
    watched: frozenset[int] = frozenset()
    """Entries that leave a mark of their own in what is ordered after them, as work does."""
    elements: list[_Element] = field(default_factory=list)
    """The same ones in the same order, whatever is left out."""
    given: dict[int, int] = field(default_factory=dict)
    """What each watched entry waits for."""
    recordings: dict[int, int] = field(default_factory=dict)
    """What is complete when a recording is."""
    recorded_at: dict[int, int] = field(default_factory=dict)
    work: int = 0
    always: int = 0
    """Frees before which their owner had been given nothing: everything is ordered after them."""
    anchors: dict[int, int] = field(default_factory=dict)
    """Free of device memory -> the last entry of its owner before it. What comes after that comes after the free."""

    def __post_init__(self) -> None:
        streams: dict[str, int | None] = {}
        anchored: dict[int, int] = {}
        for index, entry in enumerate(self.trace):
            if isinstance(entry, Launch):
                streams[entry.id.stream] = index
                self.work |= 1 << index
            elif isinstance(entry, Record | Wait):
                if index in self.left_out:
                    streams.setdefault(entry.stream, None)
                else:
                    streams[entry.stream] = index
            elif isinstance(entry, HostAccess) or (isinstance(entry, Free) and entry.stream is None):
                self.work |= 1 << index
            elif isinstance(entry, Free):
                last = streams.get(str(entry.stream))
                if last is None:
                    self.always |= 1 << index
                else:
                    self.anchors[index] = last
                    anchored[last] = anchored.get(last, 0) | 1 << index
        self._follow(list(streams), anchored)

    def _follow(self, streams: list[str], anchored: dict[int, int]) -> None:
        host = self.always
        own: dict[str, int] = {}
        state: dict[tuple[int, int], _Cell] = {}
        elements = self.elements
        for index, entry in enumerate(self.trace):
            bit = 1 << index
            if index in self.left_out:
                continue
            if isinstance(entry, Launch):
                before = own.get(entry.id.stream, 0) | host
                elements.append(_Element(index, before, self.work))
                self._access(index, before, entry.accesses, state)
                own[entry.id.stream] = before | bit | anchored.get(index, 0)
            elif isinstance(entry, Record):
                after = own.get(entry.stream, 0) | host | anchored.get(index, 0)
                own[entry.stream] = self.recordings[entry.event] = after
                self.recorded_at[entry.event] = index
            elif isinstance(entry, Wait):
                given = self.recordings.get(entry.event, 0)
                after = own.get(entry.stream, 0) | host | given | anchored.get(index, 0)
                own[entry.stream] = after | self._watch(index, given)
            elif isinstance(entry, HostSync):
                if entry.event is not None:
                    given = self.recordings.get(entry.event, 0)
                elif entry.stream is not None:
                    given = own.get(entry.stream, 0)
                else:
                    given = _union(own.values())
                host |= given | self._watch(index, given)
            elif isinstance(entry, HostAccess):
                elements.append(_Element(index, host, self.work))
                self._access(index, host, entry.accesses, state)
                host |= bit
            elif isinstance(entry, Free):
                before = host if entry.stream is None else own.get(entry.stream, 0) | host
                if entry.stream is None:
                    elements.append(_Element(index, before, self.work))
                    host |= bit
                covering = tuple(event for event in entry.deferred if event in self.recordings)
                before |= _union(self.recordings[event] for event in covering)
                by = tuple(self.recorded_at[event] for event in covering)
                for key in self.cells.of(entry):
                    cell = state.setdefault(key, _Cell())
                    elements.append(_Element(index, before | cell.waited, cell.touched, True, by + cell.allocations))
                    cell.touched |= bit
                    if entry.stream is not None:
                        cell.freed |= bit
            elif isinstance(entry, Allocate):
                waited = _union(self.recordings.get(event, 0) for event in entry.after)
                if waited:
                    for key in self.cells.of(entry):
                        cell = state.setdefault(key, _Cell())
                        cell.waited |= waited
                        cell.allocations += (index,)
        elements += [_Element(stream, own.get(stream, 0) | host, self.work) for stream in streams]
        elements.append(_Element(_HOST, host, self.work))

    def _watch(self, index: int, given: int) -> int:
        if index not in self.watched:
            return 0
        self.given[index] = given
        return 1 << index

    def _access(
        self, index: int, before: int, accesses: tuple[Access, ...], state: dict[tuple[int, int], _Cell]
    ) -> None:
        for access in accesses:
            for key in self.cells.of(access):
                cell = state.setdefault(key, _Cell())
                if cell.freed:
                    self.elements.append(_Element(index, before | cell.waited, cell.freed, True, cell.allocations))
                cell.touched |= 1 << index


def _union(sets: Iterable[int]) -> int:
    union = 0
    for one in sets:
        union |= one
    return union


def _bits(entries: int) -> Iterator[int]:
    while entries:
        lowest = entries & -entries
        yield lowest.bit_length() - 1
        entries ^= lowest


def _lost(complete: _Order, reduced: _Order) -> int:
    """The entries that something is no longer ordered after."""
    pairs = zip(complete.elements, reduced.elements, strict=True)
    return _union(before.before & before.matters & ~after.before for before, after in pairs)


# record_stream.


def _overlap(one: Free | RecordStream | Access, other: RecordStream) -> bool:
    return one.block == other.block and max(one.start, other.start) < min(one.stop, other.stop)


def _touches(accesses: tuple[Access, ...], recorded: RecordStream) -> bool:
    return any(_overlap(access, recorded) for access in accesses)


def _next_free(trace: Trace, index: int) -> int | None:
    """Where the bytes of a RecordStream are freed next."""
    recorded = trace[index]
    assert isinstance(recorded, RecordStream)
    for at in range(index + 1, len(trace)):
        entry = trace[at]
        if isinstance(entry, Free) and _overlap(entry, recorded):
            return at
    return None


def _previous_free(trace: Trace, index: int) -> int:
    """Where the bytes of a RecordStream were freed last before it; 0 if they were not."""
    recorded = trace[index]
    assert isinstance(recorded, RecordStream)
    for at in range(index - 1, -1, -1):
        entry = trace[at]
        if isinstance(entry, Free) and _overlap(entry, recorded):
            return at
    return 0


def _implied_record_stream(trace: Trace, index: int) -> Implied | None:
    recorded = trace[index]
    assert isinstance(recorded, RecordStream)
    freed = _next_free(trace, index)
    if freed is None:
        return None
    free = trace[freed]
    assert isinstance(free, Free)
    name = f"record_stream of block {recorded.block} on {recorded.stream!r}"
    if free.stream == recorded.stream:
        return Implied((index,), (), f"the {name} has no effect: the stream owns the bytes.")
    for at in range(_previous_free(trace, index), freed):
        entry = trace[at]
        if (
            isinstance(entry, RecordStream)
            and at != index
            and (entry.block, entry.stream) == (recorded.block, recorded.stream)
            and entry.start <= recorded.start < recorded.stop <= entry.stop
        ):
            sentence = f"the {name} is implied: it was called twice for the same bytes."
            return Implied((index,), (Chain((at, freed)),), sentence)
    cells = _Cells(trace)
    complete = _Order(trace, cells)
    own = {
        event
        for event in free.deferred
        if complete.recorded_at.get(event, freed) < freed
        and isinstance(record := trace[complete.recorded_at[event]], Record)
        and record.stream == recorded.stream
    }
    others = tuple(event for event in free.deferred if event not in own)
    without = [*trace[:freed], free._replace(deferred=others), *trace[freed + 1 :]]
    reduced = _Order(without, cells)
    if _lost(complete, reduced):
        return None
    covered = _union(complete.recordings[event] for event in own)
    pairs = []
    for element in reduced.elements:
        if element.at == freed and element.of_bytes:
            for first in _bits(covered & element.matters):
                entry = trace[first]
                if isinstance(entry, Launch) and entry.id.stream != free.stream:
                    pairs.append((first, element))
    if not pairs:
        return None
    chains = _chains(without, reduced, pairs, frozenset())
    return Implied((index,), chains, _sentence(trace, (index,), chains))


# The proof.


def _chains(
    trace: Trace, order: _Order, pairs: list[tuple[int, _Element]], left_out: frozenset[int]
) -> tuple[Chain, ...]:
    """A chain for each pair that no other pair implies, from the shortest links that ``order`` has."""
    before = {element.at: element.before for element in order.elements if not element.of_bytes}
    by_first: dict[int, list[_Element]] = {}
    by_later: dict[tuple[int | str, bool], int] = {}
    for first, element in pairs:
        by_first.setdefault(first, []).append(element)
        later = element.at, element.of_bytes
        by_later[later] = by_later.get(later, 0) | 1 << first
    links = _links(trace, left_out)
    chains: dict[tuple[int, int | str], Chain] = {}
    for first, element in sorted(pairs, key=_place):
        sooner = _union(1 << other.at for other in by_first[first] if isinstance(other.at, int) and not other.of_bytes)
        if element.before & sooner:
            continue
        sources = by_later[element.at, element.of_bytes] & order.work
        if any(before[other] >> first & 1 for other in _bits(sources) if other != first):
            continue
        if (first, element.at) not in chains:
            chains[first, element.at] = _chain(order, links, first, element)
    return tuple(chains.values())


def _place(pair: tuple[int, _Element]) -> tuple[int, int, str]:
    """Where a pair stands among others: ends last."""
    first, element = pair
    return (first, element.at, "") if isinstance(element.at, int) else (first, 1 << 62, element.at)


class _Links(NamedTuple):
    """The direct order of a trace, backwards."""

    own: list[tuple[int, ...]]
    """For each entry, the one before it on its stream and what the host did last."""
    across: list[tuple[int, ...]]
    """For each wait or host sync, what it waits for."""
    last: dict[str, tuple[int, ...]]
    """The same as ``own`` for the end of each stream and of the host."""


def _links(trace: Trace, left_out: frozenset[int]) -> _Links:
    own: list[tuple[int, ...]] = [()] * len(trace)
    across: list[tuple[int, ...]] = [()] * len(trace)
    last: dict[str, int] = {}
    recorded_at: dict[int, int] = {}

    def before(stream: str) -> tuple[int, ...]:
        return tuple(last[name] for name in {stream: 0, _HOST: 0} if name in last)

    for index, entry in enumerate(trace):
        if index in left_out or isinstance(entry, RecordStream | Allocate):
            continue
        stream = _actor(entry)
        own[index] = before(stream)
        if isinstance(entry, Wait | HostSync):
            if entry.event is not None:
                across[index] = (recorded_at[entry.event],) if entry.event in recorded_at else ()
            elif entry.stream is not None:
                across[index] = (last[entry.stream],) if entry.stream in last else ()
            else:
                across[index] = tuple(at for name, at in last.items() if name != _HOST)
        if isinstance(entry, Record):
            recorded_at[entry.event] = index
        if not isinstance(entry, Free) or entry.stream is None:
            last[stream] = index
    names = {entry.id.stream for entry in trace if isinstance(entry, Launch)}
    names |= {entry.stream for entry in trace if isinstance(entry, Record | Wait)} | {_HOST}
    return _Links(own, across, {name: before(name) for name in names})


def _actor(entry: Entry) -> str:
    """The stream that an entry belongs to, or the host."""
    if isinstance(entry, Launch):
        return entry.id.stream
    return _HOST if isinstance(entry, HostSync | HostAccess) else entry.stream or _HOST


def _actor_of(trace: Trace, element: _Element) -> str:
    return _actor(trace[element.at]) if isinstance(element.at, int) else element.at


def _chain(order: _Order, links: _Links, first: int, element: _Element) -> Chain:
    """The chain with the fewest links that cross from one stream to another or to the host."""
    trace = order.trace
    start = order.anchors.get(first, first)
    reached: set[int] = set()
    queue: deque[tuple[int, tuple[int, ...]]] = deque()
    """What comes before the element and by what, going backwards, fewest links first."""
    own = links.own[element.at] if isinstance(element.at, int) else links.last[element.at]
    queue.extend((at, ()) for at in own)
    for at in element.by:
        entry = trace[at]
        if isinstance(entry, Allocate):
            records = [order.recorded_at[event] for event in entry.after if order.recorded_at.get(event, at) < at]
            queue.extend((record, (record, at)) for record in records)
        else:
            queue.append((at, (at,)))
    end = (element.at,) if isinstance(element.at, int) else ()
    while queue:
        at, carried = queue.popleft()
        if at == start:
            return Chain((first, *carried, *end), None if isinstance(element.at, int) else element.at)
        if at in reached or at < start:
            continue
        reached.add(at)
        queue.extendleft((other, carried) for other in links.own[at])
        for other in links.across[at]:
            entry = trace[at]
            by_event = isinstance(entry, Wait | HostSync) and entry.event is not None
            queue.append((other, (other, at, *carried) if by_event else (at, *carried)))
    raise AssertionError(f"entry {first} is ordered before {element.at!r}, but by no chain")


def _sentence(trace: Trace, indices: tuple[int, ...], chains: tuple[Chain, ...]) -> str:
    recorded_on = {entry.event: entry.stream for entry in trace if isinstance(entry, Record)}

    def event(number: int) -> str:
        return f"event {number}" + (f" recorded on {recorded_on[number]!r}" if number in recorded_on else "")

    def name(at: int) -> str:
        entry = trace[at]
        match entry:
            case Launch():
                return str(entry.id)
            case Wait():
                return f"the wait of {entry.stream!r} for {event(entry.event)}"
            case HostSync():
                if entry.event is not None:
                    return f"the host's wait for {event(entry.event)}"
                return f"the host's wait for {'everything' if entry.stream is None else f'stream {entry.stream!r}'}"
            case HostAccess():
                return f"{entry.operation} on the host"
            case Free():
                return f"the free of block {entry.block}"
            case Allocate():
                return f"the reuse of block {entry.block}, which waited for it"
            case RecordStream():
                return f"record_stream of block {entry.block} on {entry.stream!r}"
            case Record():
                return event(entry.event)

    def reason(chain: Chain) -> str:
        last = len(chain.entries) - (chain.end_of is None)
        carried = chain.entries[1:last]
        later = f"the end of {f'stream {chain.end_of!r}' if chain.end_of else 'the host'}"
        if chain.end_of is None:
            later = name(chain.entries[-1])
        parts = [name(at) for at in carried if not isinstance(trace[at], Record)]
        if carried and isinstance(trace[carried[-1]], Record):
            parts.append(f"the deferral until {name(carried[-1])}")
        actor = _actor(trace[chain.entries[0]])
        by = ", then ".join(parts) or f"the order of {f'stream {actor!r}' if actor else 'the host'}"
        return f"{later} comes after {name(chain.entries[0])} by {by}"

    left = " with ".join(name(at) for at in indices)
    if left.startswith("record_stream"):
        left = f"the {left}"
    if not chains:
        return f"{left} orders nothing: no work comes before what is waited for."
    return f"{left} is implied: {'; '.join(map(reason, chains))}."
