"""What the counts of a case mean for its test, and how a failed repetition reads."""

from __future__ import annotations

import dataclasses
import shlex
from types import SimpleNamespace

import pytest

from harness.campaign.case import Discovery
from harness.campaign.options import Options
from harness.campaign.repetition import Repetition
from harness.campaign.result import CaseResult
from harness.campaign.store import RepetitionRecord, repetition_id
from harness.exit_codes import ExitCode
from harness.judge.values import Mismatch
from harness.judge.verdict import NOT_HONOURED, UNKNOWN, Judgement, Verdict, judge
from harness.observe.holds import HoldOutcome, HoldState
from harness.observe.instrument import Recording
from harness.observe.trace import Access, Free, HostAccess, Launch, SourceLine, Trace
from harness.perturb.plan import LaunchId, Plan
from harness.report.failure import NOT_FLAKY, describe_failure, replay_command
from harness.report.outcome import Outcome, outcome_of

CASE = "test_x.py::test_x"
CLEAN = Outcome(ExitCode.CLEAN, None)
FILL, MUL = LaunchId("fill", 0), LaunchId("ambient", 0)


def result_of(verdicts: str, *, control: str | None = None, defect: bool = False, cycle_length: int = 2) -> CaseResult:
    """Counts: each letter is the first of a verdict, n standing for infra (i is inconclusive)."""
    letters = {"p": "pass", "r": "race", "t": "timeout", "n": "infra", "i": "inconclusive"}
    result = CaseResult(CASE, control=control, defect=defect, cycle_length=cycle_length)
    for number, letter in enumerate(verdicts):
        result.add(RepetitionRecord(CASE, number, "baseline", letters[letter], 1.0))
    return result


# Outcomes.


@pytest.mark.parametrize("verdicts", ["", "p", "pppp", "pi", "ppii"])
def test_what_is_as_it_should_be_says_nothing(verdicts):
    assert outcome_of(result_of(verdicts)) == CLEAN


@pytest.mark.parametrize(
    ("verdicts", "code", "text"),
    [
        ("ppr", ExitCode.RACE, "race: of 3 repetitions 1 raced"),
        ("r", ExitCode.RACE, "race: of 1 repetition 1 raced"),
        ("rrrr", ExitCode.RACE, "race: of 4 repetitions 4 raced"),
        ("ppt", ExitCode.RACE, "timeout: of 3 repetitions 1 timed out"),
        ("prtt", ExitCode.RACE, "race: of 4 repetitions 1 raced and 2 timed out"),
        ("rniii", ExitCode.RACE, "race: of 5 repetitions 1 raced"),
        ("tniii", ExitCode.RACE, "timeout: of 5 repetitions 1 timed out"),
        ("ppn", ExitCode.INFRASTRUCTURE, "1 repetition was lost to the machine"),
        ("niii", ExitCode.INFRASTRUCTURE, "1 repetition was lost to the machine"),
        ("pii", ExitCode.INCONCLUSIVE, "inconclusive: in 2 of 3 repetitions the hold did not take effect"),
        ("i", ExitCode.INCONCLUSIVE, "inconclusive: in 1 of 1 repetitions the hold did not take effect"),
    ],
)
def test_the_gravest_verdict_decides(verdicts, code, text):
    assert outcome_of(result_of(verdicts)) == Outcome(code, text)


@pytest.mark.parametrize("verdicts", ["", "rr", "prrp", "rpi"])
def test_a_control_that_raced_is_as_it_should_be(verdicts):
    assert outcome_of(result_of(verdicts, control="Nothing orders them.")) == CLEAN


