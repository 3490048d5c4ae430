"""A plugin of pytest: cases on the simulated accelerator are traced by the tap, as on a GPU, and not by the simulator.

The tap has no way to hold a launch there, so only happens-before judges such a run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.campaign import case
from harness.campaign.session import Session
from harness.observe import tap

Announce = Callable[[str], None] | None


def _open_native(self: Session, announce: Announce) -> Any:
    native = tap.install("sim", announce)
    native.set_sleep_fallback(lambda cycles: None)
    return native


def _use_tap(self: Session) -> None:
    self.instrument.use_tap(tap.observe_synchronizations("sim", None))
    self._tapped = True


Session._open_native = _open_native  # type: ignore[method-assign]
Session.use_tap = _use_tap  # type: ignore[method-assign]
case._ORACLES = 1  # that can see a control race: happens-before
