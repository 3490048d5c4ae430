"""The result store: nothing written is lost, and a failing disk never fails a test."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from harness.campaign import run_directory
from harness.campaign.reader import find_runs, read_run
from harness.campaign.run_directory import KEPT_RUNS, last_run_directory, new_run_directory, resumed_run_directory
from harness.campaign.store import SCHEMA, CaseDefinition, InFlight, RepetitionRecord, ResultWriter, case_key
from harness.errors import UsageError
from harness.tests.suite_runner import REPOSITORY

NODEID = "suites/test_seed_gradient.py::test_seed_filled_on_another_stream[wait_stream-backward-ambient]"


def record(repetition: int = 0, verdict: str = "pass", **fields: object) -> RepetitionRecord:
    return RepetitionRecord(NODEID, repetition, "hold=fill:0", verdict, 812.0, **fields)  # type: ignore[arg-type]


def full_record() -> RepetitionRecord:
    return RepetitionRecord(
        NODEID,
        3,
        "hold=ambient:3,fill:0",
        "race",
        1812.0,
        True,
        ["values", "happens-before"],
        "pending,forced",
        'Ä\n"wrong"',
    )


def written(directory: Path, *records: RepetitionRecord, worker: str = "main") -> ResultWriter:
    writer = ResultWriter(directory, worker, {"device": "sim", "seed": 0})
    for one in records:
        writer.write(one)
    return writer


def numbers(directory: Path) -> list[int]:
    return [one.repetition for one in read_run(directory)]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    records = [record(), full_record()]
    writer = written(tmp_path, *records)
    writer.close()
    for one in records:
        one.worker = "main"
    run = read_run(tmp_path)
    assert list(run) == records
    assert run.headers == {"main": {"schema": SCHEMA, "device": "sim", "seed": 0}}
    assert (run.problems, run.in_flight) == ([], [])
    assert (writer.records, writer.lost, writer.failure) == (2, 0, None)


def test_keys_are_the_documented_ones(tmp_path: Path) -> None:
    written(tmp_path, record(holds="pending"), full_record()).close()
    lines = [json.loads(line) for line in (tmp_path / "main.jsonl").read_text().splitlines()]
    assert list(lines[1]) == ["case", "n", "oracles", "t"]
    assert list(lines[2]) == ["k", "r", "p", "us"]
    assert list(lines[3]) == ["k", "r", "p", "us", "v", "a", "by", "h", "m"]
    written(tmp_path, record(adaptive=True, fresh=True), worker="gw0").close()
    keys = {*json.loads((tmp_path / "gw0.jsonl").read_text().splitlines()[2]), *lines[3]}
    keys |= CaseDefinition("n", 1, 1, 2, "unsafe", True).to_json().keys()
    documented = set(re.findall(r"^\| `(\w+)`", (REPOSITORY / "docs" / "results.md").read_text(), re.MULTILINE))
    assert keys <= documented


def test_repetitions_are_told_when_they_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.campaign.store.time.time", lambda: 1000.0)
    written(tmp_path, record(0), record(1)).close()
    duration_s = record(0).duration_us * 1e-6
    assert [one.ended_s for one in read_run(tmp_path)] == pytest.approx([1000.0 + duration_s, 1000.0 + 2 * duration_s])


def test_properties_read_to_the_end_first(tmp_path: Path) -> None:
    written(tmp_path, record()).close()
    assert read_run(tmp_path).headers == {"main": {"schema": SCHEMA, "device": "sim", "seed": 0}}
    (tmp_path / "main.jsonl").write_text("?\n")
    assert len(read_run(tmp_path).problems) == 1
    (tmp_path / "main.now").write_text(json.dumps({"n": "case", "r": 1, "p": "baseline"}))
    assert len(read_run(tmp_path).in_flight) == 1


def test_each_worker_has_its_file(tmp_path: Path) -> None:
    for number, worker in enumerate(("gw0", "gw1", "main")):
        written(tmp_path, record(number), worker=worker).close()
    assert [(one.worker, one.repetition) for one in read_run(tmp_path)] == [("gw0", 0), ("gw1", 1), ("main", 2)]


@pytest.mark.parametrize("cut", range(1, 25))
def test_cut_last_line_loses_only_itself(tmp_path: Path, cut: int) -> None:
    written(tmp_path, record(0), record(1)).close()
    path = tmp_path / "main.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    run = read_run(tmp_path)
    if cut == 1:
        # Only the end of the line is missing, so the record is whole.
        assert numbers(tmp_path) == [0, 1] and run.problems == []
    else:
        assert numbers(tmp_path) == [0]
        assert run.problems == [f"{path}: its last line is cut off; everything else was read."]


@pytest.mark.parametrize("garbage", ["?", "{}", "[]", "7", '"n"', '{"n":1', '{"header": 3}', "\x00\x00", "ÿ"])
def test_corrupt_line_loses_only_itself(tmp_path: Path, garbage: str) -> None:
    path = tmp_path / "main.jsonl"
    written(tmp_path, record(0)).close()
    with path.open("a", encoding="latin-1") as file:
        file.write(garbage + "\n")
    written(tmp_path, record(1)).close()
    run = read_run(tmp_path)
    assert numbers(tmp_path) == [0, 1]
    assert run.problems == [f"{path}: 1 unreadable line was skipped; everything else was read."]


def test_several_kinds_of_damage_are_one_sentence_a_file(tmp_path: Path) -> None:
    written(tmp_path, record(0)).close()
    path = tmp_path / "main.jsonl"
    path.write_bytes(b"?\n" + path.read_bytes() + b"!\n{")
    assert read_run(tmp_path).problems == [
        f"{path}: 2 unreadable lines were skipped and its last line is cut off; everything else was read."
    ]


def test_writer_of_the_same_name_continues_after_a_cut_line(tmp_path: Path) -> None:
    written(tmp_path, record(0), record(1)).close()
    path = tmp_path / "main.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    written(tmp_path, record(2)).close()
    assert numbers(tmp_path) == [0, 2]


def test_writing_appends_whatever_others_did(tmp_path: Path) -> None:
    one, other = written(tmp_path, record(0)), written(tmp_path, record(1))
    one.write(record(2))
    other.write(record(3))
    assert numbers(tmp_path) == [0, 1, 2, 3]


def test_one_write_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = written(tmp_path, record(0))
    writes: list[bytes] = []

    def count(descriptor: int, data: bytes) -> int:
        writes.append(data)
        return len(data)

    monkeypatch.setattr(os, "write", count)
    writer.write(record(1))
    assert len(writes) == 1 and writes[0].endswith(b"}\n")


def test_full_disk_keeps_counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = written(tmp_path, record(0))
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    writer.write(record(1))
    monkeypatch.setattr(
        os, "write", lambda descriptor, data: real(descriptor, data[:20]) if len(data) > 40 else full(0, b"")
    )
    writer.write(record(2))
    assert (writer.records, writer.lost) == (3, 2)
    assert (
        writer.failure is not None and "No space left on device" in writer.failure and str(tmp_path) in writer.failure
    )
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:20]))
    writer.write(record(3))
    monkeypatch.setattr(os, "write", real)
    writer.write(record(4))
    assert numbers(tmp_path) == [0, 3, 4]
    assert (writer.records, writer.lost) == (5, 2)


def test_real_full_disk(tmp_path: Path) -> None:
    if not os.access("/dev/full", os.W_OK):
        pytest.skip("no /dev/full here")
    (tmp_path / "main.jsonl").symlink_to("/dev/full")
    writer = written(tmp_path, record(0))
    writer.close()
    assert writer.lost == 1 and writer.failure is not None and "No space left" in writer.failure


def test_missing_directory_is_a_failure_and_no_error(tmp_path: Path) -> None:
    writer = written(tmp_path / "gone", record(0))
    writer.in_flight(NODEID, 1, "baseline")
    writer.clear_in_flight()
    writer.close()
    assert (writer.records, writer.lost) == (1, 1)
    assert writer.failure is not None and "No such file or directory" in writer.failure
    writer.write(record(1))
    assert (writer.records, writer.lost) == (2, 2)


def test_deleted_results_are_noticed(tmp_path: Path) -> None:
    writer = written(tmp_path, record(0))
    (tmp_path / "main.jsonl").unlink()
    writer.close()
    assert writer.lost == 1 and writer.failure is not None and "was deleted" in writer.failure


def test_in_flight(tmp_path: Path) -> None:
    writer = written(tmp_path, record(0))
    assert read_run(tmp_path).in_flight == []
    writer.in_flight(NODEID + "x" * 3000, 12345, "hold=" + ",".join(f"ambient:{index}" for index in range(99)))
    writer.in_flight(NODEID, 1, "baseline")
    flying = read_run(tmp_path).in_flight
    assert flying == [InFlight("main", NODEID, 1, "baseline")]
    assert str(flying[0]) == f"main died in {NODEID}, repetition 1 under baseline"
    writer.write(record(1))
    assert read_run(tmp_path).in_flight == [], "a repetition whose record is there has ended"
    writer.in_flight(NODEID, 2, "baseline")
    writer.clear_in_flight()
    assert read_run(tmp_path).in_flight == []
    writer.in_flight(NODEID, 3, "baseline")
    writer.close()
    assert read_run(tmp_path).in_flight == []


def test_garbage_in_flight_is_nothing(tmp_path: Path) -> None:
    written(tmp_path, record(0)).close()
    for garbage in ("", "?", "[]", '{"n": 1}', "\x00" * 512):
        (tmp_path / "main.now").write_text(garbage)
        assert read_run(tmp_path).in_flight == []


KILLED = f"""
import sys
from pathlib import Path
from harness.campaign.store import RepetitionRecord, ResultWriter
writer = ResultWriter(Path(sys.argv[1]), "gw0", {{}})
for number in range(10**9):
    writer.in_flight({NODEID!r}, number, "baseline")
    writer.write(RepetitionRecord({NODEID!r}, number, "baseline", "pass", 1.0))
    if number == 500:
        print("now", flush=True)
