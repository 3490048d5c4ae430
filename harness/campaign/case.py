"""A case's repetitions: first what the body consists of, then plan after plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from harness.backends.out_of_memory import describe_memory, is_out_of_memory
from harness.campaign.lab import Lab
from harness.campaign.race_tally import RaceTally
from harness.campaign.repetition import Repetition, run_repetition
from harness.campaign.result import CaseResult
from harness.campaign.session import Session
from harness.campaign.store import CaseDefinition, RepetitionRecord, ResultWriter
from harness.campaign.watchdog import RepetitionTimeout, Watchdog
from harness.errors import InfrastructureError, SidestreamError, UsageError, first_line
from harness.exit_codes import ExitCode
from harness.judge.verdict import Verdict
from harness.observe.holds import HoldState
from harness.observe.synchronizations import Fault
from harness.observe.trace import Free, HostAccess, Launch
from harness.perturb.enumerate_plans import cycle_length, plan_for_repetition
from harness.perturb.plan import LaunchId, Plan

_ORACLES = 2
"""How many oracles must see a control race in a repetition that holds its racing access: values and happens-before."""
_VALUES_ALONE = 1
"""The same where happens-before does not see the race at all: on a real device, what the host does to pinned memory."""

_WARM_UPS = 3
"""Unheld runs on a real device before anything counts: kernels are loaded at their first launch, and caches fill."""


class CaseError(SidestreamError):
    """The case is wrong in itself: it does not hold its own promise even when nothing runs concurrently."""

    exit_code = ExitCode.RACE


class NotOfThisCase(UsageError):
    """The user named a launch or a synchronization that the case does not have, though another one may."""


@dataclass(frozen=True, slots=True)
class Control:
    """Why a case must be seen to race: it is documented as unsafe, or PyTorch is wrong there."""

    reason: str
    """The sentence of the contract that makes it unsafe; for a defect of PyTorch, the file that describes it."""
    aim: str
    """The stream whose launches are the racing accesses; holding one of them must show the race."""
    defect: bool = False
    """Whether it is safe by its contract, and races only since PyTorch is wrong."""


@dataclass(frozen=True, slots=True)
class Discovery:
    """What a body consists of, learnt from a fully synchronized run and an unheld one."""

    launches: dict[LaunchId, Launch]
    """In submission order, with source lines."""
    frees: list[Free]
    """In order, with source lines."""
    host_accesses: list[HostAccess]
    """In order, with source lines."""
    aimed: frozenset[LaunchId]
    """For a control: the launches to hold so that the race shows."""
    oracles: int
    """How many oracles can see that race."""

    def order(self) -> list[LaunchId]:
        """The launches in submission order."""
        return list(self.launches)


class Case:
    """One test's body, run again and again in this process."""

    def __init__(
        self, nodeid: str, body: Callable[[], object], session: Session, lab: Lab, control: Control | None
    ) -> None:
        self.nodeid = nodeid
        self.control = control
        self._body = body
        self._session = session
        self._lab = lab
        self._hold = session.hold_length()
        # Memory that is handed out again would still hold the right value of the repetition before.
        self._poisons = session.instrument.can_poison
        self.discovery: Discovery | None = None
        self.adaptive = False
        """Whether its repetitions are added where the evidence is thin."""
        self.fresh = False
        self._running: tuple[int, Plan] | None = None

    def is_broken_by(self, error: BaseException) -> bool:
        """Whether an error has left the device unusable for the rest of the process."""
        return self._session.is_broken_by(error)

    def device_of(self, stream: str) -> int | None:
        """The device of a stream of this case; None if there is no such stream."""
        key = self._session.instrument.names.key(stream)
        return None if key is None else key[0]

    def where(self) -> str | None:
        """Which repetition is running, in words; None before the first."""
        if self._running is None:
            return None
        number, plan = self._running
        return f"repetition {number} under {plan}"

    def discover(self) -> Discovery:
        """Learn the launches of the body and check that it holds its promise when nothing runs concurrently.

        Raises:
            CaseError: it does not, or it launches nothing, or other things each time.
        """
        session = self._session
        if not session.simulated:
            unheld_ms = []
            for _ in range(_WARM_UPS):
                self.once(Plan())
                unheld_ms.append(self._lab.unprepared_ms)
            self._hold.fit(max(unheld_ms[1:]))
        session.set_hold(self._hold)
        serial = self.once(Plan(), serial=True, lines=True)
        if serial.judgement.mismatches:
            found = "; ".join(map(str, serial.judgement.mismatches))
            raise CaseError(
                f"{self.nodeid} is wrong in itself: fully synchronized, one launch after another, it still gives "
                f"{found}. "
                "Its expected value or its body is mistaken; no race is involved."
            )
        launches = {launch.id: launch for launch in serial.recording.launches()}
        if not launches:
            raise CaseError(f"{self.nodeid} launches nothing on {session.backend.device}, so there is nothing to hold.")
        if not self._lab.observations:
            raise CaseError(
                f"{self.nodeid} observes nothing, so no wrong value can show: end it with lab.observe(...)."
            )
        baseline = self.once(Plan())
        again = {launch.id for launch in baseline.recording.launches()}
        if again != set(launches) and not baseline.judgement.races:  # which may be why, where the host reads the value
            differing = ", ".join(map(str, sorted(again ^ set(launches))))
            raise self._varies(f"{differing} only sometimes")
        frees = [entry for entry in serial.recording.trace if type(entry) is Free]
        host_accesses = [entry for entry in serial.recording.trace if type(entry) is HostAccess]
        seen = bool(baseline.judgement.races) or self._session.simulated
        oracles = _ORACLES if seen else _VALUES_ALONE
        self.discovery = Discovery(launches, frees, host_accesses, self._aimed(launches, baseline), oracles)
        return self.discovery

    def _varies(self, how: str) -> CaseError:
        return CaseError(
            f"{self.nodeid} does not launch the same each time ({how}): plans name launches by stream and index, so a "
            "body must enqueue the same work in every repetition, on streams of the lab."
        )

    def _aimed(self, launches: dict[LaunchId, Launch], baseline: Repetition) -> frozenset[LaunchId]:
        if self.control is None:
            return frozenset()
        aim = self.control.aim
        on_aim = frozenset(launch for launch in launches if launch.stream == aim)
        if not on_aim:
            streams = ", ".join(dict.fromkeys(launch.stream for launch in launches))
            raise CaseError(
                f"{self.nodeid} aims at stream {aim!r} but launches nothing there; it launches on {streams}."
            )
        # Happens-before names the racing access itself: of the two, the one that was enqueued first.
        races = [race for race in baseline.judgement.races if race.hold is not None]
        aimed = on_aim & {race.hold for race in races if race.hold is not None}
        if not self._session.simulated and not aimed:
            return on_aim  # what its allocator or its libraries do for a race is not all in the trace
        if races and not aimed:
            raise CaseError(
                f"{self.nodeid} races, but not with its aim, stream {aim!r}: {races[0]} Aim at the race that is meant, "
                "or mend the other one."
            )
        return aimed

    def once(self, plan: Plan, *, number: int = 0, serial: bool = False, **settings: Any) -> Repetition:
        """Run the body once and judge it; the settings are those of ``run_repetition``.

        A hold that turns out too short is lengthened for the next time.
        """
        repetition = run_repetition(
            self._lab,
            self._body,
            number,
            plan,
            with_happens_before=not serial,
            serial=serial,
            poison_memory=self._poisons,
            **settings,
        )
        if any(outcome.state is HoldState.RAN for outcome in repetition.holds):
            self._hold.grow()
            self._session.set_hold(self._hold)
        return repetition

    def run(
        self,
        numbers: Callable[[int], Iterable[int]],
        result: CaseResult,
        writer: ResultWriter,
        watchdog: Watchdog,
        describe: Callable[[Case, Repetition], str],
        progress: Callable[[], None],
        tally: RaceTally | None = None,
    ) -> None:
        """Run the repetitions of these numbers and add them to ``result`` one by one, so that none is lost.

        Args:
            numbers: which repetitions, given the length of the cycle of plans; a number has its plan, whoever runs it.
            result: counts what ended.
            writer: keeps each repetition on disk.
            watchdog: cuts a repetition that hangs.
            describe: the text for a repetition that failed.
            progress: called after each repetition.
            tally: says when the case has raced often enough; without one it never has.

        Raises:
            CaseError: the case is wrong in itself.
            NotOfThisCase: the user named a launch or a synchronization that this body does not have.
            InfrastructureError: an error has left the device unusable for the rest of the process.
        """
        turns = self._session.turns
        try:
            with turns.turn(), watchdog.guard():
                discovery = self.discovery or self.discover()
        except RepetitionTimeout as timeout:
            self._time_out(timeout, 0, Plan(), result, writer, watchdog)
            return
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._run_out_of_memory(error, 0, Plan(), result, writer)
            return
        order = discovery.order()
        options = self._session.options
        if options.plan is not None:
            self.check_plan(options.plan)
        if options.fault is not None:
            with turns.turn(), watchdog.guard():
                self._check_fault(options.fault)
        result.launches = len(order)
        result.oracles = discovery.oracles
        result.cycle_length = cycle_length(len(order)) if options.plan is None else 0
        writer.define(
            CaseDefinition(self.nodeid, len(order), result.cycle_length, result.oracles, result.control, result.defect)
        )
        for number in numbers(result.cycle_length or 1):
            if self._session.options.is_late() or (tally is not None and tally.is_full(self.nodeid)):
                break
            plan = options.plan if options.plan is not None else plan_for_repetition(number, order, options.seed)
            self._running = number, plan
            writer.in_flight(self.nodeid, number, str(plan))
            try:
                # The wait for the turn is no part of what the watchdog times.
                with turns.turn(), watchdog.guard():
                    repetition = self.once(plan, number=number, fault=options.fault)
            except RepetitionTimeout as timeout:
                self._time_out(timeout, number, plan, result, writer, watchdog)
                # What the device still has to do is unknown, so nothing after this can be trusted.
                return
            except Exception as error:
                if is_out_of_memory(error):
                    self._run_out_of_memory(error, number, plan, result, writer)
                    continue
                if self.is_broken_by(error):
                    broken = f"the device is unusable after {self.nodeid}, repetition {number} under {plan}: {error}"
                    self._lose(Verdict.INFRA, broken, 0.0, number, plan, result, writer)
                    result.describe_failure("broken device", f"infra: {broken}")
                    writer.clear_in_flight()
                    raise InfrastructureError(broken) from error
                raise
            self._settle(repetition, discovery, result, writer, describe)
            if tally is not None and repetition.judgement.verdict is Verdict.RACE:
                tally.add(self.nodeid)
            progress()
        writer.clear_in_flight()
        result.hold_ms = self._hold.milliseconds if self._session.holds_by_sleep else 0.0

    def run_fresh(
        self,
        number: int,
        result: CaseResult,
        writer: ResultWriter,
        watchdog: Watchdog,
        describe: Callable[[Case, Repetition], str],
    ) -> None:
        """Run the baseline once before anything else is known of the case, so that its first launches count.

        Args:
            number: counts the repetitions in fresh processes.
            result: counts it.
            writer: keeps it on disk.
            watchdog: cuts it if it hangs.
            describe: the text for it if it failed.

        Raises:
            CaseError: the case is wrong in itself.
        """
        plan = Plan()
        writer.define(CaseDefinition(self.nodeid, control=result.control, defect=result.defect))
        self._running = number, plan
        writer.in_flight(self.nodeid, number, str(plan))
        self.fresh = True
        try:
            with self._session.turns.turn(), watchdog.guard():
                repetition = self.once(plan, number=number, fault=self._session.options.fault)
            with self._session.turns.turn(), watchdog.guard():
                discovery = self.discover()
                if self._session.options.fault is not None:
                    self._check_fault(self._session.options.fault)
        except RepetitionTimeout as timeout:
            self._time_out(timeout, number, plan, result, writer, watchdog)
            return
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._run_out_of_memory(error, number, plan, result, writer)
            return
        self._settle(repetition, discovery, result, writer, describe)
        writer.clear_in_flight()

    def _time_out(
        self,
        timeout: RepetitionTimeout,
        number: int,
        plan: Plan,
        result: CaseResult,
        writer: ResultWriter,
        watchdog: Watchdog,
    ) -> None:
        self._lose(Verdict.TIMEOUT, str(timeout), watchdog.limit_s * 1e6, number, plan, result, writer)
        result.describe_failure("timeout", f"{timeout}\n  plan     {plan}\n{watchdog.stacks()}")

    def _run_out_of_memory(
        self, error: Exception, number: int, plan: Plan, result: CaseResult, writer: ResultWriter
    ) -> None:
        memory = describe_memory(self._session.backend)
        self._lose(Verdict.INFRA, f"{first_line(error)} ({memory})", 0.0, number, plan, result, writer)
        result.describe_failure(
            "out of memory",
            f"infra: memory ran out in repetition {number} under {plan}: {first_line(error)}\n  memory   {memory}\n"
            "  Run fewer workers on the device, or keep others off it.",
        )

    def _lose(
        self,
        verdict: Verdict,
        message: str,
        duration_us: float,
        number: int,
        plan: Plan,
        result: CaseResult,
        writer: ResultWriter,
    ) -> None:
        """Count a repetition that did not come to its end."""
        record = RepetitionRecord(
            self.nodeid,
            number,
            str(plan),
            verdict.value,
            duration_us,
            message=message,
            adaptive=self.adaptive,
            fresh=self.fresh,
        )
        writer.write(record)
        result.add(record)

    def _settle(
        self,
        repetition: Repetition,
        discovery: Discovery,
        result: CaseResult,
        writer: ResultWriter,
        describe: Callable[[Case, Repetition], str],
    ) -> None:
        judgement = repetition.judgement
        launched = repetition.recording.launches()
        # A race may be why: then the race is what to report. (A wrong value alone may as well come from other work.)
        if len(launched) > len(discovery.launches) and not judgement.races:
            more = ", ".join(str(launch.id) for launch in launched if launch.id not in discovery.launches)
            raise self._varies(f"{more} from repetition {repetition.number} on")
        failed = judgement.verdict is not Verdict.PASS and not (
            self.control is not None and judgement.verdict is Verdict.RACE
        )
        record = self.record_of(repetition)
        if failed:
            record.message = "; ".join([*map(str, judgement.mismatches), *map(str, judgement.races)])[:2000]
            result.describe_failure(repetition.reason, describe(self, repetition), len(judgement.raced_by))
        writer.write(record)
        result.add(record)

    def record_of(self, repetition: Repetition) -> RepetitionRecord:
        """What is counted of a repetition of this case, which has been discovered; without a message."""
        discovery, plan = self.discovery, repetition.plan
        assert discovery is not None
        return RepetitionRecord(
            nodeid=self.nodeid,
            repetition=repetition.number,
            plan=str(plan),
            verdict=repetition.judgement.verdict.value,
            duration_us=repetition.duration_us,
            aimed=plan.kind == "single" and plan.holds[0] in discovery.aimed,
            control=self.control is not None,
            defect=self.control is not None and self.control.defect,
            raced_by=repetition.judgement.raced_by,
            holds=",".join(outcome.state.value for outcome in repetition.holds),
            message="",
            adaptive=self.adaptive,
            fresh=self.fresh,
        )

    def _check_fault(self, fault: Fault) -> None:
        issued = [each.id for each in self.once(Plan(), synchronizations=True).recording.synchronizations]
        if fault.target not in issued:
            raise NotOfThisCase(
                f"{self.nodeid} never issued {fault.target}, so it cannot go wrong; it issued "
                f"{', '.join(map(str, issued)) or 'no synchronization'}."
            )

    def check_plan(self, plan: Plan) -> None:
        """Refuse a plan of the user's that does not fit the body, which has been discovered.

        Raises:
            NotOfThisCase: it names a launch that the body does not make.
        """
        discovery = self.discovery
        assert discovery is not None
        unknown = [launch for launch in plan.holds if launch not in discovery.launches]
        if unknown:
            raise NotOfThisCase(
                f"--plan {plan} names {', '.join(map(str, unknown))}, which {self.nodeid} does not launch; it launches "
                f"{', '.join(map(str, discovery.launches))}."
            )