@pytest.mark.parametrize(
    ("verdicts", "code", "text"),
    [
        ("rt", ExitCode.RACE, "timeout: of 2 repetitions 1 timed out"),
        ("rn", ExitCode.INFRASTRUCTURE, "1 repetition was lost to the machine"),
        ("rii", ExitCode.INCONCLUSIVE, "inconclusive: in 2 of 3 repetitions the hold did not take effect"),
        (
            "pp",
            ExitCode.RACE,
            f"this run could not have seen the race: {CASE} is a control, unsafe because\n  Nothing orders them.\n"
            "but none of its 2 repetitions raced.",
        ),
        (
            "rppp",
            ExitCode.RACE,
            f"this run could not have seen the race: {CASE} is a control, unsafe because\n  Nothing orders them.\n"
            "but 1 whole cycles of plans passed without a race, the first of them cycle 1.",
        ),
    ],
)
def test_a_control_fails_for_everything_but_its_race(verdicts, code, text):
    assert outcome_of(result_of(verdicts, control="Nothing orders them.")) == Outcome(code, text)


@pytest.mark.parametrize("verdicts", ["", "rr", "prrp", "rpi"])
def test_a_defect_that_is_seen_is_as_it_should_be(verdicts):
    assert outcome_of(result_of(verdicts, control="docs/defects/x.md", defect=True)) == CLEAN


def test_a_defect_that_is_not_seen_may_be_fixed_upstream():
    outcome = outcome_of(result_of("pppp", control="docs/defects/x.md", defect=True))
    assert outcome.exit_code is ExitCode.RACE
    assert outcome.text == (
        f"fixed upstream? {CASE} is registered as a defect of PyTorch, described in\n  docs/defects/x.md\nbut none of "
        "its 4 repetitions raced. If it is fixed in this version of torch, or on this kind of device, say so in the "
        "marker: the case is an ordinary safe one there."
    )


def test_a_defect_that_is_seen_too_rarely_is_not_fixed():
    outcome = outcome_of(result_of("rppp", control="docs/defects/x.md", defect=True))
    assert outcome.exit_code is ExitCode.RACE
    assert outcome.text == (
        f"this run could not have seen the race: {CASE} is registered as a defect of PyTorch, described in\n"
        "  docs/defects/x.md\nbut 1 whole cycles of plans passed without a race, the first of them cycle 1."
    )


def test_one_plan_for_all_repetitions_asks_a_control_for_nothing():
    assert outcome_of(result_of("pppp", control="Nothing orders them.", cycle_length=0)) == CLEAN


def test_each_cause_is_described_with_how_many_are_like_it():
    result = result_of("r" * 1503)
    for reason, times in (("common", 1501), ("twice", 2), ("rare", 1)):
        for _ in range(times):
            result.describe_failure(reason, f"the {reason} one")
    assert outcome_of(result).text == (
        "race: of 1,503 repetitions 1,503 raced\n\n"
        "the common one\n  (1,500 more repetitions like this one; the results folder has a line for each)\n\n"
        "the twice one\n  (1 more repetition like this one; the results folder has a line for each)\n\n"
        "the rare one"
    )


# The command that replays a repetition.


def repetition(judgement: Judgement, *holds: HoldOutcome, trace: Trace | None = None) -> Repetition:
    plan = Plan(tuple(hold.launch for hold in holds))
    return Repetition(4, plan, Recording(trace or [], list(holds)), judgement, 1.0)


PASSED = Judgement(Verdict.PASS, [], [], None, None)


@pytest.mark.parametrize(
    ("options", "command"),
    [
        (Options(), "--device sim --seed 0 --plan baseline"),
        (Options(device="cuda", seed=7, hold_ms=2.0), "--device cuda --seed 7 --plan baseline --hold-ms 2"),
        (Options(device="cuda", hold="gate"), "--device cuda --seed 0 --plan baseline --hold gate"),
        (
            Options(device="cuda", hold_ms=0.25, loads=("compute", "copy")),
            "--device cuda --seed 0 --plan baseline --hold-ms 0.25 --load compute,copy",
        ),
    ],
)
def test_the_replay_command_repeats_what_was_asked_for(options, command):
    assert replay_command(CASE, repetition(PASSED).plan, options) == f"python -m pytest {CASE} {command}"


