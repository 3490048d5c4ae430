"""What became of each hold of a repetition."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from harness.observe.trace import SourceLine
from harness.perturb.plan import LaunchId


class HoldState(str, Enum):
    """Whether a hold is proved to have taken effect."""

    PENDING = "pending"
    """The held launch was still pending at the end of the body: proof."""
    FORCED = "forced"
    """A host sync of the body had to wait for it while it was pending: proof, for what was enqueued before."""
    RAN = "ran"
    """It had already run when the host first looked: no proof."""
    EXPIRED = "expired"
    """It was held for so long that the gate was opened by its watchdog: something else waited for it, so no proof."""
    MISSING = "missing"
    """The body never made this launch: no proof."""

    def __str__(self) -> str:
        return self.value

    @property
    def proved(self) -> bool:
        """Whether everything that could overtake the held launch had the chance to."""
        return self is HoldState.PENDING or self is HoldState.FORCED


class HoldOutcome(NamedTuple):
    """One hold of a plan and what became of it."""

    launch: LaunchId
    state: HoldState
    line: SourceLine | None
    """The host sync that forced it; None in every other state, and where lines were not recorded."""
