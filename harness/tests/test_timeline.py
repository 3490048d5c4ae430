"""The timeline of a race: its model, its Chrome trace, and the file that a run keeps of each distinct race."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from harness.judge.happens_before import find_races
from harness.observe.holds import HoldOutcome, HoldState
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
from harness.report.perfetto import MISSING, ORDER, chrome_trace
from harness.report.races import read_races
from harness.report.timeline import Arrow, Timeline
from harness.tests.suite_runner import RACY, new_suite


def launch(stream: str, index: int, *accesses: Access, line: SourceLine | None = None) -> Launch:
    return Launch(LaunchId(stream, index), "aten::mul.Tensor", None, line, accesses)


def write(block: int = 0) -> Access:
    return Access(block, 0, 64, True)


def read(block: int = 0) -> Access:
    return Access(block, 0, 64, False)


ORDERED: Trace = [launch("fill", 0, write()), Record("fill", 0), Wait("ambient", 0), launch("ambient", 0, read())]
UNORDERED: Trace = [ORDERED[0], ORDERED[3]]
FREED: Trace = [
    Allocate(0, 0, 64, "owner", ()),
    launch("owner", 0, write()),
    Record("owner", 0),
    Wait("user", 0),
    launch("user", 0, read()),
    Free(0, 0, 64, "owner", (), None),
    Allocate(0, 0, 64, "owner", ()),
    launch("owner", 1, write()),
]
HOST_READS: Trace = [
    launch("copy", 0, write()),
    Record("copy", 0),
    HostAccess("aten::add.Tensor", None, None, (read(),)),
    HostSync(None, 0),
    HostSync("copy", None),
    HostSync(None, None),
]
RECORDED: Trace = [RecordStream(0, 0, 64, "user"), Wait("user", 7)]
TRACES = {"ordered": ORDERED, "unordered": UNORDERED, "freed": FREED, "host": HOST_READS, "recorded": RECORDED}


def timeline_of(trace: Trace) -> Timeline:
    return Timeline.of(trace, find_races(trace), device_of=lambda stream: int(stream.endswith(".1")))


def test_a_wait_is_an_arrow_from_its_recording() -> None:
    timeline = timeline_of(ORDERED)
    assert [lane.name for lane in timeline.lanes] == ["fill", "ambient"]
    assert timeline.arrows == (Arrow(1, 2),)
    assert timeline.missing == ()


def test_a_race_is_a_missing_arrow() -> None:
    (missing,) = timeline_of(UNORDERED).missing
    assert (missing.first, missing.second, missing.kind, missing.cure) == (0, 1, "read after write", "wait")
    assert "before the first has written" in missing.headline


def test_memory_that_is_freed_in_use_lacks_record_stream() -> None:
    freed, overwritten = timeline_of(FREED).missing
    assert (freed.first, freed.second, freed.kind, freed.cure) == (4, 5, "freed while in use", "record_stream")
    assert (overwritten.first, overwritten.second, overwritten.cure) == (4, 7, "record_stream")


def test_the_host_has_a_lane_where_it_takes_part() -> None:
    timeline = timeline_of(HOST_READS)
    assert [(lane.name, lane.is_host) for lane in timeline.lanes] == [("copy", False), ("host", True)]
    (missing,) = timeline.missing
    assert (missing.first, missing.second, missing.cure) == (0, 2, "synchronize")
    # Each synchronization comes after what it waited for: the recording, then the last work of the stream.
    assert timeline.arrows == (Arrow(1, 3), Arrow(1, 4), Arrow(1, 5))


def test_a_wait_for_what_was_recorded_before_the_trace_has_no_arrow() -> None:
    assert timeline_of(RECORDED).arrows == ()


def test_a_held_launch_says_so() -> None:
    hold = HoldOutcome(LaunchId("fill", 0), HoldState.PENDING, None)
    assert [item.hold for item in Timeline.of(UNORDERED, holds=[hold]).items] == ["pending", None]


def test_lines_and_their_code_are_kept() -> None:
    here = SourceLine(__file__, 1)
    (item,) = Timeline.of([launch("fill", 0, line=here)]).items
    assert item.line == str(here)
    assert item.code.startswith('"""The timeline')


@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES)
def test_a_timeline_survives_json(trace: Trace) -> None:
    timeline = timeline_of(trace)
    assert Timeline.from_json(json.loads(json.dumps(timeline.to_json()))) == timeline


@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES)
def test_a_chrome_trace_is_well_formed(trace: Trace) -> None:
    timeline = timeline_of(trace)
    made = chrome_trace(timeline, name="a case", extra={"more": 1})
    assert list(made) == ["displayTimeUnit", "traceEvents", "more"]  # what Perfetto does not know stands last
    check_chrome_trace(made["traceEvents"], timeline)