@pytest.mark.parametrize("nodeid", [f"{CASE}[a b]", f"{CASE}['$HOME';]", f"{CASE}[a*]"])
def test_the_replay_command_survives_a_shell(nodeid):
    held = repetition(PASSED, HoldOutcome(FILL, HoldState.PENDING, None), HoldOutcome(MUL, HoldState.PENDING, None))
    words = shlex.split(replay_command(nodeid, held.plan, Options()))
    assert words[3] == nodeid
    assert words[-2:] == ["--plan", "hold=fill:0,ambient:0"]


# The description of a failed repetition.


def launch(launch_id: LaunchId, operation: str, node: str | None, *accesses: Access, line: int | None = None) -> Launch:
    return Launch(launch_id, operation, node, None if line is None else SourceLine("nowhere.py", line), accesses)


WRITE, READ = Access(0, 0, 1024, True), Access(0, 0, 1024, False)
TRACE: Trace = [launch(FILL, "aten::fill_", None, WRITE), launch(MUL, "aten::mul", "MulBackward0", READ)]
DISCOVERY = Discovery(
    {
        FILL: launch(FILL, "aten::fill_", None, WRITE, line=11),
        MUL: launch(MUL, "aten::mul", "MulBackward0", READ, line=13),
    },
    [Free(0, 0, 1024, "fill", (), SourceLine("nowhere.py", 19))],
    [HostAccess("aten::sum", None, SourceLine("nowhere.py", 21), (READ,))],
    frozenset(),
    oracles=2,
)
MISMATCH = Mismatch("observation 0", SourceLine("nowhere.py", 17), "poison", "15.0", "nan", (0,), 256, 256, 256)


def described(failed: Repetition, *, accesses: int = 1, device: str = "sim", hold: str = "sleep") -> list[str]:
    """The lines of the text; ``accesses`` by the host were known to the discovery, all on one line."""
    discovery = dataclasses.replace(DISCOVERY, host_accesses=DISCOVERY.host_accesses * accesses)
    case = SimpleNamespace(nodeid=CASE, discovery=discovery, fresh=False)
    return describe_failure(case, failed, Options(device=device, hold=hold, seed=7), "a GPU").splitlines()  # type: ignore[arg-type]


def test_a_repetition_is_described_by_both_oracles():
    judgement = judge(TRACE, [MISMATCH], [HoldState.PENDING])
    lines = described(repetition(judgement, HoldOutcome(FILL, HoldState.PENDING, None), trace=TRACE))
    assert lines[:5] == [
        "race: a wrong value and an unordered access",
        f"  case     {CASE}",
        "  device   a GPU",
        "  plan     hold=fill:0 (repetition 4, seed 7)",
        f"  id       {repetition_id(CASE, 4)}",
    ]
    assert lines[5] == f"  value    {MISMATCH}"
    assert lines[6].endswith("bytes 0 to 1024 of block 0")
    assert lines[7:9] == [
        "    first  aten::fill_ on fill:0, nowhere.py:11",
        "    second aten::mul on ambient:0 in MulBackward0 of the forward, nowhere.py:13",
    ]
    assert lines[9].startswith("    missing ")
    assert "the engine carries it on to its nodes" in lines[10]
    assert lines[11:] == [
        "  hold     fill:0 (aten::fill_): still pending when the body had been enqueued",
        "  cause    no wait was issued: PyTorch or the case left it out.",
        f"  replay   python -m pytest {CASE} --device sim --seed 7 --plan hold=fill:0",
        f"  {NOT_FLAKY}",
    ]


def test_a_free_without_order_names_its_owner():
    trace: Trace = [launch(MUL, "aten::mul", None, READ), Free(0, 0, 1024, "fill", (), None)]
    lines = described(repetition(judge(trace, [], []), trace=trace))
    assert lines[0] == "race: an unordered access"
    assert "    second free of the block, owned by fill, nowhere.py:19" in lines


def test_a_free_of_pinned_memory_names_no_owner():
    trace: Trace = [launch(MUL, "aten::copy_", None, READ), Free(0, 0, 1024, None, (), None)]
    lines = described(repetition(judge(trace, [], []), trace=trace))
    assert "    second free of the block, which is pinned memory" in lines


