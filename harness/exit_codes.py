"""Exit codes, the same for every command and compatible with pytest's own."""

from enum import IntEnum


class ExitCode(IntEnum):
    """What the exit status of a Sidestream command means."""

    CLEAN = 0
    RACE = 1
    """A race, a timed-out repetition, or a failed test."""
    INTERRUPTED = 2
    INFRASTRUCTURE = 3
    """An internal error, or a machine that broke under the run."""
    USAGE = 4
    NOTHING_RAN = 5
    INCONCLUSIVE = 6
    """The perturbation or the load did not take effect, so the run proves nothing."""


def of_process(status: int) -> ExitCode:
    """The exit code of a process that uses these; what a signal ended, or has none of them, is infrastructure."""
    return ExitCode(status) if status in set(ExitCode) else ExitCode.INFRASTRUCTURE
