"""What the counts of a case mean for the test: its exit code and the text that pytest shows."""

from __future__ import annotations

from dataclasses import dataclass

from harness.campaign.result import CaseResult
from harness.exit_codes import ExitCode
from harness.judge.verdict import Verdict

_MOSTLY = 0.5
"""A case whose repetitions are inconclusive beyond this share proves nothing."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a case ended."""

    exit_code: ExitCode
    text: str | None
    """What to say about it; None if it is as it should be."""


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun: ``1 case``, ``1,200 cases``; the plural where it is no ``s`` more."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def outcome_of(result: CaseResult) -> Outcome:
    """Judge the counts of a case."""
    races = 0 if result.control is not None else result.count(Verdict.RACE)
    timeouts = result.count(Verdict.TIMEOUT)
    if races or timeouts:
        counts = [f"{races:,} raced"] * bool(races) + [f"{timeouts:,} timed out"] * bool(timeouts)
        kind = "race" if races else "timeout"
        what = f"{kind}: of {counted(result.repetitions, 'repetition')} {' and '.join(counts)}"
        return Outcome(ExitCode.RACE, _text(what, result))
    if result.count(Verdict.INFRA):
        lost = result.count(Verdict.INFRA)
        what = f"{counted(lost, 'repetition')} {'was' if lost == 1 else 'were'} lost to the machine"
        return Outcome(ExitCode.INFRASTRUCTURE, _text(what, result))
    inconclusive = result.count(Verdict.INCONCLUSIVE)
    if inconclusive > _MOSTLY * result.repetitions:
        what = f"inconclusive: in {inconclusive} of {result.repetitions} repetitions the hold did not take effect"
        return Outcome(ExitCode.INCONCLUSIVE, _text(what, result))
    unseen = result.unseen()
    if unseen is not None:
        return Outcome(ExitCode.RACE, _text(_unseen_text(result, unseen), result))
    return Outcome(ExitCode.CLEAN, None)


def _unseen_text(result: CaseResult, unseen: str) -> str:
    if not result.defect:
        what = f"this run could not have seen the race: {result.nodeid} is a control, unsafe because"
        return f"{what}\n  {result.control}\nbut {unseen}."
    what = f"{result.nodeid} is registered as a defect of PyTorch, described in"
    if result.count(Verdict.RACE):
        return f"this run could not have seen the race: {what}\n  {result.control}\nbut {unseen}."
    return (
        f"fixed upstream? {what}\n  {result.control}\nbut {unseen}. If it is fixed in this version of torch, or on "
        "this kind of device, say so in the marker: the case is an ordinary safe one there."
    )


def _text(headline: str, result: CaseResult) -> str:
    parts = [headline]
    for cause in result.causes.values():
        others = cause.repetitions - 1
        like = counted(others, "more repetition")
        more = f"\n  ({like} like this one; the results folder has a line for each)" if others else ""
        parts.append(cause.text + more)
    return "\n\n".join(parts)
