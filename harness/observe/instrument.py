"""The instrument: starts and ends the observation of one repetition and gives its trace in the common format.

The simulator and the tap of a real device are native modules with the same functions; this is the one place that knows
their raw tuples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from harness.errors import UsageError
from harness.observe import unused_memory
from harness.observe.holds import HoldOutcome, HoldState
from harness.observe.schedule_report import ScheduleReport
from harness.observe.streams import StreamNames, StreamsByAppearance
from harness.observe.synchronizations import Fault, Synchronization, name_by_appearance, translate
from harness.observe.trace import (
    Access,
    Allocate,
    Entry,
    Free,
    HostAccess,
    HostSync,
    Launch,
    Origins,
    Record,
    RecordStream,
    SourceLine,
    Trace,
    Wait,
)
from harness.perturb.plan import LaunchId, Plan
from harness.perturb.schedule import SUBMISSION_ORDER, Schedule, SubmissionOrder


class Native(Protocol):
    """What a native instrument offers: ``harness/backends/simulator`` and ``harness/observe/tap``.

    The simulator has ``set_schedule`` and ``schedule_report`` as well.
    """

    def begin_repetition(self, holds: list[tuple[int, int, int]], serial: bool, lines: bool) -> None: ...
    def set_preparing(self, on: bool) -> None: ...
    def can_poison(self) -> bool: ...
    def set_poisoning(self, on: bool) -> None: ...
    def finish_repetition(self) -> tuple[list[tuple[Any, ...]], list[tuple[str, str | None, int]]]: ...
    def set_ignored_prefixes(self, prefixes: list[str]) -> None: ...


@dataclass(slots=True)
class Recording:
    """What was seen of one repetition."""

    trace: Trace
    holds: list[HoldOutcome]
    schedule: ScheduleReport | None = None
    """None under the default schedule."""
    synchronizations: list[Synchronization] = field(default_factory=list)
    """In the order in which they were issued; empty unless they were asked for."""

    def launches(self) -> list[Launch]:
        """The launches, in submission order."""
        return [entry for entry in self.trace if type(entry) is Launch]


class Instrument:
    """Observes one repetition at a time on the accelerator behind ``native``."""

    def __init__(self, native: Native, names: StreamNames) -> None:
        self._native = native
        self.names = names
        self._plan = Plan()
        self._schedule: Schedule = SUBMISSION_ORDER
        self._observing = False
        self._preparing = 0
        self._poisons = False
        self._tap: Any = None
        self._tapped = False
        native.set_ignored_prefixes(ignored_prefixes())

    @property
    def can_poison(self) -> bool:
        """Whether freed memory can be filled; see :meth:`begin`."""
        return self._native.can_poison()

    def use_tap(self, tap: Any) -> None:
        """Take synchronizations from ``tap``, which ``harness.observe.tap.observe_synchronizations`` gave."""
        self._tap = tap
        tap.set_ignored_prefixes(ignored_prefixes())

    def begin(
        self,
        plan: Plan,
        *,
        schedule: Schedule = SUBMISSION_ORDER,
        serial: bool = False,
        lines: bool = False,
        poison_memory: bool = False,
        synchronizations: bool = False,
        fault: Fault | None = None,
    ) -> None:
        """Start a repetition under ``plan``; every stream that the plan names must have its name already.

        ``serial`` completes each launch before the next is enqueued. ``lines`` records where the caller's code
        enqueued each launch, which costs a walk up the Python stack a launch.

        ``poison_memory`` fills each block of device memory with 0xFF on its owning stream: when it is freed, unless
        ``record_stream`` defers its reuse, as whoever is given it next might write it; and when it is handed out,
        before anything is written there. So a missing ``record_stream`` has a value that shows, and a stale read does
        not find what was right the last time.

        ``synchronizations`` records who issued which, some twenty microseconds each; ``fault`` says which one goes
        wrong. Both need a tap (``use_tap``).

        Raises:
            UsageError: the accelerator has no such schedule or cannot fill freed memory, or the schedule does not go
                with the rest.
        """
        self._check(plan, schedule, serial, poison_memory)
        self._plan = plan
        self._schedule = schedule
        holds = []
        for launch in plan.holds:
            key = self.names.key(launch.stream)
            # A stream that does not exist yet cannot be held: the outcome will say that the launch was missing.
            holds.append((*(key or (-1, -1)), launch.index))
        if poison_memory != self._poisons:
            self._native.set_poisoning(poison_memory)
            self._poisons = poison_memory
        if poison_memory and hasattr(self._native, "fill"):
            unused_memory.overwrite(self._native, torch.cuda.memory_snapshot())
        if schedule != SUBMISSION_ORDER:
            self._set_schedule(schedule)
        try:
            self._native.begin_repetition(holds, serial, lines)
        except BaseException:
            self._reset_schedule()
            raise
        self._observing = True
        self._tapped = synchronizations or fault is not None
        if self._tapped:
            target = fault.native_target(self.names) if fault is not None else None
            how = "misdirect" if fault is not None and fault.misdirect else "leave out"
            self._tap.begin_synchronizations(target, how, lines)

    def _check(self, plan: Plan, schedule: Schedule, serial: bool, poison_memory: bool) -> None:
        if poison_memory and not self.can_poison:
            raise UsageError("freed memory of this device cannot be filled: its runtime was not found.")
        if schedule != SUBMISSION_ORDER and not hasattr(self._native, "set_schedule"):
            raise UsageError(
                f"the schedule {schedule} needs the simulated accelerator: a real device schedules itself."
            )
        if isinstance(schedule, SubmissionOrder):
            return
        if plan.holds:
            raise UsageError(
                f"the plan {plan} does not go with the schedule {schedule}: a hold keeps a launch for as long as it "
                f"can, and {schedule.kind} decides itself how long; hold under the schedule 'submission'."
            )
        if poison_memory:
            raise UsageError(
                f"filling freed memory does not go with the schedule {schedule}, which would count it as launches; "
                "fill it under the schedule 'submission'."
            )
        if serial:
            raise UsageError(
                f"a serial run leaves the schedule {schedule} nothing to decide; run it under 'submission'."
            )

    def _set_schedule(self, schedule: Schedule) -> None:
        self._native.set_schedule(*schedule.native_arguments())  # type: ignore[attr-defined]

    def _reset_schedule(self) -> None:
        if self._schedule != SUBMISSION_ORDER:
            self._set_schedule(SUBMISSION_ORDER)
            self._schedule = SUBMISSION_ORDER

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """A stretch whose launches are neither counted, held nor traced."""
        self._preparing += 1
        if self._preparing == 1:
            self._set_preparing(True)
        try:
            yield
        finally:
            self._preparing -= 1
            # An interrupt can end the repetition before this block.
            if self._preparing == 0 and self._observing:
                self._set_preparing(False)

    def _set_preparing(self, on: bool) -> None:
        self._native.set_preparing(on)
        if self._tapped:
            self._tap.prepare_synchronizations(on)

    def finish(self) -> Recording:
        """End the repetition: settle each hold, release them, complete all work."""
        self._observing = False
        report = None
        raw_synchronizations = []
        if self._tapped:
            self._tapped = False
            raw_synchronizations = self._tap.finish_synchronizations()
        try:
            raw_entries, raw_holds = self._native.finish_repetition()
            if self._schedule != SUBMISSION_ORDER:
                raw_report = self._native.schedule_report()  # type: ignore[attr-defined]
                report = ScheduleReport.make(self._schedule, raw_report, self.names.name)
        finally:
            self._reset_schedule()
        outcomes = [
            HoldOutcome(launch, HoldState(state), SourceLine(file, line) if file else None)
            for launch, (state, file, line) in zip(self._plan.holds, raw_holds, strict=True)
        ]
        if isinstance(self.names, StreamsByAppearance):
            name_by_appearance(raw_synchronizations, self.names)
        origins = Origins()
        trace, places = self._translate(raw_entries, origins)
        synchronizations = translate(raw_synchronizations, self.names, origins, self._by_mark(places))
        _bind_to_what_was_asked(trace, synchronizations)
        return Recording(trace, outcomes, report, synchronizations)

    def _by_mark(self, places: list[tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
        # The simulator's entries stay where they are; the tap's move, and have marks.
        marks = self._native.entry_marks() if hasattr(self._native, "entry_marks") else range(len(places))
        return dict(zip(marks, places, strict=True))

    def _translate(self, raw_entries: list[tuple[Any, ...]], origins: Origins) -> tuple[Trace, list[tuple[int, ...]]]:
        """The trace, and for each raw entry its places in it."""
        name = self.names.name

        def owner(device: int, stream: int) -> str | None:
            return None if device < 0 else name((device, stream))

        trace: list[Entry] = []
        append = trace.append
        places: list[tuple[int, ...]] = []
        for raw in raw_entries:
            kind = raw[0]
            place = len(trace)
            if kind == "launch":
                _, device, stream, index, operation, node, file, line, accesses, *origin, with_host = raw
                append(
                    Launch(
                        LaunchId(name((device, stream)), index),
                        operation,
                        node,
                        SourceLine(file, line) if file else None,
                        tuple(map(Access._make, accesses)),
                        *origins.numbers(*origin),
                        with_host,
                    )
                )
            elif kind == "record":
                append(Record(name((raw[1], raw[2])), raw[3]))
            elif kind == "wait":
                append(Wait(name((raw[1], raw[2])), raw[3]))
            elif kind == "allocate":
                _, block, start, stop, device, stream, after = raw
                append(Allocate(block, start, stop, owner(device, stream), tuple(after)))
            elif kind == "free":
                _, block, start, stop, device, stream, deferred, file, line = raw
                where = SourceLine(file, line) if file else None
                append(Free(block, start, stop, owner(device, stream), tuple(deferred), where))
            elif kind == "record_stream":
                _, block, start, stop, device, stream = raw
                append(RecordStream(block, start, stop, name((device, stream))))
            elif kind == "host":
                _, operation, node, file, line, accesses = raw
                where = SourceLine(file, line) if file else None
                append(HostAccess(operation, node, where, tuple(map(Access._make, accesses))))
            elif kind == "sync_stream":
                append(HostSync(name((raw[1], raw[2])), None))
            elif kind == "sync_event":
                append(HostSync(None, raw[1]))
            elif kind == "sync_device":
                # Synchronizing one device says nothing about the streams of another.
                for stream in self.names.of_device(raw[1]):
                    append(HostSync(stream, None))
            else:
                raise AssertionError(f"unknown trace entry {raw!r}")
            places.append(tuple(range(place, len(trace))))
        return trace, places


def _bind_to_what_was_asked(trace: Trace, synchronizations: list[Synchronization]) -> None:
    """Let each wait in the trace name the recording that its issuer asked for.

    The device's own trace says what the device was told, which a fault can make something else. Whether the device does
    what was asked is for the values to show.
    """
    for each in synchronizations:
        if each.recorded is None or not each.entries:
            continue
        (place,) = each.entries
        (record,) = synchronizations[each.recorded].entries
        entry, recording = trace[place], trace[record]
        if isinstance(entry, Wait | HostSync) and isinstance(recording, Record) and entry.event != recording.event:
            trace[place] = entry._replace(event=recording.event)


def ignored_prefixes() -> list[str]:
    """Source files that are never the caller's: torch, the harness but for its tests, and what calls for them."""
    torch_folder = Path(torch.__file__).parent
    harness_folder = Path(__file__).parent.parent
    parts = [path for path in harness_folder.iterdir() if path.name != "tests"]
    return [f"{torch_folder}/", contextlib.__file__, *sorted(str(path) for path in parts)]
