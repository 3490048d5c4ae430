"""Runs a case once and again outside its loop of repetitions, each time in turn and within the time limit."""

from __future__ import annotations

from typing import Any

from harness.backends.out_of_memory import is_out_of_memory
from harness.campaign.case import Case
from harness.campaign.repetition import Repetition
from harness.campaign.turns import Turns
from harness.campaign.watchdog import RepetitionTimeout, Watchdog
from harness.errors import InfrastructureError, SidestreamError, first_line
from harness.observe.synchronizations import Fault
from harness.perturb.plan import Plan


class Runs:
    """Runs a case, each time within the time limit and in this process' turn on the device."""

    def __init__(self, case: Case, turns: Turns, watchdog: Watchdog) -> None:
        self.case = case
        self._turns = turns
        self._watchdog = watchdog

    def discover(self) -> None:
        """Learn what the case consists of."""
        with self._turns.turn(), self._watchdog.guard():
            self.case.discover()

    def once(self, plan: Plan, **settings: Any) -> Repetition:
        """Run it once; the settings are those of ``Instrument.begin``.

        Raises:
            InfrastructureError: an error has left the device unusable for the rest of the process.
            Exception: whatever the body raised, or a launch that was carried out late.
        """
        with self._turns.turn(), self._watchdog.guard():
            return self.case.once(plan, **settings)

    def twin(self, plan: Plan, fault: Fault, **settings: Any) -> Repetition | Exception:
        """Run it with a fault; an error that the fault makes it end with is an answer, too.

        Raises:
            InfrastructureError: as for :meth:`once`; or memory ran out, which is no answer.
        """
        try:
            return self.once(plan, fault=fault, **settings)
        except (RepetitionTimeout, SidestreamError):
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise InfrastructureError(f"memory ran out in {self.case.nodeid}: {first_line(error)}") from error
            if self.case.is_broken_by(error):
                raise InfrastructureError(
                    f"the device is unusable after {self.case.nodeid} under {plan} without {fault.target}: "
                    f"{first_line(error)}"
                ) from error
            return error
