"""What a run says at its end, and how far it is meanwhile."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from harness.campaign.options import Options
from harness.campaign.result import CaseResult
from harness.campaign.store import RepetitionRecord, ResultWriter
from harness.judge.verdict import Verdict
from harness.perturb.load.load import LoadReport
from harness.perturb.plan import LaunchId, Plan
from harness.report import progress as progress_module
from harness.report.progress import Progress, Tail, Ticker
from harness.report.summary import conclusions, write_summary
from harness.report.tables import LOG_WIDTH, add_by_file, new_table, rendered, width_for

SIMULATOR = Options(device="sim")
GPU = Options(device="cuda")
SINGLES = ["hold=fill:0", "hold=fill:1"]
NO_CONTROL = "No control ran, so nothing shows that this run could have seen a race."


def case(
    nodeid: str = "test_x.py::test_x",
    *,
    passed: int = 1,
    plans: Sequence[str] = ("baseline", *SINGLES),
    raced: int = 0,
    inconclusive: int = 0,
    control: str | None = None,
    defect: bool = False,
    aimed: bool = False,
) -> CaseResult:
    """Counts of a body of two launches: each plan passed so often; some further repetitions did not pass."""
    result = CaseResult(nodeid, control=control, defect=defect, launches=2, cycle_length=5)
    ended = [(plan, Verdict.PASS) for _ in range(passed) for plan in plans]
    ended += [("hold=fill:0", Verdict.RACE)] * raced + [("hold=fill:0", Verdict.INCONCLUSIVE)] * inconclusive
    for number, (plan, verdict) in enumerate(ended):
        by = ["values"] if verdict is Verdict.RACE else []
        aim = aimed and plan == "hold=fill:0"
        result.add(RepetitionRecord(nodeid, number, plan, verdict.value, 1.0, aimed=aim, raced_by=by))
    return result


def sentences(*results: CaseResult, options: Options = SIMULATOR, loads=(), elapsed_s: float = 2.0) -> list[str]:
    return conclusions(results, options, loads, elapsed_s)


# The sentences.


def test_repetitions_are_counted_with_their_rate():
    first, *_ = sentences(case(passed=1000), case(passed=400))
    assert first == "4,200 repetitions in 2 s (2,100 a second)."
    assert sentences(elapsed_s=0.0)[0] == "0 repetitions in 0 s (0 a second)."


def test_on_the_simulator_the_plans_are_the_evidence():
    assert sentences(case(passed=3), case(passed=2))[1:] == [
        "2 of 2 safe cases never raced. Each launch was held alone at least 2 times, which covers every race of a "
        "single pair of accesses; more repetitions add sets of held launches.",
        NO_CONTROL,
    ]
    assert "Each launch was held alone at least once, which" in sentences(case())[1]


def test_on_the_simulator_a_launch_that_was_never_held_proves_nothing():
    (_, second, _) = sentences(case(passed=9), case(passed=9, plans=("baseline", "hold=fill:1")))
    assert second == (
        "2 of 2 safe cases never raced. Not every launch was held: a whole cycle of plans takes more repetitions."
    )


def test_on_a_real_device_the_evidence_is_a_bound_for_the_thinnest_plan():
    (_, second, _) = sentences(case(passed=500), case(passed=2000), options=GPU)
    assert second == (
        "2 of 2 safe cases never raced. Each plan ran at least 500 times: a race that it shows in 0.6% of repetitions "
        "or more would have been seen (one-sided 95 % Clopper-Pearson)."
    )


def test_one_plan_for_all_repetitions_is_all_that_was_tried():
    options = Options(device="cuda", plan=Plan((LaunchId("fill", 0),)))
    (_, second, _) = sentences(case(passed=500, plans=["hold=fill:0"]), options=options)
    assert second == (
        "1 of 1 safe cases never raced. Every repetition ran under hold=fill:0, so nothing else was tried."
    )


@pytest.mark.parametrize("options", [SIMULATOR, GPU])
def test_a_safe_case_that_raced_leaves_no_bound(options):
    assert sentences(case(), case(raced=2), case(), options=options)[1:] == [
        "2 of 3 safe cases never raced.",
        NO_CONTROL,
    ]


def test_controls_show_that_a_race_could_be_seen():
    control = case(passed=2, plans=["hold=fill:0"], raced=1200, control="Nothing orders them.", aimed=True)
    unseen = case(passed=3, plans=["hold=fill:0"], control="Nothing orders them.", aimed=True)
    assert sentences(control, unseen)[1:] == [
        "1 of 2 controls were seen to race, in 1,200 of the 1,205 repetitions aimed at the racing access."
    ]


def test_a_run_that_aims_no_repetition_does_not_count_those_it_aimed():
    sentence = "1 of 1 controls were seen to race, and no repetition was aimed at the racing access."
    assert sentence in sentences(case(raced=1, control="Nothing orders them."))


def test_known_defects_are_listed_apart_with_their_reports():
    first = case(plans=["hold=fill:0"], raced=5, control="docs/a.md", defect=True, aimed=True)
    second = case(plans=["hold=fill:0"], raced=5, control="docs/b.md", defect=True, aimed=True)
    control = case(raced=2, control="Nothing orders them.")
    seen = "2 of 2 cases of known defects of PyTorch were seen to race, in 10 of the 12 repetitions aimed at the racing"
    assert sentences(first, second, first)[1].startswith("3 of 3 cases of known defects")
    assert sentences(first, second)[1:] == [f"{seen} access: docs/a.md, docs/b.md."]
    assert [sentence[:18] for sentence in sentences(first, control)[1:]] == ["1 of 1 controls we", "1 of 1 cases of kn"]


def test_a_race_of_a_control_is_none_of_a_safe_case():
    assert sentences(case(), case(raced=2, control="Nothing orders them."))[1].startswith("1 of 1 safe cases never")


def test_a_case_that_never_ran_is_no_safe_case():
    assert sentences(CaseResult("test_x.py::test_x")) == ["0 repetitions in 2 s (0 a second).", NO_CONTROL]


def test_inconclusive_repetitions_are_admitted():
    assert sentences(case(inconclusive=1500), case(inconclusive=2))[-1] == (
        "1,502 repetitions were inconclusive: a hold did not take effect."
    )
    assert sentences(case(inconclusive=1))[-1] == "1 repetition was inconclusive: a hold did not take effect."
    assert not any("inconclusive" in sentence for sentence in sentences(case()))


def test_each_load_says_what_it_achieved():
    loads = [
        LoadReport("compute", 1.0, "FLOP/s", 45.04e12, 50e12, 0.5, worker="gw0", information="1,980 MHz"),
        LoadReport("compute", 1.0, "FLOP/s", 40e12, 50e12, 0.5, worker="gw1"),
        LoadReport("alloc", 0.5, "allocations/s", 212_000.4, 250_000.0, 0.5, worker="gw0"),
        LoadReport("host", 1.0, "cores", 1.5, 2.0, 0.25, worker="gw0"),
        LoadReport("h2d", 1.0, "B/s", 512.0, 51.2e9, 0.5, worker="gw0"),
        LoadReport("d2h", 1.0, "B/s", None, 51.2e9, 0.5, worker="gw0"),
    ]
    assert sentences(case(), options=GPU, loads=loads)[-8:] == [
        "Load compute: 40.0 TFLOP/s beside the cases, 50.0 TFLOP/s alone (80%) in gw1, the least of 2 processes.",
        "Load alloc:0.5: 212,000 allocations/s beside the cases, 250,000 allocations/s alone (85%).",
        "Load host: 1.50 cores beside the cases, 2.00 cores alone (75%).",
        "Load h2d: 512.0 B/s beside the cases, 51.2 GB/s alone (0%).",
        "Load d2h: ran too briefly to tell what it achieved, so give it more repetitions.",
        "The GPU under load, at the end: 1,980 MHz.",
        "The load h2d was not delivered, which takes 50% of what it achieves alone: this run proves nothing about "
        "cases under that load.",
        "The load d2h was not delivered, which takes 50% of what it achieves alone: this run proves nothing about "
        "cases under that load.",
    ]


# The table.


class Reporter:
    """Where pytest would print."""

    def __init__(self, verbosity: int, width: int = LOG_WIDTH) -> None:
        self.verbosity = verbosity
        self.written = io.StringIO()
        self._tw = SimpleNamespace(fullwidth=width, hasmarkup=False)

    def write_sep(self, mark: str, title: str) -> None:
        self.written.write(f"{mark} {title}\n")

    def write_line(self, line: str) -> None:
        self.write(f"{line}\n")

    def write(self, text: str) -> None:
        self.written.write(text)


def table(*results: CaseResult, options: Options = SIMULATOR, verbosity: int = 0) -> list[str]:
    """The lines that are written for these results, without the blanks that pad and part them."""
    reporter = Reporter(verbosity)
    write_summary(reporter, {result.nodeid: result for result in results}, options, [], 2.0)  # type: ignore[arg-type]
    return [" ".join(line.split()) for line in reporter.written.getvalue().splitlines() if line.strip(" ─")]


VARIANTS = [case("test_b.py::test_x[1]", passed=2), case("test_b.py::test_x[2]"), case("test_a.py::test_y")]


def test_without_v_a_function_has_one_line():
    assert table(*VARIANTS)[:6] == [
        "= sidestream: 3 cases on sim, seed 0",
        "test cases repetitions plans verdicts each launch held",
        "test_a.py",
        "test_y 1 3 3 pass 3 at least once",
        "test_b.py",
        "test_x 2 9 6 pass 9 at least once",
    ]


def test_with_v_each_case_has_its_own():
    assert table(*VARIANTS, verbosity=1)[4:7] == [
        "test_b.py",
        "test_x[1] 1 6 3 pass 6 at least 2 times",
        "test_x[2] 1 3 3 pass 3 at least once",
    ]


def test_on_a_real_device_the_table_has_race_rates():
    lines = table(
        case("test_a.py::test_clean", passed=500),
        case("test_a.py::test_raced", passed=1, raced=1),
        CaseResult("test_a.py::test_nothing"),
        options=GPU,
    )
    assert lines[1].endswith("verdicts race rate")
    assert lines[3:6] == [
        "test_clean 1 1,500 3 pass 1,500 < 0.60% a plan",
        "test_nothing 1 0 0 -",
        "test_raced 1 4 3 pass 3, race 1 25.0% seen",
    ]


def test_verdicts_are_counted_and_controls_marked():
    lines = table(
        case("test_a.py::test_x", raced=2, inconclusive=1, control="Nothing orders them."),
        case("test_a.py::test_y", plans=["baseline"], passed=1200),
    )
    assert "pass 3, race 2, inconclusive 1 (control)" in lines[3]
    assert lines[4] == "test_y 1 1,200 1 pass 1,200 not each"


def test_the_table_is_wide_enough_for_long_names_and_ends_with_the_sentences():
    nodeid = f"test_a.py::test_{'long_' * 10}name[a-b]"
    lines = table(case(nodeid), verbosity=1)
    assert lines[3].split()[0] == nodeid.partition("::")[2]
    assert lines[4:] == sentences(case(nodeid))


@pytest.mark.parametrize("width", [40, 80, 100, 150])
def test_nothing_of_a_table_is_cut_in_a_narrow_terminal(width: int) -> None:
    made = new_table(["case", "load"], ["repetitions", "verdicts", "single", "kill rate"])
    file = None
    for number in range(3):
        nodeid = f"suites/test_a.py::test_that_is_called_{'long_' * 12}{number}[a-b]"
        cells = ("compute", "1,200", "pass 1,190, race 10 (control)", "8/8 68.77% to 100.00%", "100.0%")
        file = add_by_file(made, nodeid, file, cells, "")
    made.add_row("not_reached", "none", "nothing")
    lines = rendered([made, "A sentence."], width, colour=False)
    assert max(map(len, lines)) <= width and lines[-1] == "A sentence."
    text = "".join(lines).replace(" ", "")
    for number in range(3):
        assert text.count(f"test_that_is_called_{'long_' * 12}{number}[a-b]") == 1
    for cell in ("suites/test_a.py", "repetitions", "not_reached"):
        assert text.count(cell) == 1
    words = " ".join(lines).split()
    for word in ("1,200", "1,190,", "(control)", "68.77%", "100.00%", "100.0%"):
        assert words.count(word) == 3 or width == 40, (word, words)


def test_a_table_that_fits_has_a_line_a_row() -> None:
    made = new_table(["issuer", "synchronization"], ["twins"])
    made.add_row("InputBuffer::add", "wait", "7")
    fits, stacked = ([line.split() for line in rendered([made], width, colour=False) if line] for width in (80, 25))
    assert fits[-1] == ["InputBuffer::add", "wait", "7"]
    assert stacked[-2:] == [["InputBuffer::add", "wait"], ["7"]]


def test_a_file_gets_wide_lines_unless_columns_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert (width_for(80, is_terminal=False), width_for(80, is_terminal=True)) == (LOG_WIDTH, 80)
    monkeypatch.setenv("COLUMNS", "80")
    assert width_for(80, is_terminal=False) == 80


# Progress.


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(progress_module, "time", clock)
    return clock


def test_progress_speaks_now_and_then(clock):
    said: list[str] = []
    progress = Progress(said.append, 30.0)
    for _ in range(59):
        clock.now += 1.0
        progress.repetition()
    assert said == ["30 repetitions, 1 a second"]
    clock.now += 1.0
    progress.repetition()
    assert said[1:] == ["60 repetitions, 1 a second"]


def test_progress_with_a_known_total_says_how_long_it_takes(clock):
    said: list[str] = []
    progress = Progress(said.append, 5.0)
    progress.total = 10_000
    clock.now = 110.0
    progress.update(2_500)
    clock.now = 120.0
    progress.update(12_000)
    assert said == [
        "2,500 of 10,000 repetitions, 250 a second, 30 s to go",
        "12,000 of 10,000 repetitions, 600 a second, 0 s to go",
    ]


def test_progress_is_silent_before_the_first_repetition(clock):
    said: list[str] = []
    progress = Progress(said.append, 5.0)
    clock.now = 500.0
    progress.update(0)
    assert not said
    progress.update(1)
    assert len(said) == 1


def test_repetitions_are_counted_in_the_result_files_as_they_grow(tmp_path):
    tail = Tail(tmp_path)
    assert tail.lines() == 0
    writers = [ResultWriter(tmp_path, name, {"device": "sim"}) for name in ("gw0", "gw1")]
    assert tail.lines() == 0, "headers are no repetitions"
    for total, writer in enumerate((writers[0], writers[0], writers[1]), 1):
        writer.write(RepetitionRecord("test_x.py::test_x", total, "baseline", "pass", 1.0))
        assert tail.lines() == total
    assert tail.lines() == 3
    ResultWriter(tmp_path, "gw2", {"device": "sim"}).close()
    assert tail.lines() == 3
    for writer in writers:
        writer.close()


def test_a_file_without_its_header_yet_takes_nothing_away(tmp_path):
    (tmp_path / "gw0.jsonl").touch()
    tail = Tail(tmp_path)
    assert tail.lines() == 0
    (tmp_path / "gw0.jsonl").write_text('{"header":{}}\n{"k":1}\n{"k":1}\n')
    assert tail.lines() == 2


def test_a_ticker_ticks_until_it_is_stopped():
    ticks: list[float] = []
    ticked = threading.Event()

    def tick() -> None:
        ticks.append(time.monotonic())
        if len(ticks) == 3:
            ticked.set()

    ticker = Ticker(tick, 0.001)
    assert ticked.wait(10)
    ticker.stop()
    count = len(ticks)
    assert "sidestream-progress" not in {thread.name for thread in threading.enumerate()}
    time.sleep(0.01)
    assert len(ticks) == count
