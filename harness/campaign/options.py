"""What the user asked of a run; plain data that travels from the controller to its workers."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from harness.observe.synchronizations import Fault
from harness.perturb.hold import DEFAULT_KIND
from harness.perturb.load import DEFAULT_MEMORY_MIB
from harness.perturb.plan import Plan

DEFAULT_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Options:
    """The settings of a run."""

    device: str = "sim"
    """``sim`` or ``cuda``; which of several GPUs is decided by the order of the visible ones."""
    seed: int = 0
    plan: Plan | None = None
    """The one plan of every repetition, or None for the cycle of plans."""
    hold: str = DEFAULT_KIND
    """How launches are held on a real device: one of ``harness.perturb.hold.KINDS``."""
    hold_ms: float | None = None
    """The length of a sleep that holds a launch, or None to measure it."""
    loads: tuple[str, ...] = field(default=())
    """The dimensions of load, such as ``alloc:0.5``; see ``harness.perturb.load``."""
    load_memory_mib: float = DEFAULT_MEMORY_MIB
    """How much memory of the device the load may use."""
    limit_s: float = DEFAULT_LIMIT_S
    """How long a repetition may take before it is cut."""
    max_races: int | None = None
    """A case that is to hold is not repeated any more in a process once it has raced so often there."""
    deadline: float | None = None
    """No repetition starts later, in seconds since the epoch."""
    fresh: int | None = None
    """The number of the one repetition, which is run before the process has learnt anything of the case."""
    session: str = ""
    """Which session of the run this is; a run that is resumed has several."""
    resume: bool = False
    """Whether the repetitions that the run's folder has are not to be run again."""
    turns: str | None = None
    """The file by which workers on one GPU take turns, or None where none share one."""
    fault: Fault | None = None
    """The synchronization that goes wrong in every repetition."""
    twins: bool = False
    """Whether to study the twins of each case rather than to repeat it."""
    reduce_repetitions: int | None = None
    """How often a plan is tried where the plan of a race is to be reduced; None where none is."""
    script: str | None = None
    """The file that the case is to be written to as a stand-alone script, rather than repeated."""
    twin_repetitions: int | None = None
    """How many aimed repetitions a twin gets; None for one on the simulator and three on a real device."""
    csan_folder: str | None = None
    """The folder with the questions, in the process that asks PyTorch's CUDA Sanitizer about the twins."""

    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return self.deadline is not None and time.time() >= self.deadline
