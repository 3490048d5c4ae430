"""A timeline as a Chrome trace, which Perfetto (ui.perfetto.dev), Chrome and Edge show.

The format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
Devices are its processes, streams its threads, each entry of the trace a slice, and what orders two streams a flow. A
trace has no clock, so a slice stands where it was enqueued, one step of 10 microseconds after the one before. The
missing arrows are flows of a category of their own, and slices of a track of their own that last from the first access
to the second.
"""

from __future__ import annotations

from typing import Any

from harness.report.timeline import HOST_ACCESS, LAUNCH, Item, MissingArrow, Timeline

STEP_US = 10
SLICE_US = 8

MISSING = "missing"
"""The category of what is not there."""
ORDER = "order"
"""The category of the flows that order."""
_HOST_PROCESS = 1
_FINDINGS_PROCESS = 0
"""The process of the missing arrows: the lowest, so that it stands on top."""


def chrome_trace(timeline: Timeline, *, name: str, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    """The trace, ready for ``json.dump``; the events are sorted by their time.

    Args:
        timeline: what to show.
        name: of the case.
        extra: further keys of the outermost object. They stand last, since Perfetto stops at one it does not know.
    """
    threads = [_thread(timeline, lane) for lane in range(len(timeline.lanes))]
    events = list(_names(timeline, threads, name))
    timed = [_slice(item, threads[item.lane], timeline) for item in timeline.items]
    flow = 0
    for arrow in timeline.arrows:
        flow += 1
        timed += _flow(timeline, threads, arrow.source, arrow.target, flow, "wait", ORDER)
    for number, missing in enumerate(timeline.missing, 1):
        flow += 1
        what = f"missing {missing.cure}"
        timed += _flow(timeline, threads, missing.first, missing.second, flow, what, MISSING)
        timed.append(_finding(missing, number))
    # Of what happens at one time, slices come before the flows that begin and end in them.
    timed.sort(key=lambda event: (event["ts"], event["ph"] != "X"))
    return {"displayTimeUnit": "ns", "traceEvents": [*events, *timed], **(extra or {})}


def _thread(timeline: Timeline, lane: int) -> tuple[int, int]:
    """The process and the thread of a lane."""
    made = timeline.lanes[lane]
    process = _HOST_PROCESS if made.is_host else _HOST_PROCESS + 1 + (made.device or 0)
    return process, lane + 1


def _names(timeline: Timeline, threads: list[tuple[int, int]], name: str) -> list[dict[str, Any]]:
    processes = {_HOST_PROCESS: "host"} if any(lane.is_host for lane in timeline.lanes) else {}
    for lane, (process, _) in zip(timeline.lanes, threads, strict=True):
        processes.setdefault(process, f"device {lane.device or 0}")
    if timeline.missing:
        processes[_FINDINGS_PROCESS] = f"races of {name}"
    found = []
    for process, text in sorted(processes.items()):
        found.append(_name("process_name", process, 0, name=text))
        found.append(_name("process_sort_index", process, 0, sort_index=process))
    for lane, (process, thread) in zip(timeline.lanes, threads, strict=True):
        found.append(_name("thread_name", process, thread, name=lane.name))
        found.append(_name("thread_sort_index", process, thread, sort_index=thread))
    for number in range(1, len(timeline.missing) + 1):
        found.append(_name("thread_name", _FINDINGS_PROCESS, number, name=f"missing arrow {number}"))
    return found


def _name(what: str, process: int, thread: int, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": arguments}


def _slice(item: Item, thread: tuple[int, int], timeline: Timeline) -> dict[str, Any]:
    arguments: dict[str, Any] = {"place": item.place}
    for key, value in (("index", item.index), ("node", item.node), ("line", item.line), ("hold", item.hold)):
        if value is not None:
            arguments[key] = value
    if item.code:
        arguments["code"] = item.code
    if item.ranges:
        accesses = item.kind in (LAUNCH, HOST_ACCESS)
        arguments["memory"] = [
            (("writes " if each.write else "reads ") if accesses else "")
            + f"bytes {each.start} to {each.stop} of block {each.block}"
            for each in item.ranges
        ]
    roles = [
        f"{role} of missing arrow {number}"
        for number, missing in enumerate(timeline.missing, 1)
        for role, place in (("FIRST", missing.first), ("SECOND", missing.second))
        if place == item.place
    ]
    title = item.title if item.hold is None else f"{item.title} (held)"
    event = {
        "ph": "X",
        "name": f"RACES, {', '.join(roles)}: {title}" if roles else title,
        "cat": "race" if roles else item.kind,
        "pid": thread[0],
        "tid": thread[1],
        "ts": item.place * STEP_US,
        "dur": SLICE_US,
        "args": arguments,
    }
    if roles:
        event["cname"] = "terrible"
    return event


def _flow(
    timeline: Timeline, threads: list[tuple[int, int]], source: int, target: int, flow: int, name: str, category: str
) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    # A flow belongs to the slice that is there at its time: the end of one, the beginning of the other.
    for phase, place, at in (("s", source, SLICE_US - 1), ("f", target, 0)):
        process, thread = threads[timeline.items[place].lane]
        event = {"ph": phase, "id": flow, "name": name, "cat": category, "pid": process, "tid": thread}
        events.append({**event, "ts": place * STEP_US + at})
    events[1]["bp"] = "e"
    return events


def _finding(missing: MissingArrow, number: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": f"missing {missing.cure}: {missing.kind}",
        "cat": MISSING,
        "pid": _FINDINGS_PROCESS,
        "tid": number,
        "ts": missing.first * STEP_US,
        "dur": (missing.second - missing.first) * STEP_US + SLICE_US,
        "args": {
            "sentence": missing.sentence,
            "bytes": f"{missing.start} to {missing.stop} of block {missing.block}",
        },
        "cname": "terrible",
    }
