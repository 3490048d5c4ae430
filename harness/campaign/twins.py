"""Twins: a case with exactly one synchronization left out, and whether the oracles notice.

Every wait, host synchronization and record_stream of a case has a twin, whoever issued it: the caller's code or the
autograd engine. The twin is run under an aimed plan: happens-before names the racing pair on the twin's own trace, and
the launch of its first access is held. A twin that an oracle catches is killed. A synchronization that the others imply
is redundant: the order is the same without it, which ``judge/order.py`` proves. Everything else survives, and counts
against the suite.

The two oracles are scored apart, since happens-before must not be its own judge: it also names the plan, but what the
values show under that plan is theirs alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from harness.campaign.case import Case, CaseError, Control
from harness.campaign.repetition import Repetition
from harness.campaign.result import CaseResult
from harness.campaign.runs import Runs
from harness.campaign.turns import Turns
from harness.campaign.watchdog import RepetitionTimeout, Watchdog
from harness.errors import InfrastructureError, first_line
from harness.judge.engine_edges import crossed
from harness.judge.order import implied, last_covered_launch
from harness.judge.verdict import Verdict
from harness.observe.synchronizations import Fault, Synchronization, SynchronizationId
from harness.perturb.enumerate_plans import cycle_length
from harness.perturb.plan import LaunchId, Plan

VALUES = "values"
HAPPENS_BEFORE = "happens-before"

KILLED = "killed"
REDUNDANT = "redundant"
SURVIVED = "survived"

ORDERED_NOTHING = "it orders nothing that anyone looks at: no two accesses of the case race without it"


@dataclass(slots=True)
class Twin:
    """What became of one twin."""

    synchronization: str
    """Which one was left out, as ``--leave-out`` takes it."""
    kind: str
    issuer: str
    where: str
    """The synchronization with its node and line, for people."""
    outcome: str
    """``killed``, ``redundant`` or ``survived``."""
    killed_by: list[str] = field(default_factory=list)
    """``values``, ``happens-before``."""
    repetitions_to_kill: int | None = None
    """Aimed repetitions until a value was wrong."""
    plan: str = str(Plan())
    """The plan under which a value was wrong, else the last one that was tried."""
    proof: str | None = None
    """Why the order is the same without it."""
    race: str | None = None
    """The racing pair that happens-before names."""
    note: str | None = None
    """For a survivor, of what kind; for a kill that contradicts a proof or the other oracle, how."""
    csan: bool | None = None
    """Whether PyTorch's CUDA Sanitizer reports it (``csan.py``); None if it was not asked or cannot say."""


@dataclass(slots=True)
class TwinStudy:
    """The twins of one case."""

    nodeid: str
    control: bool
    """A control is unsafe as it is, and so has no twins; nor has a registered defect of PyTorch. It is looked at."""
    defect: bool = False
    """Whether it is such a defect."""
    issued: dict[str, int] = field(default_factory=dict)
    """How many synchronizations, records included, each issuer issued, by ``issuer kind``."""
    streams: list[str] = field(default_factory=list)
    """The streams that it launches on, in the order of their first launches."""
    edges: list[str] = field(default_factory=list)
    """The edges of the engine that it crosses (``harness/judge/engine_edges.py``); controls have them too."""
    twins: list[Twin] = field(default_factory=list)
    look: CaseResult | None = None
    """For a control or a defect: a repetition that holds the racing access, counted as in any other run."""
    csan: bool | None = None
    """Whether the sanitizer reports the case with nothing left out; None if it was not asked or cannot say."""

    @property
    def survivors(self) -> list[Twin]:
        """The twins that nothing caught."""
        return [twin for twin in self.twins if twin.outcome == SURVIVED]

    @property
    def contradictions(self) -> list[Twin]:
        """The twins that were noticed although a proof says that nothing can notice them."""
        return [twin for twin in self.twins if twin.outcome == KILLED and twin.proof is not None]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TwinStudy:
        """What ``to_json`` made the data of."""
        look = data.get("look")
        twins = [Twin(**twin) for twin in data["twins"]]
        return cls(**{**data, "twins": twins, "look": None if look is None else CaseResult.from_json(look)})


def study_twins(case: Case, most_repetitions: int, turns: Turns, watchdog: Watchdog) -> TwinStudy:
    """Run every twin of a case; of a control, look whether it races as it is.

    Args:
        case: the case.
        most_repetitions: how many aimed repetitions a twin, or a control, gets at most.
        turns: when this process may use the device.
        watchdog: cuts a repetition that hangs.

    Raises:
        CaseError: the case races as it is, or does not synchronize the same way each time.
        InfrastructureError: a repetition was cut.
    """
    runs = Runs(case, turns, watchdog)
    try:
        runs.discover()
        complete = runs.once(Plan(), lines=True, synchronizations=True)
        study = _new_study(case, complete)
        if case.control is None:
            _check_complete(runs, complete)
            _study_all(runs, complete, study, most_repetitions)
        else:
            study.look = _look(runs, case.control, most_repetitions)
        return study
    except RepetitionTimeout as timeout:
        raise InfrastructureError(f"{case.nodeid}: {timeout}") from None


