"""The catalogue: every case of the suite with what it promises, where that comes from, and what it crosses."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from harness.judge.engine_edges import EDGES
from harness.markers import contract_sources, control_marker, defect_marker, devices_needed
from harness.report.outcome import counted

PATH = Path(__file__).parent.parent / "docs" / "catalogue.md"
COMMAND = "python -m harness catalogue --twins --write"

SAFE, CONTROL, DEFECT = "safe", "control", "defect"

_STATIC_COLUMNS = 6
"""Of the table of tests, those that need no run."""
_MEASURED = {"| `": _STATIC_COLUMNS, "| **": 4}
"""How many columns of a table come before those that only a run can fill, by how its rows begin."""
_TWINS = "Twins: "


@dataclass(slots=True)
class Entry:
    """One case."""

    nodeid: str
    family: str
    """The file, relative to the root of the suite."""
    contract: str
    """The first line of the file's docstring."""
    case: str
    """The name of the function."""
    sentence: str
    """The promise, from its docstring."""
    sources: list[str]
    """Where the promise comes from: the markers ``contract``, the nearest first."""
    kind: str
    """``safe``, ``control`` or ``defect``."""
    unsafe: str | None
    """For a control, the sentence that makes it unsafe; for a defect, the file that describes it."""
    versions: str | None
    """For a defect, the versions of torch that have it."""
    devices: int
    """How many it needs."""
    edges: list[str] = field(default_factory=list)
    """The edges of the engine that it crosses; from a run, as all that follows."""
    streams: list[str] | None = None
    """The streams that it launches on."""
    twins: dict[str, int] | None = None
    """How many twins there are, by what became of them."""


@dataclass(slots=True)
class Catalogue:
    """All cases, in the order of the suite."""

    entries: list[Entry] = field(default_factory=list)

    def add_twins(self, studies: Iterable[Mapping[str, Any]]) -> None:
        """Add what the twins found: the cases of the JSON that ``--twins-json`` writes."""
        by_nodeid = {study["nodeid"]: study for study in studies}
        for entry in self.entries:
            study = by_nodeid.get(entry.nodeid)
            if study is None:
                continue
            entry.streams = study["streams"]
            entry.edges = study["edges"]
            entry.twins = {}
            for twin in study["twins"]:
                entry.twins[twin["outcome"]] = entry.twins.get(twin["outcome"], 0) + 1

    def to_json(self) -> dict[str, Any]:
        """Plain data, with what the edges are and how many cases cross each (None without a run)."""
        crossing = {name: self._crossing(name) if self.is_measured else None for name in EDGES}
        edges = {name: {**edge._asdict(), "cases": crossing[name]} for name, edge in EDGES.items()}
        return {"cases": [asdict(entry) for entry in self.entries], "edges": edges}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Catalogue:
        """What ``to_json`` made the data of."""
        return cls([Entry(**entry) for entry in data["cases"]])

    def to_markdown(self) -> str:
        """The document."""
        kinds = [sum(entry.kind == kind for entry in self.entries) for kind in (SAFE, CONTROL, DEFECT)]
        families = dict.fromkeys(entry.family for entry in self.entries)
        lines = [
            "# The catalogue",
            "",
            f"Made by `{COMMAND}`; do not edit it by hand.",
            "",
            f"{counted(len(self.entries), 'case')} in {counted(len(families), 'file')}: {kinds[0]:,} safe, "
            f"{kinds[1]:,} controls (unsafe by their contract, so they must be seen to race), {kinds[2]:,} of known "
            "defects of PyTorch (safe by their contract, and seen to race or to raise in the versions that are wrong).",
            "",
        ]
        if self.is_measured:
            lines += [
                f"{_TWINS}{_describe_twins(self.entries) or 'not run'}.",
                "",
                "## Edges of the autograd engine",
                "",
                "| edge | what it orders | crossed where | source | cases |",
                "|---|---|---|---|---:|",
            ]
            for name, edge in EDGES.items():
                lines.append(_row([f"**{name}**", edge.what, edge.seen_as, edge.source, f"{self._crossing(name):,}"]))
        else:
            lines.append("The streams, the edges of the engine and the twins of each case: `--twins` runs them.")
        names = ("test", "promise", "source", "kind", "cases", "devices", "streams", "edges", "twins")
        rules = ("---", "---", "---", "---", "---:", "---:", "---:", "---", "---")
        shown = len(names) if self.is_measured else _STATIC_COLUMNS
        for family in families:
            entries = [entry for entry in self.entries if entry.family == family]
            lines += ["", f"## [{family}](../{family})", "", entries[0].contract, ""]
            lines += [_row(names[:shown]), f"|{'|'.join(rules[:shown])}|"]
            for case in dict.fromkeys(entry.case for entry in entries):
                lines.append(_row(_cells([entry for entry in entries if entry.case == case])[:shown]))
        return "\n".join(lines) + "\n"

    @property
    def is_measured(self) -> bool:
        """Whether a run has told of a case's streams, edges and twins."""
        return any(entry.streams is not None for entry in self.entries)

    def _crossing(self, edge: str) -> int:
        return sum(edge in entry.edges for entry in self.entries)


