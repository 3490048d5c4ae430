"""The text of a failed repetition: what was seen, where, whose fault it is, and the command that replays it."""

from __future__ import annotations

import shlex
from pathlib import Path

from harness.campaign.case import Case
from harness.campaign.options import Options
from harness.campaign.repetition import Repetition
from harness.campaign.store import repetition_id
from harness.judge.happens_before import Race
from harness.judge.verdict import Verdict
from harness.observe.holds import HoldState
from harness.observe.trace import HostAccess, Launch, SourceLine
from harness.perturb.hold import DEFAULT_KIND, GATE_LIMIT_MS
from harness.perturb.load import DEFAULT_MEMORY_MIB
from harness.perturb.plan import Plan
from harness.report.paths import shown
from harness.report.source_lines import SourceLines, code_of

NOT_FLAKY = (
    "A wrong value or an unordered access is never 'just flaky': it is a bug in PyTorch, in the driver or in this "
    "case. Do not quarantine it."
)


def describe_failure(
    case: Case, repetition: Repetition, options: Options, device: str, timeline: Path | None = None
) -> str:
    """What a failed repetition says to whoever reads pytest's output.

    Args:
        case: the case.
        repetition: of it.
        options: of the run.
        device: the accelerator, in words.
        timeline: the file that has the repetition as a Chrome trace.
    """
    judgement = repetition.judgement
    discovery = case.discovery
    assert discovery is not None
    lines = [
        _headline(repetition),
        f"  case     {case.nodeid}",
        f"  device   {device}",
        f"  plan     {repetition.plan} (repetition {repetition.number}, seed {options.seed})",
        f"  id       {repetition_id(case.nodeid, repetition.number, fresh=case.fresh)}",
    ]
    if options.fault is not None:
        lines.append(f"  {options.fault.in_words()}, on purpose")
    for mismatch in judgement.mismatches:
        lines.append(f"  value    {mismatch}")
        lines += _code(mismatch.line)
    lines += _races(judgement.races, SourceLines(repetition.recording.trace, discovery))
    for outcome in repetition.holds:
        held = discovery.launches.get(outcome.launch)
        what = f" ({held.operation})" if held else ""
        by = "" if options.device == "sim" else f", by a {options.hold}"
        lines.append(f"  hold     {outcome.launch}{what}{by}: {_HOLD_STATES[outcome.state]}{_at(outcome.line)}")
    if judgement.attribution:
        lines.append(f"  cause    {judgement.attribution}")
    if judgement.disagreement:
        lines.append(f"  note     {judgement.disagreement}")
    lines.append(f"  replay   {replay_command(case.nodeid, repetition.plan, options)}")
    if timeline is not None:
        lines.append(f"  timeline {shown(timeline)} (open it at ui.perfetto.dev)")
    if judgement.verdict is Verdict.RACE and options.fault is None:
        lines.append(f"  {NOT_FLAKY}")
    return "\n".join(lines)


_HOLD_STATES = {
    HoldState.PENDING: "still pending when the body had been enqueued",
    HoldState.FORCED: "pending until a host synchronization had to wait for it",
    HoldState.RAN: "had already run, so the hold was too short to show anything",
    HoldState.EXPIRED: (
        f"still held after {GATE_LIMIT_MS / 1000:g} s, so the watchdog opened its gate: what is not ordered after it "
        "waited for it all the same (a hardware queue that streams share, an allocation, a kernel being loaded)"
    ),
    HoldState.MISSING: "was never launched",
}


def replay_command(nodeid: str, plan: Plan, options: Options) -> str:
    """The command that runs exactly this repetition again."""
    return shlex.join(["python", "-m", "pytest", nodeid, *replay_options(plan, options)])


def replay_options(plan: Plan, options: Options) -> list[str]:
    """The options of pytest under which a repetition of this plan is the same."""
    parts = ["--device", options.device, "--seed", str(options.seed), "--plan", str(plan)]
    if options.hold != DEFAULT_KIND:
        parts += ["--hold", options.hold]
    if options.hold_ms is not None:
        parts += ["--hold-ms", f"{options.hold_ms:g}"]
    if options.fault is not None:
        parts += ["--misdirect" if options.fault.misdirect else "--leave-out", str(options.fault.target)]
    if options.loads:
        parts += ["--load", ",".join(options.loads)]
        if options.load_memory_mib != DEFAULT_MEMORY_MIB:
            parts += ["--load-memory", f"{options.load_memory_mib:g}MiB"]
    return parts


def _headline(repetition: Repetition) -> str:
    judgement = repetition.judgement
    if judgement.verdict is Verdict.INCONCLUSIVE:
        return "inconclusive: the hold did not take effect"
    seen = []
    if judgement.mismatches:
        seen.append("a wrong value")
    if judgement.races:
        seen.append(
            "an unordered access" if len(judgement.races) == 1 else f"{len(judgement.races)} unordered accesses"
        )
    return f"{judgement.verdict.value}: {' and '.join(seen)}"


def _races(races: list[Race], source: SourceLines) -> list[str]:
    """The races. Of those of one line of the host, which may use many operators (printing does), the first stands for
    all."""
    lines: list[str] = []
    told: dict[tuple[int, SourceLine], int] = {}
    for race in races:
        place = None
        if isinstance(race.second, HostAccess):
            line = source.of(race.second)
            place = (id(race.first), line) if line else None
        if place is not None and place in told:
            told[place] += 1
            continue
        if place is not None:
            told[place] = 0
        lines += _race(race, source)
    more = sum(told.values())
    if more:
        verb = "race is" if more == 1 else "races are"
        lines.append(f"  and      {more} further {verb} between the same launches and lines of the host")
    return lines


def _race(race: Race, source: SourceLines) -> list[str]:
    lines = [f"  race     {race.kind}, bytes {race.start} to {race.stop} of block {race.block}"]
    for word, access in (("first", race.first), ("second", race.second)):
        line = source.of(access)
        if isinstance(access, Launch):
            # A backward launch is known by the forward operation that its node belongs to.
            node = f" in {access.node} of the forward" if access.node else ""
            what = f"{access.operation} on {access.id}{node}"
        elif isinstance(access, HostAccess):
            what = f"{access.operation} on the host" + (f" in {access.node}" if access.node else "")
        else:
            owner = f"owned by {access.stream}" if access.stream else "which is pinned memory"
            what = f"free of the block, {owner}"
        lines.append(f"    {word:<7}{what}{_at(line)}")
        lines += _code(line)
    lines.append(f"    missing {race.missing_wait}")
    if isinstance(race.second, Launch) and race.second.node and not race.reused:
        lines.append(
            "            A wait on the stream that calls backward is enough: the engine carries it on to its nodes."
        )
    return lines


def _at(line: SourceLine | None) -> str:
    return "" if line is None else f", {line}"


def _code(line: SourceLine | None) -> list[str]:
    text = code_of(line)
    return [f"             {text}"] if text else []
