"""What became of the twins: kill rates by family and by issuer, the survivors, and where the oracles disagree."""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

from harness.campaign.options import Options
from harness.campaign.twins import HAPPENS_BEFORE, KILLED, REDUNDANT, SURVIVED, VALUES, Twin, TwinStudy
from harness.files import write_whole
from harness.perturb.hold import DEFAULT_KIND
from harness.report.outcome import counted, outcome_of
from harness.report.tables import add_by_file, new_table, rate, rendered, width_for

SEERS = (VALUES, HAPPENS_BEFORE, "csan")
"""Who can notice that a synchronization is missing: the two oracles, and PyTorch's CUDA Sanitizer."""

TWINS = "twins.json"
"""The file of a run's folder that has its twins."""

_MOST_LISTED = 12
"""Of survivors, and of disagreements; they come in dozens, one a parametrization."""

ENGINE = (
    ("InputBuffer::add", "wait", "to sum"),
    ("InputBuffer::add", "record_stream", "of a gradient"),
    ("Engine::evaluate_function", "wait", "before a node"),
    ("GraphTask::exec_post_processing", "wait", "at the end"),
)
"""The functions of the autograd engine that synchronize streams (torch/csrc/autograd/input_buffer.cpp, engine.cpp).

Before torch 2.8, ``InputBuffer::add`` makes a node wait as well, and ``Engine::evaluate_function`` does not.
"""


def replay_command(nodeid: str, twin: Twin, options: Options) -> str:
    """The command that runs one twin again, under the plan that was aimed at it."""
    # Not report/failure.py's command: that one replays a repetition, with its seed and load.
    parts = ["python", "-m", "pytest", nodeid, "--device", options.device, "--plan", twin.plan]
    if options.hold != DEFAULT_KIND:
        parts += ["--hold", options.hold]
    return shlex.join([*parts, "--leave-out", twin.synchronization])


def describe_failures(study: TwinStudy, options: Options) -> str:
    """The text of a case whose twins were not all noticed, or were noticed against a proof, or of a control that was
    not seen to race; empty if all is as it should be."""
    if study.look is not None:
        return outcome_of(study.look).text or ""
    lines = []
    for twin in study.contradictions:
        lines += [
            f"a twin was noticed although its order is proved to be implied: {twin.where}",
            f"  killed   by {' and '.join(twin.killed_by)}",
            f"  proof    {twin.proof}",
            f"  replay   {replay_command(study.nodeid, twin, options)}",
            "  One of the two is wrong: happens-before, the tap, or what the device does.",
        ]
    if not study.survivors:
        return "\n".join(lines)
    lines.append(
        f"{counted(len(study.survivors), 'twin')} survived: nothing notices when the synchronization is left out"
    )
    for twin in study.survivors:
        lines += [
            f"  left out {twin.where}",
            f"  why      {twin.note}",
            f"  plan     {twin.plan}",
            f"  replay   {replay_command(study.nodeid, twin, options)}",
        ]
    lines.append("  Observe what it orders, or show that no program could.")
    return "\n".join(lines)


def write_twins(reporter: pytest.TerminalReporter, studies: Sequence[TwinStudy], options: Options) -> None:
    """Write the tables, the survivors and the disagreements."""
    reporter.write_sep("=", f"sidestream: twins of {counted(len(studies), 'case')} on {options.device}")
    terminal = reporter._tw
    parts: list[Table | str] = [_by_family(studies), _by_issuer(studies), *conclusions(studies, options)]
    parts += who_sees_what(studies)
    width = width_for(terminal.fullwidth, is_terminal=terminal.hasmarkup)
    for line in rendered(parts, width, colour=terminal.hasmarkup):
        reporter.write_line(line)


