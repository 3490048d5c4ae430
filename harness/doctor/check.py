"""What a check says: one line, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from harness.exit_codes import ExitCode


class Status(str, Enum):
    """How a check went."""

    OK = "ok"
    WARNING = "warning"
    """Races can be found, but something costs power or time, or will surprise."""
    PROBLEM = "problem"
    """Races cannot be found, or the harness cannot run."""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor's."""

    name: str
    found: str
    status: Status = Status.OK
    advice: str = ""
    """What to do; empty where nothing needs to be done."""
    exit_code: ExitCode = ExitCode.CLEAN


def warning(name: str, found: str, advice: str) -> Check:
    """Something to know of."""
    return Check(name, found, Status.WARNING, advice)


def broken(name: str, found: str, advice: str) -> Check:
    """The harness cannot run here."""
    return Check(name, found, Status.PROBLEM, advice, ExitCode.INFRASTRUCTURE)


def blind(name: str, found: str, advice: str) -> Check:
    """The harness can run here, and would prove nothing."""
    return Check(name, found, Status.PROBLEM, advice, ExitCode.INCONCLUSIVE)


def exit_code_of(checks: Iterable[Check]) -> ExitCode:
    """As for a run: a machine that is broken comes before one that proves nothing."""
    codes = {check.exit_code for check in checks}
    worst_first = (ExitCode.INFRASTRUCTURE, ExitCode.INCONCLUSIVE)
    return next((code for code in worst_first if code in codes), ExitCode.CLEAN)