def _new_study(case: Case, complete: Repetition) -> TwinStudy:
    control, recording = case.control, complete.recording
    study = TwinStudy(case.nodeid, control=control is not None, defect=control is not None and control.defect)
    for each in recording.synchronizations if control is None else ():
        key = f"{each.id.issuer} {each.id.kind}"
        study.issued[key] = study.issued.get(key, 0) + 1
    study.streams = list(dict.fromkeys(launch.id.stream for launch in recording.launches()))
    study.edges = sorted(crossed(recording.synchronizations, recording.trace, case.device_of))
    return study


def _look(runs: Runs, control: Control, most_repetitions: int) -> CaseResult:
    """Hold the racing access once, more often only if the hold does not take effect; each launch if none is known."""
    case, discovery = runs.case, runs.case.discovery
    assert discovery is not None
    order = discovery.order()
    aimed = [number for number, launch in enumerate(order, 1) if launch in discovery.aimed]
    result = CaseResult(case.nodeid, control.reason, control.defect, len(order), cycle_length(len(order)))
    result.oracles = discovery.oracles
    for number in aimed[:1] or range(1, len(order) + 1):
        plan = Plan((order[number - 1],))
        for _ in range(most_repetitions):
            repetition = runs.once(plan, number=number)
            if repetition.judgement.verdict is not Verdict.INCONCLUSIVE:
                break
        result.add(case.record_of(repetition))
    return result


def _study_all(runs: Runs, complete: Repetition, study: TwinStudy, most_repetitions: int) -> None:
    for each in complete.recording.synchronizations:
        # What is not in the trace orders nothing by its nature: a wait for an event of the preparations.
        if each.id.kind != "record" and each.entries:
            study.twins.append(_study(runs, complete, each, most_repetitions))


def _check_complete(runs: Runs, complete: Repetition) -> None:
    case = runs.case
    if complete.judgement.verdict is not Verdict.PASS:
        raise CaseError(f"{case.nodeid} is not clean with nothing left out, so its twins would show nothing.")
    again = runs.once(Plan(), synchronizations=True).recording.synchronizations
    first = {each.id for each in complete.recording.synchronizations}
    differing = first ^ {each.id for each in again}
    if differing:
        names = ", ".join(map(str, sorted(differing)))
        raise CaseError(
            f"{case.nodeid} does not synchronize the same way each time ({names} only sometimes), so a twin cannot say "
            "which one it leaves out."
        )


def _study(runs: Runs, complete: Repetition, left_out: Synchronization, most_repetitions: int) -> Twin:
    case = runs.case
    trace = complete.recording.trace
    proof = implied(trace, left_out.entries)
    fault = Fault(left_out.id)
    twin = Twin(
        str(left_out.id),
        left_out.id.kind,
        left_out.id.issuer,
        left_out.describe(),
        outcome=SURVIVED,
        proof=None if proof is None else str(proof),
    )
    unheld = runs.twin(Plan(), fault, lines=True)
    if isinstance(unheld, Exception):
        twin.outcome, twin.killed_by, twin.repetitions_to_kill = KILLED, [VALUES], 1
        twin.note = f"it raised {first_line(unheld)} with nothing held, so happens-before had nothing to judge"
        return twin
    _check_left_out(case, unheld, left_out.id)
    races = unheld.judgement.races
    if races:
        twin.killed_by.append(HAPPENS_BEFORE)
        twin.race = str(races[0])
    holds = list(dict.fromkeys(race.hold for race in races if race.hold is not None))
    if not holds:
        covered = last_covered_launch(trace, left_out.entries)
        holds = [covered] if covered is not None else []
    tries = 1 if proof is not None and not races else most_repetitions
    for number, plan in enumerate(_aimed_plans(holds, tries), 1):
        twin.plan = str(plan)
        held = runs.twin(plan, fault, number=number)
        if isinstance(held, Exception) or held.judgement.mismatches:
            twin.killed_by.append(VALUES)
            twin.repetitions_to_kill = number
            break
    if twin.killed_by:
        twin.outcome = KILLED
        twin.note = _contradiction(twin)
    elif proof is not None:
        twin.outcome = REDUNDANT
    else:
        twin.note = ORDERED_NOTHING
    return twin


def _check_left_out(case: Case, unheld: Repetition, name: SynchronizationId) -> None:
    if not any(each.left_out and each.id == name for each in unheld.recording.synchronizations):
        raise CaseError(f"{case.nodeid} did not issue {name} again, so its twin proves nothing.")


def _aimed_plans(holds: list[LaunchId], most: int) -> Iterator[Plan]:
    if not holds:
        yield Plan()
        return
    for number in range(most):
        yield Plan((holds[number % len(holds)],))


def _contradiction(twin: Twin) -> str | None:
    if twin.proof is not None:
        return f"killed by {' and '.join(twin.killed_by)}, although its order is implied"
    if len(twin.killed_by) == 1:
        other = HAPPENS_BEFORE if twin.killed_by == [VALUES] else VALUES
        return f"killed by {twin.killed_by[0]}, not by {other}"
    return None