def check_chrome_trace(events: list[dict[str, Any]], timeline: Timeline) -> None:
    names = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    timed = [event for event in events if event["ph"] != "M"]
    assert {event["ph"] for event in timed} <= {"X", "s", "f"}
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    assert {(event["pid"], event["tid"]) for event in timed} <= names
    slices = [event for event in timed if event["ph"] == "X"]
    assert len(slices) == len(timeline.items) + len(timeline.missing)
    # Slices of one track do not overlap.
    for track in names:
        own = [event for event in slices if (event["pid"], event["tid"]) == track]
        assert all(one["ts"] + one["dur"] <= other["ts"] for one, other in itertools.pairwise(own))
    flows: dict[int, dict[str, dict[str, Any]]] = {}
    for event in timed:
        if event["ph"] in "sf":
            assert event["ph"] not in flows.setdefault(event["id"], {})
            flows[event["id"]][event["ph"]] = event
    assert len(flows) == len(timeline.arrows) + len(timeline.missing)
    for ends in flows.values():
        assert set(ends) == {"s", "f"}
        start, finish = ends["s"], ends["f"]
        assert start["ts"] < finish["ts"]
        assert (start["name"], start["cat"]) == (finish["name"], finish["cat"])
        assert finish["bp"] == "e"
        for end in (start, finish):
            assert any(
                event["pid"] == end["pid"]
                and event["tid"] == end["tid"]
                and event["ts"] <= end["ts"] < event["ts"] + event["dur"]
                for event in slices
            )
    kinds = [ends["s"]["cat"] for ends in flows.values()]
    assert (kinds.count(ORDER), kinds.count(MISSING)) == (len(timeline.arrows), len(timeline.missing))
    assert json.dumps(events)


def test_racing_accesses_stand_out_in_the_chrome_trace() -> None:
    events = chrome_trace(timeline_of(UNORDERED), name="a case")["traceEvents"]
    racing = [event["name"] for event in events if event.get("cat") == "race"]
    assert racing == [
        "RACES, FIRST of missing arrow 1: aten::mul.Tensor",
        "RACES, SECOND of missing arrow 1: aten::mul.Tensor",
    ]


def test_streams_of_a_device_are_one_process() -> None:
    events = chrome_trace(timeline_of([launch("a", 0), launch("b", 0), launch("a.1", 0)]), name="a case")["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    threads = {event["args"]["name"]: processes[event["pid"]] for event in events if event["name"] == "thread_name"}
    assert threads == {"a": "device 0", "b": "device 0", "a.1": "device 1"}


# What a run keeps.


def test_a_run_keeps_each_distinct_race_once_and_names_the_file(tmp_path: Path) -> None:
    ran = new_suite(tmp_path, RACY).run("--results", "kept", "--count", "20")
    assert ran.code == 1
    (path,) = (tmp_path / "kept" / "races").iterdir()
    assert f"timeline {path.relative_to(tmp_path)} (open it at ui.perfetto.dev)" in ran.output
    problems: list[str] = []
    (race,) = read_races(tmp_path / "kept", problems)
    assert not problems
    assert race.nodeid == "test_written.py::test_unordered"
    assert path.name == f"test_unordered-{race.id}.trace.json"
    # The one whose value was wrong tells most, and not the baseline, which came first.
    assert (race.plan, race.oracles) == ("hold=fill:0", ["values", "happens-before"])
    assert race.replay in race.text
    assert race.text in ran.output
    (missing,) = race.timeline.missing
    first, second = race.timeline.items[missing.first], race.timeline.items[missing.second]
    assert (first.title, first.code, first.hold) == ("aten::fill_.Scalar", "seed.fill_(5.0)  # the fill", "pending")
    assert second.node == "MulBackward0"
    assert first.line is not None
    assert race.excerpts[first.line][2] == (6, "    seed.fill_(5.0)  # the fill")
    check_chrome_trace(json.loads(path.read_text())["traceEvents"], race.timeline)


def test_workers_keep_their_races_side_by_side(tmp_path: Path) -> None:
    ran = new_suite(tmp_path, RACY).run("--results", "kept", "--count", "8", "-n", "2")
    assert ran.code == 1
    files = list((tmp_path / "kept" / "races").iterdir())
    assert 1 <= len(files) <= 2
    assert any(str(path.relative_to(tmp_path)) in ran.output for path in files)
    assert len(list(read_races(tmp_path / "kept", []))) == 1


def test_a_folder_that_takes_no_timeline_fails_no_test(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "races").write_text("a file where a folder should be")
    ran = new_suite(tmp_path, RACY).run("--results", "kept")
    assert ran.code == 1
    assert "race: a wrong value and an unordered access" in ran.output
    assert "ui.perfetto.dev" not in ran.output
    assert "warning: a timeline could not be written to " in ran.output


def test_a_file_that_is_no_kept_race_is_skipped_and_said(tmp_path: Path) -> None:
    folder = tmp_path / "races"
    folder.mkdir()
    (folder / "torn.trace.json").write_text('{"traceEvents": [')
    (folder / "foreign.trace.json").write_text('{"traceEvents": []}')
    (folder / "list.trace.json").write_text("[]")
    problems: list[str] = []
    assert list(read_races(tmp_path, problems)) == []
    assert [os.path.basename(problem.split(" ")[0]) for problem in problems] == [
        "foreign.trace.json",
        "list.trace.json",
        "torn.trace.json",
    ]