def conclusions(studies: Sequence[TwinStudy], options: Options) -> list[str]:
    """What the twins prove, in sentences; then the survivors and the disagreements, each with its replay."""
    twins = [twin for study in studies for twin in study.twins]
    score = summary(twins)
    lines = [
        f"{counted(score['twins'], 'twin')}: {score['killed']:,} killed, {score['redundant']:,} redundant (the others "
        f"imply the order), {score['survived']:,} survived."
    ]
    if score["twins"] > score["redundant"]:
        lines.append(
            f"Kill rate: {rate(score['kill_rate'])}; by values alone {rate(score['kill_rate_values'])}, by "
            f"happens-before alone {rate(score['kill_rate_happens_before'])}."
        )
    if score["repetitions_to_kill_median"] is not None:
        lines.append(
            f"Aimed repetitions until a value was wrong: median {score['repetitions_to_kill_median']:g}, at most "
            f"{score['repetitions_to_kill_max']}."
        )
    for defect, nouns in ((False, "controls"), (True, "cases of known defects of PyTorch")):
        looks = [study.look for study in studies if study.look is not None and study.defect is defect]
        if looks:
            lines.append(f"{sum(look.is_seen for look in looks):,} of {len(looks):,} {nouns} raced as they are.")
    for title, outcome in (("survivor", SURVIVED), ("disagreement", KILLED)):
        noted = [(study, twin) for study in studies for twin in study.twins if twin.outcome == outcome and twin.note]
        for study, twin in noted[:_MOST_LISTED]:
            lines.append(f"{title}: {study.nodeid} without {twin.where}: {twin.note}.")
            lines.append(f"  replay   {replay_command(study.nodeid, twin, options)}")
        if len(noted) > _MOST_LISTED:
            lines.append(f"{counted(len(noted) - _MOST_LISTED, f'further {title}')}: --twins-json names them all.")
    return lines


def who_sees_what(studies: Sequence[TwinStudy]) -> list[Table | str]:
    """The oracles beside PyTorch's CUDA Sanitizer: by issuer and kind, how many twins each combination of them saw.

    Empty if the sanitizer was not asked.
    """
    answered = [study for study in studies if study.csan is not None]
    if not answered:
        return []
    twins = [twin for study in answered for twin in study.twins if twin.csan is not None]
    judged = [twin for twin in twins if twin.outcome != REDUNDANT]
    redundant = [twin for twin in twins if twin.outcome == REDUNDANT]
    seen = [_seers(twin) for twin in judged]
    combinations = sorted(set(seen), key=lambda seers: (-len(seers), seers))
    table = new_table(
        ["issuer", "synchronization"], ["twins", *SEERS, *(_combination(seers) for seers in combinations)]
    )
    rows: dict[tuple[str, str], list[tuple[str, ...]]] = {}
    for twin, seers in zip(judged, seen, strict=True):
        rows.setdefault((twin.issuer, twin.kind), []).append(seers)
    for (issuer, kind), found in [*sorted(rows.items()), (("all", ""), seen)]:
        figures = [len(found), *(sum(seer in seers for seers in found) for seer in SEERS)]
        figures += [found.count(seers) for seers in combinations]
        table.add_row(issuer, kind, *(f"{figure:,}" for figure in figures))
    safe = sum(bool(study.csan) for study in answered)
    lines = [
        f"csan reports {counted(safe, 'complete case')} of {len(answered):,}, which are safe, and "
        f"{counted(sum(bool(twin.csan) for twin in redundant), 'redundant twin')} of {len(redundant):,}."
    ]
    silent = sum(twin.csan is None for study in studies for twin in study.twins)
    if silent:
        lines.append(
            f"{counted(silent, 'twin')} not in this table: csan reports the complete case as well, or says nothing of "
            "it, or the synchronization is not issued under it."
        )
    return [table, *lines]


def _seers(twin: Twin) -> tuple[str, ...]:
    return tuple(seer for seer in SEERS if (twin.csan if seer == "csan" else seer in twin.killed_by))


def _combination(seers: tuple[str, ...]) -> str:
    if not seers:
        return "nobody"
    return seers[0] + " alone" if len(seers) == 1 else " and\n".join(seers)


