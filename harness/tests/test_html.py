"""The HTML report: complete, of one piece, and safe whatever the cases, streams and files are called."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

import pytest

from harness.campaign.reader import find_runs
from harness.campaign.store import CaseDefinition, RepetitionRecord, ResultWriter, case_key
from harness.judge.happens_before import find_races
from harness.observe.trace import Access, Free, HostAccess, HostSync, Launch, Record, SourceLine, Trace, Wait
from harness.perturb.load.load import LoadReport
from harness.perturb.plan import LaunchId
from harness.report.drawing import MOST_BOXES, draw
from harness.report.html import Report, duration, to_html, write_html
from harness.report.races import FOLDER, KeptRace
from harness.report.rates import MOST_SPANS, Rates
from harness.report.timeline import Timeline
from harness.tests.suite_runner import CONTROL, RACY, SAFE, new_suite

EVIL = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>&amp;"
_VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """A parsed report; a tag that is closed wrongly is an error."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.classes: Counter[str] = Counter()
        self.words = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.classes.update(dict(attrs).get("class", "").split())  # type: ignore[union-attr]
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self._open or self._open[-1] != "style":
            self.words += data

    def named(self, name: str) -> list[str]:
        return [value for _, attribute, value in self.attributes if attribute == name]


def check_page(text: str) -> Page:
    """It is of one piece, runs nothing, and its links lead somewhere."""
    page = Page(text)
    assert not {"script", "link", "iframe", "object", "embed", "img"} & set(page.tags)
    assert not page.named("src")
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    anchors = set(page.named("id"))
    assert len(anchors) == len(page.named("id"))
    for link in page.named("href"):
        assert link.startswith("#")
        assert link[1:] in anchors
    styles = "".join(re.findall(r"<style>(.*?)</style>", text, re.DOTALL)) + "".join(page.named("style"))
    assert "url(" not in styles
    assert "@import" not in styles
    assert "prefers-color-scheme: dark" in styles
    assert "default-src 'none'" in text
    return page


def launch(stream: str, index: int, *accesses: Access, line: SourceLine | None = None) -> Launch:
    return Launch(LaunchId(stream, index), "aten::mul.Tensor", None, line, accesses)


WRITE, READ = Access(0, 0, 64, True), Access(0, 0, 64, False)


def race_of(trace: Trace, nodeid: str = "test_x.py::test_x", **changes: object) -> KeptRace:
    timeline = Timeline.of(trace, find_races(trace))
    race = KeptRace(
        f"{case_key(nodeid)}-3",
        nodeid,
        3,
        "hold=fill:0",
        "a device",
        "a reason",
        ["values", "happens-before"],
        ["observation 0: expected 15.0, got nan"],
        "no wait was issued",
        None,
        f"python -m pytest {nodeid}",
        "race: as pytest shows it",
        timeline,
    )
    return dataclasses.replace(race, **changes)  # type: ignore[arg-type]


UNORDERED: Trace = [launch("fill", 0, WRITE), launch("ambient", 0, READ)]


def written(folder: Path, nodeid: str = "test_x.py::test_x", verdicts: str = "ppr", **definition: object) -> Path:
    """A run with these verdicts, by their first letters."""
    folder.mkdir(exist_ok=True)
    writer = ResultWriter(folder, f"gw{case_key(nodeid)}", {"session": "one", "device": "sim", "torch": "2.13"})
    writer.define(CaseDefinition(nodeid, 2, 5, 2, **definition))  # type: ignore[arg-type]
    names = {"p": "pass", "r": "race", "t": "timeout", "i": "infra", "n": "inconclusive"}
    for number, letter in enumerate(verdicts):
        message = "" if letter == "p" else f"message {letter}"
        writer.write(RepetitionRecord(nodeid, number, "baseline", names[letter], 1e5, message=message))
    writer.close()
    return folder


def keep(folder: Path, race: KeptRace) -> None:
    (folder / FOLDER).mkdir(exist_ok=True)
    (folder / FOLDER / f"{race.id}.trace.json").write_text(json.dumps(race.to_json()))


def html_of(folder: Path) -> str:
    return to_html(Report.of(find_runs([folder])), folder)


# The page.


