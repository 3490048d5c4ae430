"""What JUnit XML says of a case beside its outcome: properties, which CI systems show and keep."""

from __future__ import annotations

from harness.campaign.result import CaseResult
from harness.judge.verdict import Verdict

_PREFIX = "sidestream."


def properties(result: CaseResult) -> list[tuple[str, str]]:
    """The properties of a case: how often it was repeated, under how many plans, with which verdicts."""
    kind = "defect" if result.defect else "control" if result.control is not None else "safe"
    found = {
        "kind": kind,
        "repetitions": result.repetitions,
        "plans": result.distinct_plans(),
        "launches": result.launches,
        **{verdict.value: result.count(verdict) for verdict in Verdict},
    }
    return [(f"{_PREFIX}{name}", str(value)) for name, value in found.items()]
