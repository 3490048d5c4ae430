"""Errors that reach the user as one sentence that says what to do."""

from harness.exit_codes import ExitCode


class SidestreamError(Exception):
    """Base of every error that is reported by its sentence alone, without a traceback."""

    exit_code = ExitCode.INFRASTRUCTURE


class UsageError(SidestreamError):
    """Something the user asked for cannot be done; the sentence names what to change."""

    exit_code = ExitCode.USAGE


class InfrastructureError(SidestreamError):
    """The machine, the driver or the toolchain failed, not the code under test."""


def first_line(error: BaseException) -> str:
    """An error of somebody else's in one line: its type, and the first line of what it says."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]