def test_a_run_becomes_one_page_that_shows_every_case_and_race(tmp_path: Path) -> None:
    control = CONTROL.replace("test_unordered", "test_control")
    evil = """
import pytest

@pytest.mark.parametrize("name", ["<script>alert(1)</script>"])
def test_named(lab, name):
    test_ordered(lab)
"""
    suite = new_suite(tmp_path, SAFE + RACY + control + evil)
    assert suite.run("--results", "kept", "--count", "30", "--load", "host").code == 1
    done = subprocess.run(
        [sys.executable, "-m", "harness", "report", "kept"],
        cwd=tmp_path,
        env=suite.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "kept/report.html\n"), done.stderr
    page = check_page((tmp_path / "kept" / "report.html").read_text())
    assert "1 of 3 safe cases raced" in page.words
    assert "1 of 1 control was seen to race." in page.words
    for name in ("test_ordered", "test_unordered", "test_control", "test_named[<script>alert(1)</script>]"):
        assert page.named("id").count(f"case-{case_key(f'test_written.py::{name}')}") == 1
        assert name in page.words
    assert "missing wait" in page.words
    assert "seed.fill_(5.0)  # the fill" in page.words
    assert "python -m pytest test_written.py::test_unordered --device sim" in page.words
    assert "races/test_unordered-" in page.words
    assert "Rate over time" in page.words
    assert "cores alone" in page.words
    assert (page.classes["race"], page.classes["timeline"]) == (1, 1)


def test_what_others_named_is_text(tmp_path: Path) -> None:
    line = SourceLine(f"/{EVIL}.py", 1)
    trace: Trace = [launch(EVIL, 0, WRITE, line=line), launch("ambient", 0, READ)]
    nodeid = f"test_x.py::test_x[{EVIL}]"
    folder = written(tmp_path / "run", nodeid)
    keep(folder, race_of(trace, nodeid, device=EVIL, text=EVIL, values=[EVIL], attribution=EVIL))
    (folder / "main.load.json").write_text(
        json.dumps([asdict(LoadReport(EVIL, 1.0, EVIL, 1.0, 2.0, 0.3, EVIL, EVIL, [(0.0, 0.5, 1.0)]))])
    )
    writer = ResultWriter(folder, "main", {"device": EVIL})
    writer.say({"environment": {"variables": {EVIL: EVIL}}})
    writer.close()
    page = check_page(html_of(folder))
    assert page.words.count(EVIL) > 10
    assert page.classes["timeline"] == 1
    assert page.classes["course"] == 1, "and the load is drawn over time"


def test_outcomes_say_what_was_expected(tmp_path: Path) -> None:
    written(tmp_path / "run", "test_x.py::test_safe", "pprt")
    written(tmp_path / "run", "test_x.py::test_control", "pr", control="Nothing orders them.")
    written(tmp_path / "run", "test_x.py::test_silent_control", "p", control="Nothing orders them.")
    written(tmp_path / "run", "test_x.py::test_lost", "pin")
    words = check_page(html_of(tmp_path / "run")).words
    for sentence in ("forbidden", "required", "no evidence", "raced, as it must", "did not race", "repetitions lost"):
        assert sentence in words
    assert "message t" in words
    assert "1 of 2 controls was seen to race." in words


def test_files_with_something_to_look_at_come_first(tmp_path: Path) -> None:
    written(tmp_path / "run", "test_a.py::test_fine", "pp")
    written(tmp_path / "run", "test_b.py::test_raced", "pr")
    words = check_page(html_of(tmp_path / "run")).words
    assert words.index("test_b.py") < words.index("test_a.py")


def test_a_fault_of_purpose_is_said(tmp_path: Path) -> None:
    assert new_suite(tmp_path).run("--leave-out", "wait@ambient:0/user", "--results", "kept").code == 1
    words = check_page(html_of(tmp_path / "kept")).words
    assert "wait@ambient:0/user was left out on purpose, in every repetition." in words
    assert "left out wait@ambient:0/user, on purpose" in words


def test_runs_without_a_race_say_so(tmp_path: Path) -> None:
    page = check_page(html_of(written(tmp_path / "run", verdicts="pp")))
    assert "No safe case raced" in page.words
    assert "No control ran, so nothing shows that this run could have seen a race." in page.words
    assert not page.classes["race"]


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    folder = written(tmp_path / "run")
    (folder / "torn.jsonl").write_text("?\n")
    (folder / "main.load.json").write_text("[")
    (folder / "twins.json").write_text("{}")
    (folder / FOLDER).mkdir()
    (folder / FOLDER / "torn.trace.json").write_text("{")
    words = check_page(html_of(folder)).words
    for name in ("torn.jsonl", "main.load.json", "twins.json", "torn.trace.json"):
        assert str(folder / name) in words or str(folder / FOLDER / name) in words


def test_twins_are_shown_with_their_kill_rate(tmp_path: Path) -> None:
    assert new_suite(tmp_path).run("--twins", "--results", "kept").code in (0, 1)
    words = check_page(html_of(tmp_path / "kept")).words
    assert "Kill rate" in words
    assert re.search(r"by values\s*\d+\.\d%", words)


