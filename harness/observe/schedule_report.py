"""What a schedule of the simulated accelerator did in one run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from harness.perturb.plan import LaunchId
from harness.perturb.schedule import HostOrder, ProbabilisticConcurrencyTesting, Schedule


class Executed(NamedTuple):
    """A launch that has run."""

    launch: LaunchId
    completed_us: float
    """When it was complete, on the schedule's clock; 0 if it has none."""


@dataclass(frozen=True, slots=True)
class ScheduleReport:
    """What a schedule did."""

    schedule: Schedule
    """Replays the run: its order of host threads is the one that was recorded."""
    executed: tuple[Executed, ...]
    """The launches in the order in which they ran, but those that ran when they were enqueued."""
    steps: int | None
    """Launches enqueued plus launches run (k), under the schedules that choose at random."""
    threads: int | None
    """Streams launched on, and the host (n), under PCT."""
    bound: float | None
    """Under PCT the least probability with which such a schedule shows a bug of its depth; None if more steps were made
    than it was made for."""
    host_us: float | None
    """The host's clock at the end, in virtual time."""

    @classmethod
    def make(cls, schedule: Schedule, raw: dict[str, Any], name: Callable[[tuple[int, int]], str]) -> ScheduleReport:
        """The report of a run under ``schedule``.

        Args:
            schedule: the one that was set.
            raw: what the native ``schedule_report`` gave.
            name: names a stream by (device, id).
        """
        if schedule.hosts is not None:
            segments, checksum = raw["hosts"]
            schedule = dataclasses.replace(schedule, hosts=HostOrder(tuple(map(tuple, segments)), checksum))
        executed = tuple(
            Executed(LaunchId(name((device, stream)), index), completed_us)
            for device, stream, index, completed_us in raw["executed"]
        )
        steps = int(raw["steps"]) if "steps" in raw else None
        threads = int(raw["threads"]) if "threads" in raw else None
        bound = None
        if isinstance(schedule, ProbabilisticConcurrencyTesting) and steps is not None and threads is not None:
            bound = schedule.bound(threads, steps)
        return cls(schedule, executed, steps, threads, bound, raw.get("host_us"))
