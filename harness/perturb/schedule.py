"""Schedules: which launch of the simulated accelerator runs next, with a short string form that replays it.

====================  =================================================================================================
``submission``        each launch runs when it is enqueued, unless a plan holds it; the default
``virtual-time``      the host and each stream have a clock; a launch takes effect when the clocks say so
``pct``               random priorities that change at random steps, with a bound on missing a bug (ASPLOS 2010)
``random``            each step is made by one of those that can make one, drawn uniformly
====================  =================================================================================================

The C++ sources in ``harness/backends/simulator`` say what each does and cite where it comes from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from dataclasses import dataclass
from typing import Any, ClassVar

from harness.errors import UsageError

_EXAMPLES = "submission, virtual-time:launch_us=5,operation_us=10, pct:seed=7,depth=3,steps=40, random:seed=5"
_LARGEST = 2**63 - 1
_DEEPEST = 1000
"""Each further constraint divides the bound by the number of steps, and takes memory and time."""


@dataclass(frozen=True, slots=True)
class HostOrder:
    """The order in which the threads of the host called the simulator, run-length encoded, and a checksum of the calls.

    Threads are ``m`` (the one that runs the body), ``d0``, ``d1`` (the autograd engine's device threads) and ``t1``,
    ``t2``, ... (others, by their first call). The string form is ``m:14-d0:9-d1:7/9f31c2aa``.
    """

    segments: tuple[tuple[str, int], ...]
    """(thread, how many calls it made in a row)."""
    checksum: int
    """Of each call's thread, kind and operation (FNV-1a, 32 bits)."""

    def __str__(self) -> str:
        return "-".join(f"{thread}:{calls}" for thread, calls in self.segments) + f"/{self.checksum:08x}"

    @classmethod
    def parse(cls, text: str) -> HostOrder:
        """The order that ``str(order)`` came from.

        Raises:
            UsageError: the text is no order.
        """
        found = re.fullmatch(r"((?:(?:m|[dt]\d{1,4}):[1-9]\d{0,17}(?:-|(?=/)))*)/([0-9a-f]{8})", text, re.ASCII)
        if not found:
            raise UsageError(
                f"{text!r} is no order of host threads: write hosts=record to record one, or give one that was "
                "recorded (hosts=m:14-d0:9-d1:7/9f31c2aa)."
            )
        pairs = (part.split(":") for part in found[1].split("-") if part)
        return cls(tuple((thread, int(calls)) for thread, calls in pairs), int(found[2], 16))


RECORD = "record"
"""As ``hosts``: let one host thread run at a time, and record in which order they do."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the simulated accelerator is scheduled. Use one of the subclasses."""

    kind: ClassVar[str]

    hosts: HostOrder | str | None = dataclasses.field(default=None, kw_only=True)
    """What to do about the order of the host's threads, of which backward on two devices has several: nothing (None),
    record it (:data:`RECORD`), or replay a recorded one."""

    def __post_init__(self) -> None:
        if isinstance(self.hosts, str) and self.hosts != RECORD:
            raise UsageError(f"hosts={self.hosts!r}: give a HostOrder, {RECORD!r} or None.")
        for name, value in self.parameters().items():
            self._check(name, value)

    def _check(self, name: str, value: float) -> None:
        """Raises UsageError for a value that a parameter cannot have."""

    def parameters(self) -> dict[str, Any]:
        """The schedule's own parameters by name."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name != "hosts"}

    def native_arguments(self) -> tuple[str, dict[str, Any], str | tuple[list[tuple[str, int]], int] | None]:
        """What the native ``set_schedule`` takes: kind, parameters, hosts."""
        hosts = self.hosts
        return (
            self.kind,
            self.parameters(),
            (list(hosts.segments), hosts.checksum) if isinstance(hosts, HostOrder) else hosts,
        )

    def __str__(self) -> str:
        """Every parameter, so that the string means the same whatever the defaults become."""
        values = self.parameters() if self.hosts is None else {**self.parameters(), "hosts": self.hosts}
        parts = [f"{name}={str(value).removesuffix('.0')}" for name, value in values.items()]
        return self.kind + (":" + ",".join(parts) if parts else "")


@dataclass(frozen=True, slots=True)
class SubmissionOrder(Schedule):
    """Each launch runs when it is enqueued, unless a plan holds it or it has to wait; the only schedule with holds."""

    kind = "submission"


SUBMISSION_ORDER = SubmissionOrder()
"""The default."""


@dataclass(frozen=True, slots=True)
class VirtualTime(Schedule):
    """Launches take effect in the order of virtual clocks, whatever they cost this machine; for whole scripts."""

    kind = "virtual-time"

    launch_us: float = 5.0
    """What it costs the host to enqueue a launch."""
    operation_us: float = 10.0
    """What every launch takes on its stream, a sleep excepted."""
    operation_us_per_mib: float = 0.0
    """What a launch takes besides for each mebibyte that it reads or writes."""
    copy_us_per_mib: float = 40.0
    """What a copy between host and device, or between devices, takes besides for each mebibyte (25 GiB/s)."""
    query_us: float = 1.0
    """What it costs the host to ask whether something is complete."""

    def _check(self, name: str, value: float) -> None:
        if not 0 <= value < float("inf"):
            raise UsageError(f"virtual-time: {name}={value:g} is no time: give microseconds from 0 on.")
        if name == "query_us" and value == 0:
            raise UsageError("virtual-time: query_us=0 would let a host that polls wait for ever; give more.")


@dataclass(frozen=True, slots=True)
class ProbabilisticConcurrencyTesting(Schedule):
    """PCT: random priorities of the streams and the host, and ``depth - 1`` random steps at which one falls."""

    kind = "pct"

    seed: int = 0
    depth: int = 3
    """How many constraints on the order of launches the bugs looked for may take (d)."""
    steps: int = 100
    """Most steps that the body is thought to make (k): two for each of its launches."""

    def _check(self, name: str, value: float) -> None:
        _check_seed(self.kind, name, value)
        if name != "seed" and not 1 <= value <= 1_000_000_000:
            raise UsageError(f"pct: {name}={value} makes no schedule: give a whole number from 1 on.")
        if name == "depth" and value > _DEEPEST:
            raise UsageError(
                f"pct: depth={value} promises nothing: give at most {_DEEPEST} (bugs of depth 1 to 3 are common)."
            )

    def bound(self, threads: int, steps: int) -> float | None:
        """The least probability with which such a schedule shows a bug of this depth: 1 / (n k^(d-1)).

        Args:
            threads: the streams that were launched on, and the host (n).
            steps: steps that the run made.

        Returns:
            None where the run made more steps than the schedule was made for, so that nothing is promised.
        """
        return None if steps > self.steps else 1 / (threads * self.steps ** (self.depth - 1))


@dataclass(frozen=True, slots=True)
class RandomWalk(Schedule):
    """Each step is made by one of the streams that can make one, or by the host, drawn uniformly."""

    kind = "random"

    seed: int = 0

    def _check(self, name: str, value: float) -> None:
        _check_seed(self.kind, name, value)


def _check_seed(kind: str, name: str, value: float) -> None:
    if name == "seed" and not 0 <= value <= _LARGEST:
        raise UsageError(f"{kind}: seed={value} is out of range: give a whole number from 0 to {_LARGEST}.")


KINDS: dict[str, type[Schedule]] = {
    kind.kind: kind for kind in (SubmissionOrder, VirtualTime, ProbabilisticConcurrencyTesting, RandomWalk)
}


def parse_schedule(text: str) -> Schedule:
    """The schedule that ``str(schedule)`` came from; parameters that are left out have their defaults.

    Raises:
        UsageError: the text is no schedule.
    """
    kind, colon, rest = text.partition(":")
    if kind not in KINDS:
        raise UsageError(f"{text!r} is no schedule: the kinds are {', '.join(KINDS)} (as in {_EXAMPLES}).")
    made = KINDS[kind]
    types: dict[str, type] = {each.name: type(each.default) for each in dataclasses.fields(made)}
    values: dict[str, Any] = {}
    for part in rest.split(",") if colon else []:
        name, equals, value = part.partition("=")
        if not equals or name not in types or name in values:
            raise UsageError(
                f"{text!r} is no schedule: {part!r} is not one of the parameters of {kind}, each once "
                f"({', '.join(types)}); write them as in {_EXAMPLES}."
            )
        if name == "hosts":
            values[name] = value if value == RECORD else HostOrder.parse(value)
        else:
            values[name] = _number(text, name, value, types[name])
    return made(**values)


def _number(text: str, name: str, value: str, wanted: type[float]) -> float:
    if re.fullmatch(r"[+-]?\d+" if wanted is int else r"[-+.\deE]+", value, re.ASCII):
        with contextlib.suppress(ValueError):
            return wanted(value)
    whole = "whole " if wanted is int else ""
    raise UsageError(f"{text!r} is no schedule: {name} takes a {whole}number, not {value!r}.")