def test_a_wrong_value_with_every_access_ordered_is_drawn_too(tmp_path: Path) -> None:
    trace: Trace = [launch("fill", 0, WRITE), Record("fill", 0), Wait("ambient", 0), launch("ambient", 0, READ)]
    folder = written(tmp_path / "run")
    keep(folder, race_of(trace, disagreement="a value is wrong, but happens-before finds every access ordered."))
    page = check_page(html_of(folder))
    assert page.classes["timeline"] == 1
    assert "happens-before finds every access ordered" in page.words


def test_a_file_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    from harness.errors import UsageError

    with pytest.raises(UsageError, match="name another file"):
        write_html(tmp_path / "none" / "report.html", Report())


# The drawing.


FREED: Trace = [launch("owner", 0, WRITE), launch("user", 0, READ), Free(0, 0, 64, "owner", (), None)]
HOST: Trace = [launch("copy", 0, WRITE), HostAccess("aten::add", None, None, (READ,)), HostSync("copy", None)]


@pytest.mark.parametrize(
    ("trace", "cure", "roles"),
    [
        (UNORDERED, "wait", ("1st: writes", "2nd: reads")),
        ([launch("a", 0, READ), launch("b", 0, WRITE)], "wait", ("1st: reads", "2nd: writes")),
        (HOST, "synchronize", ("1st: writes", "2nd: reads")),
        (FREED[1:], "record_stream", ("1st: reads", "2nd: frees")),
    ],
)
def test_a_drawing_names_what_is_missing_and_the_order(trace: Trace, cure: str, roles: tuple[str, str]) -> None:
    page = Page(draw(Timeline.of(trace, find_races(trace))))
    assert f"missing {cure}" in page.words
    assert all(role in page.words for role in roles)
    assert (page.classes["missing"], page.classes["racing"]) == (1, 2)
    assert page.named("role") == ["img"]


def test_a_drawing_shows_the_waits_that_were_issued() -> None:
    trace: Trace = [launch("a", 0), Record("a", 0), Wait("b", 0), launch("b", 0, WRITE), launch("a", 1, READ)]
    page = Page(draw(Timeline.of(trace, find_races(trace))))
    assert (page.classes["order"], page.classes["missing"]) == (1, 1)


def test_the_missing_arrow_goes_from_the_first_to_the_second_lane() -> None:
    text = draw(Timeline.of(UNORDERED, find_races(UNORDERED)))
    match = re.search(r'class="missing" d="M([\d.]+) ([\d.]+)H([\d.]+)"', text)
    assert match is not None
    assert float(match[1]) < float(match[3])
    x = [float(each) for each in re.findall(r'<line class="lane" x1="([\d.]+)"', text)]
    assert float(match[1]) == x[0]
    assert x[0] < float(match[3]) < x[1]


def test_long_repetitions_are_cut_around_the_race() -> None:
    trace: Trace = [launch("a", number) for number in range(500)]
    trace += [launch("a", 500, WRITE), launch("b", 0, READ)]
    trace += [launch("b", number) for number in range(1, 500)]
    page = Page(draw(Timeline.of(trace, find_races(trace))))
    assert 2 < page.classes["box"] <= MOST_BOXES + 2
    assert page.classes["racing"] == 2
    hidden = [int(number) for number in re.findall(r"(\d+) more launches", page.words)]
    assert sum(hidden) + page.classes["box"] == len(trace)


def test_a_drawing_of_its_own_brings_its_style() -> None:
    text = draw(Timeline.of(UNORDERED, find_races(UNORDERED)), standalone=True)
    assert text.startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    assert "<style>" in text


# Rates.


def test_rates_are_cut_into_a_bounded_number_of_spans() -> None:
    def record(at_s: float, verdict: str = "pass", control: bool = False) -> RepetitionRecord:
        return RepetitionRecord("n", 0, "baseline", verdict, 1.0, ended_s=at_s, control=control)

    records = [record(1000.0 + number / 10) for number in range(50_000)]
    records += [record(1000.0, "race"), record(1000.0, "race", control=True)]
    rates = Rates.of(records)
    assert len(rates.spans()) <= MOST_SPANS
    assert sum(span.repetitions for span in rates.spans()) == len(records)
    assert [span.races for span in rates.spans()] == [1] + [0] * (len(rates.spans()) - 1)
    assert Rates.of([dataclasses.replace(records[0], ended_s=None)]).spans() == []


def test_durations_have_units() -> None:
    assert [duration(seconds) for seconds in (0.5, 40, 600, 36000)] == ["0.5 s", "40 s", "10 min", "10.0 h"]