def static_part(markdown: str) -> list[str]:
    """The document without what only a run can tell."""
    lines = []
    for line in markdown.splitlines():
        kept = next((columns for start, columns in _MEASURED.items() if line.startswith(start)), None)
        if not line.startswith(_TWINS):
            lines.append(line if kept is None else " | ".join(line.split(" | ")[:kept]))
    return lines


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _cells(entries: Sequence[Entry]) -> list[str]:
    first = entries[0]
    unsafe = ""
    if first.kind == CONTROL:
        unsafe = f" *Unsafe: {first.unsafe}*"
    elif first.kind == DEFECT:
        path = Path(str(first.unsafe))
        versions = " or ".join(dict.fromkeys(str(entry.versions) for entry in entries))
        unsafe = f" *Wrong in torch {versions}: [{path.stem}]({_from_docs(path)}).*"
    streams = sorted({len(entry.streams) for entry in entries if entry.streams is not None})
    return [
        f"`{first.case}`",
        first.sentence + unsafe,
        "; ".join(dict.fromkeys(source for entry in entries for source in entry.sources)),
        ", ".join(dict.fromkeys(entry.kind for entry in entries)),
        f"{len(entries):,}",
        str(max(entry.devices for entry in entries)),
        "" if not streams else str(streams[0]) if len(streams) == 1 else f"{streams[0]} to {streams[-1]}",
        " ".join(sorted({edge for entry in entries for edge in entry.edges})),
        _describe_twins(entries),
    ]


def _from_docs(path: Path) -> str:
    """A file's path as the document links it."""
    return Path(os.path.relpath(path, "docs")).as_posix()


def _describe_twins(entries: Iterable[Entry]) -> str:
    counts: dict[str, int] = {}
    for entry in entries:
        for outcome, number in (entry.twins or {}).items():
            counts[outcome] = counts.get(outcome, 0) + number
    parts = [f"{counts[outcome]:,} {outcome}" for outcome in ("killed", "redundant", "survived") if outcome in counts]
    return ", ".join(parts)


# From pytest's items.


def collect(items: Iterable[pytest.Item]) -> Catalogue:
    """The cases among the collected tests.

    Raises:
        UsageError: the markers of one are incomplete.
    """
    return Catalogue(
        [_entry(item) for item in items if isinstance(item, pytest.Function) and "lab" in item.fixturenames]
    )


def _entry(item: pytest.Function) -> Entry:
    control, defect = control_marker(item), defect_marker(item)
    return Entry(
        nodeid=item.nodeid,
        family=item.nodeid.partition("::")[0],
        contract=(inspect.getdoc(item.module) or "").partition("\n")[0],
        case=item.originalname,
        sentence=" ".join((inspect.getdoc(item.function) or "").split()),
        sources=contract_sources(item),
        kind=DEFECT if defect else CONTROL if control else SAFE,
        unsafe=defect.report if defect else control.reason if control else None,
        versions=",".join(sorted(map(str, defect.torch), reverse=True)) if defect else None,  # ">" before "<"
        devices=devices_needed(item),
    )
