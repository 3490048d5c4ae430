"""The timeline of a repetition: who did what in which order, which waits ordered it, and which wait is missing.

A trace has no clock. Its order is that in which the host enqueued, which each stream keeps; between streams only
arrows order. So a timeline has places, counted from 0, and no times: a later place on another lane is no later work
unless a chain of arrows leads there.

This is what ``perfetto.py`` and ``drawing.py`` show; it is plain data, so that it can be kept with the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from harness.judge.happens_before import Race
from harness.observe.holds import HoldOutcome
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
    SourceLine,
    Trace,
    Wait,
)
from harness.report.source_lines import code_of

LAUNCH, RECORD, WAIT, HOST_SYNC, HOST_ACCESS = "launch", "record", "wait", "host sync", "host access"
ALLOCATE, FREE, RECORD_STREAM = "allocate", "free", "record_stream"

HOST = "host"
"""The lane of the host."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A stream, or the host."""

    name: str
    device: int | None
    """None for the host, and where it is not known."""
    is_host: bool = False


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes [start, stop) of a block of memory."""

    block: int
    start: int
    stop: int
    write: bool

    def overlaps(self, block: int, start: int, stop: int) -> bool:
        """Whether it has bytes in common with another."""
        return self.block == block and self.start < stop and start < self.stop


@dataclass(frozen=True, slots=True)
class Item:
    """One entry of the trace."""

    place: int
    lane: int
    kind: str
    title: str
    """The operation, as the dispatcher names it; else what happened, in words."""
    index: int | None = None
    """Of a launch on its stream, as plans count."""
    node: str | None = None
    """The autograd node that was running."""
    line: str | None = None
    code: str = ""
    ranges: tuple[Range, ...] = ()
    """What it accesses, hands out or gives back."""
    hold: str | None = None
    """Whether a plan held it, and what became of that."""


@dataclass(frozen=True, slots=True)
class Arrow:
    """What orders two lanes: what is before the source comes before what is after the target."""

    source: int
    target: int
    """Places."""


@dataclass(frozen=True, slots=True)
class MissingArrow:
    """Two racing accesses, and the arrow that nobody drew between them."""

    first: int
    second: int
    """Places, in submission order."""
    kind: str
    """Of the race, such as ``read after write``."""
    cure: str
    """What is missing: ``wait``, ``record_stream`` or ``synchronize``."""
    sentence: str
    block: int
    start: int
    stop: int

    @property
    def headline(self) -> str:
        """What may happen, in words."""
        earlier, later = _DEEDS[self.kind]
        return f"The second access may {later} before the first has {earlier}."


_DEEDS = {
    "read after write": ("written", "read"),
    "write after write": ("written", "write"),
    "write after read": ("read", "overwrite"),
    "freed while in use": ("used the memory", "give the memory back"),
    "read after free": ("given the memory back", "read"),
    "write after free": ("given the memory back", "write"),
}


@dataclass(frozen=True, slots=True)
class Timeline:
    """One repetition."""

    lanes: tuple[Lane, ...]
    items: tuple[Item, ...]
    """One for each entry of the trace, by place; an entry about every stream stands on the host's lane."""
    arrows: tuple[Arrow, ...]
    missing: tuple[MissingArrow, ...] = field(default=())

    @classmethod
    def of(
        cls,
        trace: Trace,
        races: Sequence[Race] = (),
        holds: Iterable[HoldOutcome] = (),
        *,
        device_of: Callable[[str], int | None] = lambda stream: None,
        line_of: Callable[[Entry], SourceLine | None] = lambda entry: getattr(entry, "line", None),
    ) -> Timeline:
        """The timeline of a trace.

        Args:
            trace: the repetition.
            races: of that trace: they name its own entries.
            holds: what the plan held.
            device_of: the device of a stream, by its name.
            line_of: where an entry comes from.
        """
        states = {outcome.launch: outcome.state.value for outcome in holds}
        lanes: dict[str, int] = {}
        for entry in trace:
            stream = _stream_of(entry)
            if stream is not None:
                lanes.setdefault(stream, len(lanes))
        host = len(lanes)
        items = []
        for place, entry in enumerate(trace):
            stream = _stream_of(entry)
            lane = host if stream is None else lanes[stream]
            state = states.get(entry.id) if isinstance(entry, Launch) else None
            items.append(_item(entry, place, lane, line_of(entry), state))
        made = [Lane(name, device_of(name)) for name in lanes]
        if any(item.lane == host for item in items):
            made.append(Lane(HOST, None, is_host=True))
        places = {id(entry): place for place, entry in enumerate(trace)}
        missing = tuple(
            MissingArrow(
                places[id(race.first)],
                places[id(race.second)],
                race.kind,
                _cure(race),
                race.missing_wait,
                race.block,
                race.start,
                race.stop,
            )
            for race in races
        )
        return cls(tuple(made), tuple(items), tuple(_arrows(trace)), missing)

    def to_json(self) -> dict[str, Any]:
        """Plain data; of items, what is none or empty is left out."""
        data = asdict(self)
        data["items"] = [
            {key: value for key, value in item.items() if value not in (None, "", ())} for item in data["items"]
        ]
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Timeline:
        """What ``to_json`` made the data of.

        Raises:
            KeyError, TypeError: it is no such data.
        """
        items = (
            Item(**{**item, "ranges": tuple(Range(**each) for each in item.get("ranges", ()))})
            for item in data["items"]
        )
        return cls(
            tuple(Lane(**lane) for lane in data["lanes"]),
            tuple(items),
            tuple(Arrow(**arrow) for arrow in data["arrows"]),
            tuple(MissingArrow(**arrow) for arrow in data["missing"]),
        )


