"""How a launch is held on a real device: by a sleep, for how long; or by a gate."""

from __future__ import annotations

from dataclasses import dataclass

from harness.errors import UsageError

KINDS = {
    "sleep": "a kernel that keeps the stream busy for some milliseconds",
    "gate": "a word in the host's memory that the stream waits for until the body has been enqueued",
}
"""The kinds of hold, each with what it is."""
DEFAULT_KIND = "sleep"

SHORTEST_MS = 4.0
LONGEST_MS = 500.0
_MARGIN = 3.0

GATE_LIMIT_MS = 2000.0
"""How long a gate stays closed at most. What has not run by then waits for the gate, whether or not it should: a queue
of the hardware that streams share, an allocation, a kernel that is loaded."""


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


def require_kind(kind: str, device: str, is_rocm: bool) -> None:
    """Refuse a kind of hold where there is none of it.

    Args:
        kind: what the user gave.
        device: a resolved device: ``sim``, ``cuda`` or ``cuda:N``.
        is_rocm: whether CUDA means ROCm in this build of torch.

    Raises:
        UsageError: there is no such kind, or not on this device.
    """
    if kind not in KINDS:
        raise UsageError(f"--hold {kind} is unknown: use {' or '.join(KINDS)}.")
    if device == "sim":
        raise UsageError(
            f"--hold {kind} is a way to hold launches on a real device; the simulator's scheduler holds them exactly: "
            "leave --hold out, or use --device cuda."
        )
    if kind == "gate" and is_rocm:
        raise UsageError("--hold gate needs CUDA's driver, and this torch is built for ROCm: use --hold sleep.")
