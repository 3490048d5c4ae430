"""The kill rate of somebody else's tests, in the form of our own (``twins.py``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from harness.campaign.twins import KILLED, REDUNDANT, SURVIVED
from harness.report.outcome import counted
from harness.report.tables import add_by_file, new_table, rate
from harness.upstream.study import UNSTABLE, LeftOut, TestStudy

_FIGURES = ("twins", "killed", "redundant", "survivors", "unstable", "kill rate")


def summary(left_out: Iterable[LeftOut]) -> dict[str, Any]:
    """Counts, and the kill rate in 0 to 1 of those that are neither redundant nor unstable (None if there are none)."""
    outcomes = [each.outcome for each in left_out]
    counts = {name: outcomes.count(name) for name in (KILLED, REDUNDANT, SURVIVED, UNSTABLE)}
    judged = counts[KILLED] + counts[SURVIVED]
    return {**counts, "judged": judged, "kill_rate": counts[KILLED] / judged if judged else None}


def to_json(studies: Sequence[TestStudy], device: str) -> dict[str, Any]:
    """Everything that is known."""
    return {
        "device": device,
        "summary": summary(_all(studies)),
        "issuers": [
            {"issuer": issuer, "kind": kind, **summary(left_out)}
            for (issuer, kind), left_out in _issuers(studies).items()
        ],
        "tests": [study.to_json() for study in studies],
    }


def tables(studies: Sequence[TestStudy], device: str) -> list[Table | str]:
    """The tables by test and by issuer, then sentences; the last one is the kill rate."""
    score = summary(_all(studies))
    counted_tests = [study for study in studies if study.excluded is None]
    excluded = [study for study in studies if study.excluded is not None]
    parts: list[Table | str] = [f"{counted(len(counted_tests), 'test')} with synchronizations left out, on {device}"]
    if counted_tests:
        parts += [_by_test(counted_tests), _by_issuer(studies)]
    for study in counted_tests:
        for each in study.left_out:
            if each.outcome == SURVIVED:
                parts.append(f"survivor: {study.nodeid} without {each.where}")
            elif each.outcome == UNSTABLE:
                parts.append(f"unstable: {study.nodeid}: {each.where} is not issued the same way each time")
    parts += [f"excluded: {study.nodeid}: {study.excluded}" for study in excluded]
    by_framework = sum(study.by_framework for study in counted_tests)
    if by_framework:
        parts.append(f"{counted(by_framework, 'synchronization')} of the test framework itself did not count.")
    if score[REDUNDANT]:
        parts.append(
            f"{counted(score[REDUNDANT], 'synchronization')} did not count either: the trace proves that the others "
            "imply what they order (a host synchronization right after backward does), or that nothing follows from "
            f"them. The rate is without them; with them it would be {score[KILLED]:,} of "
            f"{score['judged'] + score[REDUNDANT]:,}."
        )
    if score[SURVIVED]:
        parts.append(
            f"Of the {score[SURVIVED]:,} survivors, some may be redundant all the same: what goes around the "
            "dispatcher and the device guard is not in the trace. Compare with python -m harness twins on the same "
            "machine."
        )
    parts.append(
        f"upstream kill rate: {score[KILLED]:,} of {score['judged']:,}"
        + ("" if score["kill_rate"] is None else f" ({rate(score['kill_rate'])})")
    )
    return parts


def _all(studies: Iterable[TestStudy]) -> list[LeftOut]:
    return [each for study in studies if study.excluded is None for each in study.left_out]


def _issuers(studies: Iterable[TestStudy]) -> dict[tuple[str, str], list[LeftOut]]:
    issuers: dict[tuple[str, str], list[LeftOut]] = {}
    for each in _all(studies):
        issuers.setdefault((each.issuer, each.kind), []).append(each)
    return dict(sorted(issuers.items()))


def _cells(left_out: Sequence[LeftOut]) -> tuple[str, ...]:
    score = summary(left_out)
    counts = (len(left_out), score[KILLED], score[REDUNDANT], score[SURVIVED], score[UNSTABLE])
    return (*(f"{count:,}" for count in counts), rate(score["kill_rate"]))


def _style(left_out: Iterable[LeftOut]) -> str:
    return "red" if any(each.outcome == SURVIVED for each in left_out) else ""


def _by_test(studies: Sequence[TestStudy]) -> Table:
    table = new_table(["test"], _FIGURES)
    file = None
    for study in studies:
        file = add_by_file(table, study.nodeid, file, _cells(study.left_out), _style(study.left_out))
    return table


def _by_issuer(studies: Sequence[TestStudy]) -> Table:
    table = new_table(["issuer", "synchronization"], _FIGURES)
    for (issuer, kind), left_out in _issuers(studies).items():
        table.add_row(issuer, kind, *_cells(left_out), style=_style(left_out))
    return table
