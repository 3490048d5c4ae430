"""A timeline drawn as SVG, as a sequence diagram: lanes side by side, the order of submission from top to bottom.

So the names of operations have room, the drawing grows downwards only, and two or three lanes fit a telephone. What is
drawn is chosen around the races: their accesses, what else touches their bytes, what orders their lanes, and of the
rest as much as there is room for. A missing arrow runs where it would run if somebody had issued it, right after the
first access and right before the second, but dashed, crossed out and with its name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from harness.report.timeline import (
    ALLOCATE,
    FREE,
    HOST_ACCESS,
    HOST_SYNC,
    LAUNCH,
    RECORD,
    RECORD_STREAM,
    Arrow,
    Item,
    MissingArrow,
    Timeline,
)

MOST_BOXES = 12
"""What is drawn beyond the races themselves is left out from here on."""
_PITCH = 152
"""From one lane to the next, in pixels, as all lengths here."""
_BOX = 132
_LEFT = 8
_HEAD = 54
_LINE = 15
_PADDING = 8
_GAP = 12
_ORDER_ROW = 24
_MISSING_ROW = 44
_ELISION_ROW = 26
_CORNER = 7
_LETTERS = 17
"""How many letters fit a box, in the wide fonts of some systems."""
_BOXES = (LAUNCH, HOST_ACCESS, ALLOCATE, FREE, RECORD_STREAM)
_MEMORY = (ALLOCATE, FREE, RECORD_STREAM)

STYLE = """
.timeline { --ink: #1b1f24; --quiet: #57606a; --paper: #ffffff; --box: #f3f5f7; --edge: #8c959f; --lane: #b6bec7;
  --order: #0b5cad; --race: #b42318; --race-box: #fff0ee; --on-race: #ffffff; }
@media (prefers-color-scheme: dark) { .timeline { --ink: #e8ebef; --quiet: #a3adb8; --paper: #15181d; --box: #22272e;
  --edge: #76818d; --lane: #4b5561; --order: #79b8ff; --race: #ff8a7a; --race-box: #3a1f1c; --on-race: #1b0d0b; } }
.timeline { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  font-size: 12px; fill: var(--ink); }
.timeline .lane { stroke: var(--lane); stroke-width: 1.5; }
.timeline .name { font-size: 13px; font-weight: 650; text-anchor: middle; }
.timeline .where, .timeline .elision { font-size: 11px; fill: var(--quiet); text-anchor: middle; }
.timeline .elision { font-style: italic; stroke: var(--paper); stroke-width: 5; paint-order: stroke; }
.timeline .box { fill: var(--box); stroke: var(--edge); }
.timeline .memory .box { stroke-dasharray: 2 2; }
.timeline .racing .box { fill: var(--race-box); stroke: var(--race); stroke-width: 2; stroke-dasharray: none; }
.timeline .tab { fill: var(--race); }
.timeline .role { fill: var(--on-race); font-size: 11px; font-weight: 700; letter-spacing: .02em; }
.timeline .title { font-weight: 600; }
.timeline .detail { font-size: 11px; fill: var(--quiet); }
.timeline .index { font-size: 11px; fill: var(--quiet); text-anchor: end; }
.timeline .held { font-size: 11px; font-style: italic; }
.timeline .order { fill: none; stroke: var(--order); stroke-width: 1.75; }
.timeline .head, .timeline .record { fill: var(--order); }
.timeline .wait { stroke: var(--order); stroke-width: 4; stroke-linecap: round; }
.timeline .barrier { stroke: var(--order); stroke-width: 1; stroke-dasharray: 1 4; }
.timeline .note { font-size: 11px; fill: var(--order); stroke: var(--paper); stroke-width: 4; paint-order: stroke; }
.timeline .missing { fill: none; stroke: var(--race); stroke-width: 2.5; stroke-dasharray: 6 5; }
.timeline .ghost { fill: var(--paper); stroke: var(--race); stroke-width: 2; }
.timeline .ghost-wait { stroke: var(--race); stroke-width: 4; stroke-linecap: round; stroke-dasharray: 5 7; }
.timeline .missing-head { fill: var(--race); }
.timeline .cross { stroke: var(--race); stroke-width: 2.5; stroke-linecap: round; }
.timeline .disc { fill: var(--paper); stroke: var(--race); stroke-width: 2; }
.timeline .cure { font-size: 12.5px; font-weight: 700; fill: var(--race); text-anchor: middle; stroke: var(--paper);
  stroke-width: 5; paint-order: stroke; stroke-linejoin: round; }
"""
"""For a page that shows drawings; once a page."""


@dataclass(frozen=True, slots=True)
class _Elision:
    """Entries that are not drawn."""

    items: int


def draw(timeline: Timeline, number: int = 0, *, title: str = "", standalone: bool = False) -> str:
    """Draw a timeline with one of its missing arrows, or with none where it has none.

    Args:
        timeline: what to draw.
        number: which missing arrow.
        title: what the drawing is called, for those who do not see it.
        standalone: whether the drawing is a file of its own, so that it must bring its style.
    """
    missing = timeline.missing[number] if timeline.missing else None
    return _Drawing(timeline, missing).svg(title or _description(timeline, missing), standalone)


def _description(timeline: Timeline, missing: MissingArrow | None) -> str:
    if missing is None:
        return "Timeline of the repetition: every access is ordered."
    first, second = timeline.items[missing.first], timeline.items[missing.second]
    one, other = (timeline.lanes[item.lane].name for item in (first, second))
    return (
        f"Timeline: {first.title} on {one}, then {second.title} on {other}, and no {missing.cure} between them. "
        f"{missing.sentence}"
    )


# What is drawn.


def _chosen(timeline: Timeline, missing: MissingArrow | None) -> list[Item | _Elision]:
    shown = _places(timeline, missing)
    chosen: list[Item | _Elision] = []
    hidden = 0
    for item in timeline.items:
        if item.place in shown:
            if hidden:
                chosen.append(_Elision(hidden))
            hidden = 0
            chosen.append(item)
        elif item.kind in (LAUNCH, HOST_ACCESS):
            hidden += 1
    if hidden:
        chosen.append(_Elision(hidden))
    return chosen


def _places(timeline: Timeline, missing: MissingArrow | None) -> set[int]:
    items = timeline.items
    work = [item.place for item in items if item.kind in (LAUNCH, HOST_ACCESS)]
    if missing is None:
        boxes = set(work[:MOST_BOXES])
        return boxes | _ordering(timeline, boxes, set(range(len(timeline.lanes))))
    pair = {missing.first, missing.second}
    lanes = {items[place].lane for place in pair}
    of_memory = missing.cure == "record_stream" or any(items[place].kind in _MEMORY for place in pair)
    same_bytes = [
        item.place
        for item in items
        if _touches(item, missing)
        and (
            item.kind in (LAUNCH, HOST_ACCESS)
            # What becomes of the memory counts between the two, where it is why they race.
            or (item.kind in _MEMORY and of_memory and missing.first < item.place < missing.second)
        )
    ]
    on_lanes = [place for place in work if items[place].lane in lanes]
    # Nearest to the race first.
    for_choice = sorted(same_bytes, key=lambda place: _distance(place, missing))
    for_choice += sorted(on_lanes, key=lambda place: _distance(place, missing))
    for_choice += sorted(work, key=lambda place: _distance(place, missing))
    boxes = pair | set(list(dict.fromkeys(for_choice))[:MOST_BOXES])
    return boxes | _ordering(timeline, boxes, lanes)


def _distance(place: int, missing: MissingArrow) -> int:
    return min(abs(place - missing.first), abs(place - missing.second))


def _touches(item: Item, missing: MissingArrow) -> bool:
    return any(each.overlaps(missing.block, missing.start, missing.stop) for each in item.ranges)


def _ordering(timeline: Timeline, boxes: set[int], lanes: set[int]) -> set[int]:
    """The arrows between what is drawn: of those that end at one drawn box, from one lane, the last."""
    if not boxes:
        return set()
    low, high = min(boxes), max(boxes)
    drawn_lanes = {timeline.items[place].lane for place in boxes} | lanes
    seen: dict[tuple[int, int, int], Arrow] = {}
    for arrow in timeline.arrows:
        source, target = timeline.items[arrow.source], timeline.items[arrow.target]
        if target.kind == ALLOCATE or source.lane == target.lane:
            continue
        if not (low <= arrow.source and arrow.target <= high):
            continue
        if source.lane not in drawn_lanes or (target.lane not in drawn_lanes and target.kind != HOST_SYNC):
            continue
        following = min((place for place in boxes if place > arrow.target), default=high + 1)
        seen[source.lane, target.lane, following] = arrow
    return {place for arrow in seen.values() for place in (arrow.source, arrow.target)}


# How it is drawn.


class _Drawing:
    def __init__(self, timeline: Timeline, missing: MissingArrow | None) -> None:
        self.timeline = timeline
        self.missing = missing
        self.rows = _chosen(timeline, missing)
        shown = [row for row in self.rows if isinstance(row, Item)]
        self.lanes = sorted({item.lane for item in shown}, key=lambda lane: (timeline.lanes[lane].is_host, lane))
        self.columns = {lane: column for column, lane in enumerate(self.lanes)}
        self.width = 2 * _LEFT + _BOX + _PITCH * (max(1, len(self.lanes)) - 1)
        self.y: dict[int, float] = {}
        """Where an entry's own line is: of a box, its middle."""
        self.behind: list[str] = []
        self.boxes: list[str] = []
        self.front: list[str] = []
        self.bottom = float(_HEAD)
        self.ghost_record = self.ghost_wait = 0.0

    def svg(self, title: str, standalone: bool) -> str:
        self._lay_out()
        shown = {row.place for row in self.rows if isinstance(row, Item)}
        for arrow in self.timeline.arrows:
            if arrow.source in shown and arrow.target in shown:
                self._order(arrow)
        if self.missing is not None:
            self._missing(self.missing)
        height = self.bottom + 10
        heads = "".join(self._lane(lane, height) for lane in self.lanes)
        namespace = ' xmlns="http://www.w3.org/2000/svg"' if standalone else ""
        style = f"<style>{STYLE}</style>" if standalone else ""
        return (
            f'<svg{namespace} class="timeline" role="img" viewBox="0 0 {self.width} {height:g}" width="{self.width}" '
            f'height="{height:g}">{style}<title>{escape(title)}</title>'
            f"{heads}{''.join(self.behind)}{''.join(self.boxes)}{''.join(self.front)}</svg>"
        )

    def _x(self, lane: int) -> float:
        return _LEFT + _BOX / 2 + _PITCH * self.columns[lane]

    def _lay_out(self) -> None:
        y = float(_HEAD)
        recorded = {arrow.target: arrow.source for arrow in self.timeline.arrows}
        previous: Item | None = None
        for row in self.rows:
            if isinstance(row, _Elision):
                self._elision(row, y)
                y += _ELISION_ROW
                previous = None
                continue
            if self.missing is not None and row.place == self.missing.second:
                # The name of what is missing stands above the arrow, and the arrow above its second access.
                self.ghost_wait = y + _MISSING_ROW - 18
                if previous is not None and previous.place == self.missing.first:
                    self.ghost_record = self.ghost_wait  # nothing is between the two, so the arrow is level
                y += _MISSING_ROW
            if row.kind in _BOXES:
                height = self._box(row, y)
                self.y[row.place] = y + height / 2
                y += height + _GAP
            else:
                if previous is not None and recorded.get(row.place) == previous.place and previous.kind == RECORD:
                    y = self.y[previous.place] - _ORDER_ROW / 2
                self.y[row.place] = y + _ORDER_ROW / 2
                y += _ORDER_ROW
            if self.missing is not None and row.place == self.missing.first:
                self.ghost_record = y + 1
                y += 12
            previous = row
        self.bottom = y

    def _lane(self, lane: int, height: float) -> str:
        made = self.timeline.lanes[lane]
        devices = {self.timeline.lanes[each].device for each in self.lanes} - {None}
        if made.is_host:
            where = "Python, pinned memory"
        elif made.device is not None and (len(devices) > 1 or made.device):
            where = f"stream, device {made.device}"
        else:
            where = "stream"
        x = self._x(lane)
        return (
            f'<line class="lane" x1="{x:g}" y1="{_HEAD - 12}" x2="{x:g}" y2="{height - 4:g}"/>'
            f'<text class="name" x="{x:g}" y="18">{escape(_short(made.name, 16))}</text>'
            f'<text class="where" x="{x:g}" y="33">{where}</text>'
        )

    def _elision(self, row: _Elision, y: float) -> None:
        text = f"… {row.items:,} more {'launch' if row.items == 1 else 'launches'}, not drawn …"
        self.front.append(f'<text class="elision" x="{self.width / 2:g}" y="{y + 12:g}">{text}</text>')

    def _box(self, item: Item, y: float) -> float:
        role = self._role(item)
        lines = [("title", _short(_operation(item), _LETTERS - (3 if item.index is not None else 0)))]
        if item.node:
            lines.append(("detail", _short(item.node, _LETTERS + 1)))
        if item.line:
            lines.append(("detail", _tail(item.line, _LETTERS + 1)))
        if item.hold:
            lines.append(("held", _HELD.get(item.hold, f"held: {item.hold}")))
        tab = 18 if role else 0
        height = tab + 2 * _PADDING + _LINE * len(lines) - 4
        left = self._x(item.lane) - _BOX / 2
        classes = "racing" if role else "memory" if item.kind in _MEMORY else "work"
        parts = [
            f'<g class="{classes}"><title>{escape(_whole(item))}</title>',
            f'<rect class="box" x="{left:g}" y="{y:g}" width="{_BOX}" height="{height}" rx="4"/>',
        ]
        if role:
            side = tab - 4
            parts.append(
                f'<path class="tab" d="M{left:g} {y + tab:g}v-{side}a4 4 0 0 1 4-4h{_BOX - 8}a4 4 0 0 1 4 4v{side}z"/>'
                f'<text class="role" x="{left + _PADDING:g}" y="{y + 13:g}">{role}</text>'
            )
        text = y + tab + _PADDING + 9
        if item.index is not None:
            x = left + _BOX - _PADDING
            parts.append(f'<text class="index" x="{x:g}" y="{text:g}">:{item.index}</text>')
        for kind, line in lines:
            parts.append(f'<text class="{kind}" x="{left + _PADDING:g}" y="{text:g}">{escape(line)}</text>')
            text += _LINE
        self.boxes.append("".join(parts) + "</g>")
        return height

    def _role(self, item: Item) -> str | None:
        missing = self.missing
        if missing is None or item.place not in (missing.first, missing.second):
            return None
        deed = "frees"
        if item.kind in (LAUNCH, HOST_ACCESS):
            touching = [each for each in item.ranges if each.overlaps(missing.block, missing.start, missing.stop)]
            deed = "writes" if any(each.write for each in touching) else "reads"
            if len({each.write for each in touching}) > 1:
                deed = "reads, writes"
        return f"{'1st' if item.place == missing.first else '2nd'}: {deed}"

    def _order(self, arrow: Arrow) -> None:
        source, target = self.timeline.items[arrow.source], self.timeline.items[arrow.target]
        start, end = self.y[source.place], self.y[target.place]
        path, tip = self._path(self._x(source.lane), start, self._x(target.lane), end)
        self.behind.append(f'<path class="order" d="{path}"/>')
        if source.kind == RECORD:
            self.behind.append(f'<circle class="record" cx="{self._x(source.lane):g}" cy="{start:g}" r="3.5"/>')
        x = self._x(target.lane)
        self.behind.append(f'<path class="head" d="{_head(tip, end, x)}"/>')
        if target.kind == HOST_SYNC:
            # Whatever is enqueued from here on comes after it.
            left, right = _LEFT, self.width - _LEFT
            self.behind.append(f'<line class="barrier" x1="{left}" y1="{end:g}" x2="{right}" y2="{end:g}"/>')
            self.front.append(f'<text class="note" x="{x - _BOX / 2:g}" y="{end + 14:g}">synchronize</text>')
            self.behind.append(f'<line class="wait" x1="{x - 9:g}" y1="{end:g}" x2="{x + 9:g}" y2="{end:g}"/>')
        else:
            self.behind.append(f'<line class="wait" x1="{x - 9:g}" y1="{end:g}" x2="{x + 9:g}" y2="{end:g}"/>')

    def _missing(self, missing: MissingArrow) -> None:
        first, second = self.timeline.items[missing.first], self.timeline.items[missing.second]
        if first.lane == second.lane:
            return
        start, end = self._x(first.lane), self._x(second.lane)
        path, tip = self._path(start, self.ghost_record, end, self.ghost_wait)
        level = self.ghost_record == self.ghost_wait
        corner = start if level else _gutter(start, end)
        cross = (corner + tip) / 2
        label = cross if level else corner
        wait = self.ghost_wait
        self.front.append(
            f'<path class="missing" d="{path}"/>'
            f'<circle class="ghost" cx="{start:g}" cy="{self.ghost_record:g}" r="4.5"/>'
            f'<line class="ghost-wait" x1="{end - 12:g}" y1="{wait:g}" x2="{end + 12:g}" y2="{wait:g}"/>'
            f'<path class="missing-head" d="{_head(tip, wait, end)}"/>'
            f'<circle class="disc" cx="{cross:g}" cy="{wait:g}" r="8"/>'
            f'<path class="cross" d="M{cross - 3.2:g} {wait - 3.2:g}l6.4 6.4m0-6.4l-6.4 6.4"/>'
            f'<text class="cure" x="{label:g}" y="{wait - 13:g}">missing {missing.cure}</text>'
        )

    def _path(self, start: float, from_y: float, end: float, to_y: float) -> tuple[str, float]:
        """A path from one lane to another, down the gutter beside the first; and where its tip is."""
        side = 1 if end > start else -1
        tip = end - side * 8
        if abs(to_y - from_y) < 1:
            return f"M{start:g} {from_y:g}H{tip:g}", tip
        gutter = _gutter(start, end)
        corner = min(_CORNER, abs(to_y - from_y) / 2)
        return (
            f"M{start:g} {from_y:g}H{gutter - side * corner:g}Q{gutter:g} {from_y:g} {gutter:g} {from_y + corner:g}"
            f"V{to_y - corner:g}Q{gutter:g} {to_y:g} {gutter + side * corner:g} {to_y:g}H{tip:g}"
        ), tip


_HELD = {
    "pending": "held: ran last",
    "forced": "held until a sync",
    "ran": "hold too short",
    "expired": "held too long",
    "missing": "never launched",
}


def _gutter(start: float, end: float) -> float:
    return start + (_PITCH / 2 if end > start else -_PITCH / 2)


def _head(tip: float, y: float, end: float) -> str:
    side = 1 if end > tip else -1
    return f"M{tip + side * 7:g} {y:g}l{-side * 9} -4.5v9z"


def _operation(item: Item) -> str:
    """The name of an operation without its namespace and overload."""
    if item.kind not in (LAUNCH, HOST_ACCESS):
        return item.title
    return item.title.rpartition("::")[2].partition(".")[0]


def _short(text: str, letters: int) -> str:
    return text if len(text) <= letters else text[: letters - 1] + "…"


def _tail(text: str, letters: int) -> str:
    """The end of a path and line."""
    name = text.rpartition("/")[2]
    return name if len(name) <= letters else "…" + name[-(letters - 1) :]


def _whole(item: Item) -> str:
    parts: Iterable[str | None] = (item.title, item.node and f"in {item.node}", item.line, item.code)
    accesses: Sequence[str] = ()
    if item.kind in (LAUNCH, HOST_ACCESS):
        accesses = [
            f"{'writes' if each.write else 'reads'} bytes {each.start} to {each.stop} of block {each.block}"
            for each in item.ranges
        ]
    return "\n".join([*(part for part in parts if part), *accesses])
