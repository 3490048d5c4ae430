"""Finds the repetition that an id names, and with what options it ran."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.campaign.options import Options
from harness.campaign.reader import Run, find_runs
from harness.campaign.run_directory import run_directories
from harness.campaign.store import RepetitionRecord
from harness.errors import UsageError
from harness.observe.synchronizations import Fault, SynchronizationId
from harness.perturb.hold import DEFAULT_KIND
from harness.perturb.load import DEFAULT_MEMORY_MIB
from harness.perturb.plan import Plan

_ID = re.compile(r"[0-9a-f]{8}-f?\d+")


@dataclass(frozen=True, slots=True)
class Found:
    """A repetition, and the options of its run that decide what it does."""

    record: RepetitionRecord
    options: Options
    directory: Path
    """Of its run."""

    @property
    def plan(self) -> Plan:
        """Its plan."""
        return Plan.parse(self.record.plan)


def is_id(text: str) -> bool:
    """Whether a text is the id of a repetition."""
    return _ID.fullmatch(text) is not None


def find_repetition(identifier: str, results: Path | None, root: Path) -> Found:
    """The repetition of that id, in the newest run that has it.

    Args:
        identifier: as failures and ``docs/results.md`` write it: the key of a case, ``-``, the repetition.
        results: a folder of runs; None for those in ``root/.sidestream/runs``.
        root: where runs leave their results.

    Raises:
        UsageError: no run has it.
    """
    if not is_id(identifier):
        raise UsageError(
            f"{identifier!r} is no id of a repetition: it is 8 digits, a hyphen and a number (0c8b7a51-3)."
        )
    runs = find_runs([results]) if results is not None else [Run(folder) for folder in run_directories(root)]
    key = identifier.partition("-")[0].encode()
    for run in sorted(runs, key=lambda run: run.directory.name, reverse=True):
        if not any(key in path.read_bytes() for path in run.directory.glob("*.jsonl")):
            continue
        found = [record for record in run if record.id == identifier]
        if found:
            # A repetition that was cut and run again when the run was resumed has two lines; the last one counts.
            record = found[-1]
            return Found(record, _options(run.headers[record.worker]), run.directory)
    where = results if results is not None else root / ".sidestream" / "runs"
    raise UsageError(f"no run in {where} has a repetition {identifier}: name the folder of its run with --results.")


def _options(header: dict[str, Any]) -> Options:
    fault = None
    for name in ("leave_out", "misdirect"):
        if header.get(name):
            fault = Fault(SynchronizationId.parse(header[name]), misdirect=name == "misdirect")
    hold = header.get("hold")
    return Options(
        device=header["device"],
        seed=header["seed"],
        hold=DEFAULT_KIND if hold in (None, "scheduler") else hold,
        hold_ms=header.get("hold_ms"),
        loads=tuple(header.get("loads") or ()),
        load_memory_mib=header.get("load_memory_mib", DEFAULT_MEMORY_MIB),
        fault=fault,
    )
