"""How long a hold on a real device lasts."""

from __future__ import annotations

from dataclasses import dataclass

SHORTEST_MS = 4.0
LONGEST_MS = 500.0
_MARGIN = 3.0


@dataclass(slots=True)
class HoldLength:
    """The length of the sleep that holds a launch; it grows when a hold was over before the body had been enqueued.

    A hold is long enough when everything else has run before it ends, so the default is a multiple of what the whole
    body takes unheld, measured where it will be used: on this machine, under this load.
    """

    milliseconds: float = SHORTEST_MS
    fixed: bool = False
    """Whether the user gave the length; then it neither adapts nor grows."""

    def fit(self, unheld_ms: float) -> None:
        """Adapt to a body that takes ``unheld_ms`` from its first launch to the end of its last."""
        if not self.fixed:
            self.milliseconds = min(LONGEST_MS, max(SHORTEST_MS, _MARGIN * unheld_ms))

    def grow(self) -> None:
        """Double the length: a hold turned out too short."""
        if not self.fixed:
            self.milliseconds = min(LONGEST_MS, 2 * self.milliseconds)
