"""The canary: planted races, each of which a run must find, or its silence about others means nothing.

Each goes the whole way of a case: plans, oracles, verdicts, result file, outcome. So does its repaired form, which must
not be seen to race: an oracle that always says race is broken too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.campaign.case import Case, CaseError
from harness.campaign.lab import Lab
from harness.campaign.options import Options
from harness.campaign.planted_races import PLANTED, PlantedRace
from harness.campaign.reader import read_run
from harness.campaign.result import CaseResult
from harness.campaign.session import Session
from harness.campaign.store import RepetitionRecord, ResultWriter
from harness.campaign.twins import HAPPENS_BEFORE, VALUES
from harness.campaign.watchdog import Watchdog
from harness.errors import InfrastructureError, first_line
from harness.exit_codes import ExitCode
from harness.judge.verdict import Verdict
from harness.observe.synchronizations import USER, Fault, Synchronization, SynchronizationId
from harness.perturb.hold import DEFAULT_KIND
from harness.perturb.plan import Plan
from harness.report.outcome import outcome_of

LIMIT_S = 60.0
"""How long one repetition may take."""

Announce = Callable[[str], None]


@dataclass(slots=True)
class Finding:
    """What became of one planted race."""

    name: str
    oracles: list[str] = field(default_factory=list)
    """Which oracles saw it in one repetition: that which convinced most of them."""
    plan: str = ""
    """Of that repetition."""
    missed: str | None = None
    """Why the race counts as missed."""
    alarm: str | None = None
    """What was seen in the repaired form, which has no race."""
    inconclusive: str | None = None
    """Why the repaired form proves nothing, although nothing was seen."""

    @property
    def problem(self) -> str | None:
        """What is not as it should be, in a sentence."""
        return self.missed or self.alarm or self.inconclusive

    @property
    def exit_code(self) -> ExitCode:
        """Clean if both oracles saw the race, and neither saw one in the repaired form."""
        if self.missed or self.alarm:
            return ExitCode.RACE
        return ExitCode.INCONCLUSIVE if self.inconclusive else ExitCode.CLEAN


def exit_code_of(findings: Iterable[Finding]) -> ExitCode:
    """Clean only if every race was found."""
    codes = {finding.exit_code for finding in findings}
    worst_first = (ExitCode.RACE, ExitCode.INCONCLUSIVE)
    return next((code for code in worst_first if code in codes), ExitCode.CLEAN)


def hunt(device: str, *, hold: str = DEFAULT_KIND, seed: int = 0, announce: Announce | None = None) -> list[Finding]:
    """Look for every planted race, and for races in the repaired forms.

    Args:
        device: a resolved device.
        hold: how launches are held on a real device.
        seed: of the plans that hold several launches.
        announce: receives progress sentences of a build.

    Raises:
        UsageError: the device cannot be had.
        InfrastructureError: it broke.
    """
    options = Options(device=device, hold=hold, seed=seed, limit_s=LIMIT_S)
    return [_hunt(planted, options, announce) for planted in PLANTED]


def _hunt(planted: PlantedRace, options: Options, announce: Announce | None) -> Finding:
    finding = Finding(planted.name)
    try:
        repaired = _run(planted.repaired, options, None, announce)
        _judge_repaired(finding, repaired)
        if planted.racy is not None:
            racy = _run(planted.racy, options, None, announce)
        else:
            left_out = _engines_own(planted, repaired.synchronizations)
            if left_out is None:
                finding.missed = "the tap saw nothing of the engine's that could be left out."
                return finding
            racy = _run(planted.repaired, options, Fault(left_out), announce)
    except CaseError as error:
        finding.missed = f"it could not be judged: {first_line(error)}"
        return finding
    _judge_racy(finding, racy)
    return finding


@dataclass(slots=True)
class _Ran:
    """One form of a planted race after a cycle of plans."""

    result: CaseResult
    records: list[RepetitionRecord]
    """As they were read back from the disk."""
    synchronizations: list[Synchronization]


def _run(body: Callable[[Lab], None], options: Options, fault: Fault | None, announce: Announce | None) -> _Ran:
    name = "canary"
    session = Session(replace(options, fault=fault), announce)
    watchdog = Watchdog(options.limit_s, None)
    try:
        session.use_tap()
        lab = session.lab()
        case = Case(name, lambda: body(lab), session, lab, None)
        result = CaseResult(name)
        with tempfile.TemporaryDirectory(prefix="sidestream-canary-") as folder:
            writer = ResultWriter(Path(folder), name, {"device": options.device})
            case.run(range, result, writer, watchdog, lambda case, repetition: "", lambda: None)
            writer.close()
            records = list(read_run(Path(folder)))
        if len(records) != result.repetitions:
            kept = f"{len(records)} of {result.repetitions} repetitions"
            raise InfrastructureError(writer.failure or f"{kept} could be read back from the result file.")
        with watchdog.guard():
            synchronizations = case.once(Plan(), synchronizations=True).recording.synchronizations
    finally:
        watchdog.rest()
        session.close()
    return _Ran(result, records, synchronizations)


def _engines_own(planted: PlantedRace, synchronizations: list[Synchronization]) -> SynchronizationId | None:
    # Which function of PyTorch issues it depends on the version.
    for each in synchronizations:
        if (each.id.kind, each.id.stream) == planted.left_out and each.id.issuer != USER:
            return each.id
    return None


def _judge_racy(finding: Finding, racy: _Ran) -> None:
    best = max(racy.records, key=lambda record: len(record.raced_by), default=None)
    if best is not None:
        finding.oracles, finding.plan = best.raced_by, best.plan
    blind = [oracle for oracle in (VALUES, HAPPENS_BEFORE) if oracle not in finding.oracles]
    if blind:
        seen = f", only by {finding.oracles[0]}" if finding.oracles else ""
        finding.missed = f"it was not seen by {' and '.join(blind)} in {len(racy.records)} repetitions{seen}."
    elif outcome_of(racy.result).exit_code is not ExitCode.RACE:
        finding.missed = "both oracles saw it, and the run would have been green all the same."


def _judge_repaired(finding: Finding, repaired: _Ran) -> None:
    code = outcome_of(repaired.result).exit_code
    raced = [record for record in repaired.records if record.verdict != Verdict.PASS.value]
    if code is ExitCode.INCONCLUSIVE:
        finding.inconclusive = "no hold took effect, so nothing is proved."
    elif code is not ExitCode.CLEAN:
        oracles = " and ".join(raced[0].raced_by) if raced else ""
        finding.alarm = f"the repaired form has no race, and it ended with {raced[0].verdict}"
        finding.alarm += f" by {oracles} under {raced[0].plan}." if oracles else f" under {raced[0].plan}."
