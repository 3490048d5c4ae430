"""What one process needs to run cases: the backend, its instrument, its streams, the load; opened once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from harness.backends.select import Backend, SimulatedBackend, open_backend
from harness.campaign.lab import Lab, StreamPool
from harness.campaign.options import Options
from harness.campaign.turns import Turns
from harness.errors import UsageError
from harness.observe.instrument import Instrument
from harness.observe.streams import StreamNames
from harness.perturb.hold import GATE_LIMIT_MS, HoldLength

if TYPE_CHECKING:
    from harness.perturb.load.load import LoadReport
    from harness.perturb.load.loads import Loads

_LOADED_TURN_S = 0.25


class Session:
    """One process' accelerator, ready to run cases. Close it, or the load outlives the run."""

    def __init__(self, options: Options, announce: Callable[[str], None] | None = None) -> None:
        """Open the backend.

        Raises:
            UsageError: the device or the load that was asked for cannot be had.
        """
        # One thread a worker: the simulator's kernels are tiny, and workers share the cores.
        torch.set_num_threads(1)
        self.options = options
        self._announce = announce
        self._tapped = False
        self.backend: Backend = open_backend(options.device, announce)
        self.simulated = isinstance(self.backend, SimulatedBackend)
        self._native = self._open_native(announce)
        self.instrument = Instrument(self._native, StreamNames())
        self._cycles_per_ms = 0.0
        self._load: Loads | None = None
        self._warm_up()
        if self.holds_by_gate:
            self._use_gates()
        self.turns = self._open_turns()
        # In a turn, since what is measured here is measured wrong while other workers use the GPU.
        try:
            with self.turns.turn():
                if self.holds_by_sleep:
                    self._cycles_per_ms = self.backend.calibrate_sleep_cycles_per_ms()  # type: ignore[attr-defined]
                if options.loads:
                    self._load = self._start_load()
        finally:
            self.turns.end()
        self._pool = StreamPool(self.backend.device.type, self._load.stream_ids if self._load else ())
        # On a real device always: what goes around the device guard would be missing in the trace.
        if options.twins or options.fault is not None or not self.simulated:
            self.use_tap()

    def _warm_up(self) -> None:
        # The first operations of a process import parts of torch and create the device's context, which takes seconds;
        # no repetition's time limit should pay for that.
        leaf = torch.ones(1, device=self.backend.device, requires_grad=True)
        (leaf * leaf).sum().backward()
        self.backend.synchronize()

    def _open_native(self, announce: Callable[[str], None] | None) -> Any:
        if isinstance(self.backend, SimulatedBackend):
            return self.backend.native
        from harness.observe import tap

        return tap.install(self.backend.device.type, announce)

    @property
    def holds_by_gate(self) -> bool:
        """Whether launches are held by gates."""
        return not self.simulated and self.options.hold == "gate"

    @property
    def holds_by_sleep(self) -> bool:
        """Whether launches are held by sleeps, which have a length."""
        return not self.simulated and self.options.hold == "sleep"

    def _use_gates(self) -> None:
        try:
            self._native.use_gates(GATE_LIMIT_MS)
        except RuntimeError as error:
            raise UsageError(f"--hold gate cannot be had here: {error}; use --hold sleep.") from error

    def _start_load(self) -> Loads:
        from harness.perturb.load import parse_loads
        from harness.perturb.load.loads import Loads

        load = Loads(
            parse_loads(",".join(self.options.loads)),
            self.backend.device,
            None if self.simulated else self._native,
            seed=self.options.seed,
            memory_mib=self.options.load_memory_mib,
        )
        load.start()
        return load

    def _open_turns(self) -> Turns:
        if self.options.turns is None:
            return Turns(None)
        # Between turns the load rests as well. It takes milliseconds to fill its queue, so its turns are longer.
        return Turns(
            Path(self.options.turns),
            length_s=_LOADED_TURN_S if self.options.loads else 0.0,
            on_begin=self._resume_load,
            on_end=self._pause_load,
        )

    def _resume_load(self) -> None:
        if self._load is not None:
            self._load.resume()

    def _pause_load(self) -> None:
        if self._load is not None:
            self._load.pause()

    def use_tap(self) -> None:
        """Let synchronizations be seen and left out from now on, until the session is closed."""
        from harness.observe import tap

        function = self._native.last_entry_function() if self.simulated else None
        self.instrument.use_tap(tap.observe_synchronizations(self.backend.device.type, function, self._announce))
        self._tapped = True

    def lab(self) -> Lab:
        """A new lab, for one case."""
        return Lab(self.backend, self.instrument, self._pool)

    def hold_length(self) -> HoldLength:
        """The length of holds that a new case starts with."""
        if self.options.hold_ms is not None:
            return HoldLength(self.options.hold_ms, fixed=True)
        return HoldLength()

    def set_hold(self, length: HoldLength) -> None:
        """Make sleeps last this long from now on; other holds last until something forces them."""
        if self.holds_by_sleep:
            self._native.set_hold_cycles(int(length.milliseconds * self._cycles_per_ms))

    def is_broken_by(self, error: BaseException) -> bool:
        """Whether an error has left the device unusable for the rest of the process (a sticky CUDA error)."""
        return not self.simulated and self.backend.is_sticky_error(error)  # type: ignore[attr-defined]

    def load_reports(self) -> list[LoadReport]:
        """What each dimension of the load achieved, and what it achieves alone."""
        return [] if self._load is None else self._load.report()

    def close(self) -> None:
        """End the turn and stop the load."""
        self.turns.close()
        if self._tapped:
            from harness.observe import tap

            tap.ignore_synchronizations()
        if self._load is not None:
            self._load.stop()
            self._load = None
        if self.holds_by_gate:
            self._native.use_sleeps()