def test_the_host_s_accesses_have_lines_and_one_stands_for_its_line():
    read = HostAccess("aten::sum", None, None, (READ,))
    trace: Trace = [TRACE[0], read]
    lines = described(repetition(judge(trace, [], []), trace=trace))
    assert "    second aten::sum on the host, nowhere.py:21" in lines
    # Where the discovery knows another operator in this place, or none, the line is not known, and nothing is left out.
    trace = [TRACE[0], HostAccess("aten::mul", None, None, (READ,)), read, read._replace(node="MulBackward0")]
    lines = described(repetition(judge(trace, [], []), trace=trace))
    assert lines[0] == "race: 3 unordered accesses"
    assert [line.split(maxsplit=1)[1] for line in lines if line.startswith("    second ")] == [
        "aten::mul on the host",
        "aten::sum on the host",
        "aten::sum on the host in MulBackward0",
    ]
    lines = described(repetition(judge(trace[:1] + trace[2:], [], []), trace=trace[:1] + trace[2:]), accesses=2)
    assert lines.count("    second aten::sum on the host, nowhere.py:21") == 1
    assert "  and      1 further race is between the same launches and lines of the host" in lines


def test_several_races_are_counted_in_the_headline():
    other = LaunchId("third", 0)
    trace: Trace = [*TRACE, launch(other, "aten::add", None, READ)]
    assert described(repetition(judge(trace, [], []), trace=trace))[0] == "race: 2 unordered accesses"


def test_a_real_device_cannot_tell_whose_fault_it_is():
    lines = described(repetition(judge(None, [MISMATCH], [])))
    assert lines[0] == "race: a wrong value"
    assert f"  cause    {UNKNOWN}" in lines


def test_oracles_that_contradict_each_other_are_a_note():
    ordered: Trace = [TRACE[0]]
    lines = described(repetition(judge(ordered, [MISMATCH], []), trace=ordered))
    assert f"  cause    {NOT_HONOURED}" in lines
    assert "  note     a value is wrong, but happens-before finds every access ordered." in lines


def test_an_inconclusive_repetition_says_what_became_of_each_hold_and_accuses_nobody():
    holds = [
        HoldOutcome(FILL, HoldState.RAN, None),
        HoldOutcome(MUL, HoldState.FORCED, SourceLine("nowhere.py", 23)),
        HoldOutcome(LaunchId("fill", 9), HoldState.MISSING, None),
    ]
    lines = described(repetition(judge(None, [], [hold.state for hold in holds]), *holds))
    assert lines[0] == "inconclusive: the hold did not take effect"
    assert lines[5:8] == [
        "  hold     fill:0 (aten::fill_): had already run, so the hold was too short to show anything",
        "  hold     ambient:0 (aten::mul): pending until a host synchronization had to wait for it, nowhere.py:23",
        "  hold     fill:9: was never launched",
    ]
    assert len(lines) == 9
    assert "replay" in lines[8]


@pytest.mark.parametrize("hold", ["sleep", "gate"])
def test_on_a_real_device_it_is_said_what_held(hold):
    judgement = judge(TRACE[:1], [], [HoldState.EXPIRED])
    assert judgement.verdict is Verdict.INCONCLUSIVE
    lines = described(repetition(judgement, HoldOutcome(FILL, HoldState.EXPIRED, None)), device="cuda", hold=hold)
    held = next(line for line in lines if line.startswith("  hold "))
    assert held.startswith(f"  hold     fill:0 (aten::fill_), by a {hold}: still held after 2 s")
    assert ("--hold gate" in lines[-1]) is (hold == "gate")


def test_the_code_of_a_line_is_shown_below_it():
    here = SourceLine(__file__, 1)
    mismatch = Mismatch("observation 0", here, "poison", "15.0", "nan", (0,), 256, 256, 256)
    lines = described(repetition(judge(None, [mismatch], [])))
    assert (
        lines[6]
        == "             " + '"""What the counts of a case mean for its test, and how a failed repetition reads."""'
    )