"""


def test_kill_loses_at_most_the_repetition_in_flight(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"now\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    run = read_run(tmp_path)
    found = [one.repetition for one in run]
    assert found == list(range(len(found))) and len(found) > 500
    now = json.loads((tmp_path / "gw0.now").read_text())["r"]
    assert now in (len(found) - 1, len(found)), "the file says which repetition was running"
    assert [flying.repetition for flying in run.in_flight] == ([now] if now == len(found) else [])


def test_reading_no_directory(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run directory"):
        read_run(tmp_path / "none")


def test_reading_is_lazy(tmp_path: Path) -> None:
    writer = written(tmp_path, record(0))
    records = iter(read_run(tmp_path))
    assert next(records).repetition == 0
    writer.write(record(1))
    assert [one.repetition for one in records] == [1]


def test_cost_of_a_record(tmp_path: Path) -> None:
    writer = written(tmp_path)
    one = record(aimed=True, holds="pending,pending")
    best = float("inf")
    for _ in range(20):
        begin = time.thread_time()
        for _ in range(100):
            writer.write(one)
        best = min(best, (time.thread_time() - begin) / 100)
    assert best < 15e-6


def test_a_passing_repetition_takes_few_bytes(tmp_path: Path) -> None:
    writer = written(tmp_path)
    for number in range(1000):
        writer.write(
            RepetitionRecord(
                NODEID, number, "hold=ambient:3,fill:0,default:12", "pass", 1234.5, holds=3 * "pending,"[:-1]
            )
        )
    writer.close()
    assert (tmp_path / "main.jsonl").stat().st_size < 200 * 1000


def test_what_holds_for_a_case_is_read_from_wherever_it_stands(tmp_path: Path) -> None:
    writer = written(tmp_path, worker="gw1")
    writer.define(CaseDefinition(NODEID, 7, 15, 2, "Nothing orders them.", True))
    writer.write(record(1, "race"))
    writer.close()
    line = json.dumps({"k": case_key(NODEID), "r": 0, "p": "baseline", "us": 5})
    header = json.dumps({"header": {"schema": SCHEMA, "session": "one", "loads": ["compute", "memory"]}})
    (tmp_path / "gw0.jsonl").write_text(f"{header}\n{line}\n")
    run = read_run(tmp_path)
    first, second = run
    assert (first.nodeid, first.verdict, first.control, first.defect) == (NODEID, "pass", True, True)
    assert (first.session, first.load, second.load) == ("one", "compute,memory", "")
    assert run.cases == {case_key(NODEID): CaseDefinition(NODEID, 7, 15, 2, "Nothing orders them.", True)}
    assert (first.id, run.problems) == (f"{case_key(NODEID)}-0", [])


def test_a_case_is_named_again_so_that_damage_takes_little_with_it(tmp_path: Path) -> None:
    written(tmp_path, *map(record, range(1000))).close()
    path = tmp_path / "main.jsonl"
    lines = path.read_text().splitlines()
    names = [number for number, line in enumerate(lines) if line.startswith('{"case"')]
    assert len(names) == 5
    path.write_text("\n".join(["?" if number == names[0] else line for number, line in enumerate(lines)]) + "\n")
    assert numbers(tmp_path) == list(range(1000))
    path.write_text("\n".join(["?" if number in names else line for number, line in enumerate(lines)]) + "\n")
    run = read_run(tmp_path)
    assert (list(run), len(run.problems)) == ([], 1)
    assert "1000 repetitions of cases that no line names were skipped" in run.problems[0]


@pytest.mark.parametrize("header", [{"schema": SCHEMA + 1}, {}])
def test_files_of_another_version_are_refused_with_a_sentence(tmp_path: Path, header: dict[str, int]) -> None:
    written(tmp_path, record(0), worker="gw0").close()
    lines = (tmp_path / "gw0.jsonl").read_text().splitlines()
    (tmp_path / "gw1.jsonl").write_text("\n".join([json.dumps({"header": header}), *lines[1:], '{"new": 1}']) + "\n")
    run = read_run(tmp_path)
    assert [one.worker for one in run] == ["gw0"]
    assert run.problems == [
        f"{tmp_path / 'gw1.jsonl'} is written in version {header.get('schema', 1)} of the result files, and this reads "
        f"version {SCHEMA}: read it with the version of Sidestream that wrote it."
    ]


def test_the_environment_is_a_line(tmp_path: Path) -> None:
    writer = written(tmp_path, record(0))
    writer.say({"environment": {"machine": "here"}})
    writer.write(record(1))
    assert (numbers(tmp_path), read_run(tmp_path).environments) == ([0, 1], [{"machine": "here"}])
    assert read_run(tmp_path).problems == []


def test_any_number_of_runs_of_any_machines_are_found(tmp_path: Path) -> None:
    for machine, run in (("one", "a"), ("one", "b"), ("other", "a")):
        folder = tmp_path / machine / "runs" / run
        folder.mkdir(parents=True)
        written(folder, record(0)).close()
    assert len(find_runs([tmp_path])) == 3
    assert [run.directory for run in find_runs([tmp_path / "one" / "runs" / "b", tmp_path / "other"])] == [
        tmp_path / "one" / "runs" / "b",
        tmp_path / "other" / "runs" / "a",
    ]
    with pytest.raises(UsageError, match="is no folder of results"):
        find_runs([tmp_path / "none"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds no results"):
        find_runs([tmp_path / "empty"])


# Run directories.


def test_the_run_to_go_on_with(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no run in"):
        last_run_directory(tmp_path)
    first, second, empty = (new_run_directory(tmp_path, print) for _ in range(3))
    for directory in (first, second):
        written(directory, record(0)).close()
    assert last_run_directory(tmp_path) == second
    assert resumed_run_directory(first) == first
    with pytest.raises(UsageError, match="holds no results, so there is nothing to resume"):
        resumed_run_directory(empty)


def test_run_directory(tmp_path: Path) -> None:
    directory = new_run_directory(tmp_path, print)
    assert directory.is_dir() and directory.parent == tmp_path / ".sidestream" / "runs"
    stamp, pid = directory.name.rsplit("-", 1)
    assert int(pid) == os.getpid() and time.strptime(stamp[:15], "%Y%m%dT%H%M%S")
    assert (tmp_path / ".sidestream" / ".gitignore").read_text() == "*\n"
    assert new_run_directory(tmp_path, print) != directory


def test_run_directories_of_the_same_moment_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moments = [datetime(2030, 1, 1, 12, 0, 0, microsecond, timezone.utc) for microsecond in (5, 5, 5, 6)]

    class Clock:
        @staticmethod
        def now(zone: timezone) -> datetime:
            return moments.pop(0)

    monkeypatch.setattr(run_directory, "datetime", Clock)
    made = [new_run_directory(tmp_path, print).name for _ in range(2)]
    assert made == [f"20300101T120000.{end}Z-{os.getpid()}" for end in ("000005", "000006")]


def test_only_the_last_runs_are_kept(tmp_path: Path) -> None:
    made = []
    for number in range(KEPT_RUNS + 3):
        directory = new_run_directory(tmp_path, print)
        written(directory, record(number)).close()
        for path in (*directory.iterdir(), directory):
            os.utime(path, (number, number))
        made.append(directory)
    # The oldest of all is still being written to, as a long run would be.
    os.utime(made[3] / "main.jsonl")
    (tmp_path / ".sidestream" / "runs" / "note.txt").write_text("not a run")
    newest = new_run_directory(tmp_path, print)
    kept = {path for path in newest.parent.iterdir() if path.is_dir()}
    assert kept == {made[3], *made[-(KEPT_RUNS - 2) :], newest} and len(kept) == KEPT_RUNS
    assert (newest.parent / "note.txt").exists()


def test_short_runs_push_out_no_long_one_and_what_is_deleted_is_said(tmp_path: Path) -> None:
    def ran(hour: int, minutes: float) -> Path:
        start = datetime(2030, 1, 1, hour, tzinfo=timezone.utc) + timedelta(seconds=next(second))
        run = tmp_path / ".sidestream" / "runs" / f"{start:%Y%m%dT%H%M%S.%fZ}-1"
        run.mkdir(parents=True)
        written(run, record(0)).close()
        for path in (*run.iterdir(), run):
            os.utime(path, (start.timestamp() + 60 * minutes,) * 2)
        return run

    second = itertools.count()
    long = [ran(1, 30.0) for _ in range(KEPT_RUNS + 1)]
    short = [ran(2, 9.0) for _ in range(KEPT_RUNS + 1)]
    said: list[str] = []
    newest = new_run_directory(tmp_path, said.append)
    assert set(newest.parent.iterdir()) == {*long[1:], *short[2:], newest}
    assert said == [
        f"Deleted 3 runs, {long[0].name} to {short[1].name}, from {newest.parent}: the last 20 are kept, and the last "
        "20 of 10 minutes or more. --results names a folder that stays."
    ]


def test_unwritable_root_is_a_usage_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(UsageError, match=r"results cannot be written under .*file/\.sidestream \(Not a directory\)"):
        new_run_directory(blocked, print)
    assert read_run(tmp_path).problems == []