def summary(twins: Iterable[Twin]) -> dict[str, Any]:
    """The figures of some twins: counts, rates in 0 to 1 of those that are not redundant (None if all are)."""
    twins = list(twins)
    judged = [twin for twin in twins if twin.outcome != REDUNDANT]
    to_kill = [twin.repetitions_to_kill for twin in twins if twin.repetitions_to_kill is not None]

    def share(kills: int) -> float | None:
        return kills / len(judged) if judged else None

    by_values = sum(VALUES in twin.killed_by for twin in judged)
    by_happens_before = sum(HAPPENS_BEFORE in twin.killed_by for twin in judged)
    killed = sum(twin.outcome == KILLED for twin in twins)
    return {
        "twins": len(twins),
        "killed": killed,
        "killed_by_values": by_values,
        "killed_by_happens_before": by_happens_before,
        "redundant": len(twins) - len(judged),
        "survived": len(judged) - killed,
        "kill_rate": share(killed),
        "kill_rate_values": share(by_values),
        "kill_rate_happens_before": share(by_happens_before),
        "repetitions_to_kill_median": statistics.median(to_kill) if to_kill else None,
        "repetitions_to_kill_max": max(to_kill, default=None),
    }


def write_twins_json(path: Path, studies: Sequence[TwinStudy], options: Options) -> None:
    """Write everything that is known of the twins, proofs included, whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    every = [twin for study in studies for twin in study.twins]
    data = {
        "device": options.device,
        "summary": summary(every),
        "families": {name: summary(twins) for name, twins in _families(studies).items()},
        "issuers": [
            {"issuer": issuer, "kind": kind, "issued": issued, **summary(twins)}
            for (issuer, kind), (issued, twins) in _issuers(studies).items()
        ],
        "cases": [study.to_json() for study in studies],
    }
    write_whole(path, json.dumps(data, indent=1))


def _families(studies: Iterable[TwinStudy]) -> dict[str, list[Twin]]:
    families: dict[str, list[Twin]] = {}
    for study in studies:
        if not study.control:
            families.setdefault(study.nodeid.partition("[")[0], []).extend(study.twins)
    return families


def _issuers(studies: Sequence[TwinStudy]) -> dict[tuple[str, str], tuple[int, list[Twin]]]:
    """By issuer and kind; the engine's own functions first, also those that were never reached."""
    issued: dict[tuple[str, str], int] = {(issuer, kind): 0 for issuer, kind, _ in ENGINE}
    twins: dict[tuple[str, str], list[Twin]] = {}
    for study in studies:
        for key, number in study.issued.items():
            issuer, _, kind = key.rpartition(" ")
            if kind != "record":
                issued[issuer, kind] = issued.get((issuer, kind), 0) + number
        for twin in study.twins:
            twins.setdefault((twin.issuer, twin.kind), []).append(twin)
    return {key: (number, twins.get(key, [])) for key, number in issued.items()}


_COLUMNS = ("twins", "by values", "by happens-before", "redundant", "survivors", "kill rate", "to kill")


def _cells(twins: Sequence[Twin]) -> tuple[str, ...]:
    score = summary(twins)
    median, most = score["repetitions_to_kill_median"], score["repetitions_to_kill_max"]
    return (
        f"{score['twins']:,}",
        f"{score['killed_by_values']:,}",
        f"{score['killed_by_happens_before']:,}",
        f"{score['redundant']:,}",
        f"{score['survived']:,}",
        rate(score["kill_rate"]),
        "" if median is None else f"{median:g}, {most}",
    )


def _style(twins: Iterable[Twin]) -> str:
    return "red" if any(twin.outcome == SURVIVED for twin in twins) else ""


def _by_family(studies: Sequence[TwinStudy]) -> Table:
    table = new_table(["family"], _COLUMNS)
    file = None
    for name, twins in _families(studies).items():
        file = add_by_file(table, name, file, _cells(twins), _style(twins))
    return table


def _by_issuer(studies: Sequence[TwinStudy]) -> Table:
    table = new_table(["issuer", "synchronization"], _COLUMNS)
    what = {(issuer, kind): text for issuer, kind, text in ENGINE}
    for (issuer, kind), (issued, twins) in _issuers(studies).items():
        text = kind + (f" {what[issuer, kind]}" if (issuer, kind) in what else "")
        if not issued:
            table.add_row(issuer, text, "not reached", style="yellow")
        else:
            table.add_row(issuer, text, *_cells(twins), style=_style(twins))
    return table
