"""What the load achieved, in sentences and in a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from harness.perturb.load.load import LoadReport

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SCALED = ("FLOP/s", "B/s")


def load_sentences(reports: Sequence[LoadReport]) -> list[str]:
    """One sentence a dimension, the process named in which it achieved the least; then which were not delivered."""
    lines = []
    for dimension in dict.fromkeys(report.dimension for report in reports):
        of_dimension = [report for report in reports if report.dimension == dimension]
        worst = min(of_dimension, key=lambda report: -1.0 if report.share is None else report.share)
        where = f" in {worst.worker}, the least of {len(of_dimension)} processes" if len(of_dimension) > 1 else ""
        lines.append(f"Load {_name(worst)}: {_achieved(worst)}{where}.")
    information = {report.information for report in reports if report.information}
    lines += [f"The GPU under load, at the end: {each}." for each in sorted(information)]
    undelivered = [report for report in reports if not report.is_delivered]
    for dimension in dict.fromkeys(report.dimension for report in undelivered):
        report = next(report for report in undelivered if report.dimension == dimension)
        lines.append(
            f"The load {dimension} was not delivered, which takes {report.least_share:.0%} of what it achieves alone: "
            "this run proves nothing about cases under that load."
        )
    return lines


def _name(report: LoadReport) -> str:
    return report.dimension if report.intensity == 1.0 else f"{report.dimension}:{report.intensity:g}"


def _achieved(report: LoadReport) -> str:
    if report.achieved is None:
        return "ran too briefly to tell what it achieved, so give it more repetitions"
    share = "" if report.share is None else f" ({report.share:.0%})"
    return (
        f"{rate(report.achieved, report.unit)} beside the cases, {rate(report.alone or 0.0, report.unit)} alone{share}"
    )


def rate(value: float, unit: str) -> str:
    """A rate with its unit: ``45.0 TFLOP/s``, ``212,000 launches/s``, ``1.5 cores``."""
    if unit not in _SCALED:
        return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.2f} {unit}"
    factor, prefix = next(((factor, prefix) for factor, prefix in _PREFIXES if value >= factor), (1.0, ""))
    return f"{value / factor:.1f} {prefix}{unit}"


def write_loads_json(path: Path, reports: Iterable[LoadReport]) -> None:
    """Write the reports of one process.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(json.dumps([asdict(report) for report in reports], indent=1) + "\n")