def _stream_of(entry: Entry) -> str | None:
    """On whose lane an entry stands; None for the host's."""
    if isinstance(entry, Launch):
        return entry.id.stream
    if isinstance(entry, Record | Wait | Allocate | Free | RecordStream):
        return entry.stream
    return None


def _item(entry: Entry, place: int, lane: int, line: SourceLine | None, hold: str | None) -> Item:
    where = None if line is None else str(line)
    if isinstance(entry, Launch):
        ranges = _ranges(entry.accesses)
        kind, title = LAUNCH, entry.operation
        return Item(place, lane, kind, title, entry.id.index, entry.node, where, code_of(line), ranges, hold)
    if isinstance(entry, HostAccess):
        ranges = _ranges(entry.accesses)
        return Item(place, lane, HOST_ACCESS, entry.operation, None, entry.node, where, code_of(line), ranges)
    if isinstance(entry, Record):
        return Item(place, lane, RECORD, f"record event {entry.event}")
    if isinstance(entry, Wait):
        return Item(place, lane, WAIT, f"wait for event {entry.event}")
    if isinstance(entry, HostSync):
        what = "every stream"
        if entry.event is not None:
            what = f"event {entry.event}"
        elif entry.stream is not None:
            what = f"stream {entry.stream}"
        return Item(place, lane, HOST_SYNC, f"synchronize {what}")
    kind = {Allocate: ALLOCATE, Free: FREE, RecordStream: RECORD_STREAM}[type(entry)]
    memory = (Range(entry.block, entry.start, entry.stop, write=kind == FREE),)
    title = f"record_stream of block {entry.block}" if kind == RECORD_STREAM else f"{kind} block {entry.block}"
    return Item(place, lane, kind, title, line=where, code=code_of(line), ranges=memory)


def _ranges(accesses: Iterable[Access]) -> tuple[Range, ...]:
    return tuple(Range(*access) for access in accesses)


def _cure(race: Race) -> str:
    if race.second_stream is None:
        return "synchronize"
    if (isinstance(race.second, Free) or race.reused) and not race.pinned:
        return "record_stream"
    return "wait"


def _arrows(trace: Trace) -> Iterable[Arrow]:
    recorded: dict[int, int] = {}
    last: dict[str, int] = {}
    for place, entry in enumerate(trace):
        if isinstance(entry, Record):
            recorded[entry.event] = place
        sources: Iterable[int | None] = ()
        if isinstance(entry, Wait) or (isinstance(entry, HostSync) and entry.event is not None):
            # What was recorded before the trace begins orders nothing in it.
            sources = (recorded.get(entry.event) if entry.event is not None else None,)
        elif isinstance(entry, HostSync):
            sources = last.values() if entry.stream is None else (last.get(entry.stream),)
        elif isinstance(entry, Allocate):
            sources = (recorded.get(event) for event in entry.after)
        for source in sources:
            if source is not None:
                yield Arrow(source, place)
        if isinstance(entry, Launch | Record | Wait):
            stream = _stream_of(entry)
            assert stream is not None
            last[stream] = place
