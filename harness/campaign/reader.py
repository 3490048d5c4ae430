"""Reads the result files of runs, whatever state their processes left them in, on whatever machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.campaign.store import PASS, SCHEMA, CaseDefinition, InFlight, RepetitionRecord, usual_holds
from harness.errors import UsageError


@dataclass(slots=True)
class _Damage:
    """What could not be read of one file."""

    corrupt: int = 0
    truncated: bool = False
    undefined: int = 0
    schema: object = None

    def sentences(self, path: Path) -> Iterator[str]:
        damage = []
        if self.corrupt:
            damage.append(f"{self.corrupt} unreadable {'line was' if self.corrupt == 1 else 'lines were'} skipped")
        if self.undefined:
            which = "repetition of a case" if self.undefined == 1 else "repetitions of cases"
            damage.append(f"{self.undefined} {which} that no line names {_was(self.undefined)} skipped")
        if self.truncated:
            damage.append("its last line is cut off")
        if damage:
            yield f"{path}: {' and '.join(damage)}; everything else was read."
        if self.schema is not None:
            yield (
                f"{path} is written in version {self.schema} of the result files, and this reads version {SCHEMA}: "
                "read it with the version of Sidestream that wrote it."
            )


def _was(number: int) -> str:
    return "was" if number == 1 else "were"


@dataclass
class _Read:
    """What a run holds beside its repetitions."""

    headers: dict[str, dict[str, Any]] = field(default_factory=dict)
    environments: list[dict[str, Any]] = field(default_factory=list)
    in_flight: list[InFlight] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Run:
    """The results in one directory, read as they are asked for.

    Iterating gives every readable record, file by file; the properties first read to the end where that has not
    happened yet.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._read: _Read | None = None
        self._cases: dict[str, CaseDefinition] | None = None

    def __iter__(self) -> Iterator[RepetitionRecord]:
        read = _Read()
        self._cases = self._definitions()
        for path in sorted(self.directory.glob("*.jsonl")):
            yield from self._file(path, read)
        self._read = read

    def _file(self, path: Path, read: _Read) -> Iterator[RepetitionRecord]:
        worker = path.stem
        last: RepetitionRecord | None = None
        header: dict[str, Any] = {}
        damage = _Damage()
        now_s: float | None = None
        cases = self._cases or {}
        try:
            with path.open("rb") as lines:
                for raw in lines:
                    if not raw.strip():
                        continue
                    try:
                        line = json.loads(raw)
                        if "k" in line:
                            if damage.schema is not None:
                                continue
                            if line["k"] not in cases and (found := self._definitions().get(line["k"])):
                                cases[line["k"]] = found  # defined since, by a run that goes on
                            if line["k"] not in cases:
                                damage.undefined += 1
                                continue
                            last = _record(line, cases[line["k"]], worker, header)
                            if now_s is not None:
                                now_s += last.duration_us * 1e-6
                                last.ended_s = now_s
                        elif "header" in line:
                            header = read.headers[worker] = dict(line["header"])
                            damage.schema = None if header.get("schema") == SCHEMA else header.get("schema", 1)
                            continue
                        elif "environment" in line:
                            read.environments.append(dict(line["environment"]))
                            continue
                        elif "case" in line:
                            CaseDefinition.from_json(line)
                            now_s = float(line["t"]) if "t" in line else None
                            continue
                        else:
                            raise KeyError("k")
                    except (ValueError, KeyError, TypeError, RecursionError):
                        if damage.schema is not None:
                            continue
                        if raw.endswith(b"\n"):
                            damage.corrupt += 1
                        else:
                            damage.truncated = True
                        continue
                    yield last
        except OSError as error:
            read.problems.append(f"{path} could not be read to its end ({error.strerror or error}).")
        read.problems += damage.sentences(path)
        flying = _read_in_flight(path.with_suffix(".now"), worker)
        if flying and (last is None or (last.nodeid, last.repetition) != (flying.nodeid, flying.repetition)):
            read.in_flight.append(flying)

    def _definitions(self) -> dict[str, CaseDefinition]:
        """By key; of several of one case the one that knows most, wherever in the run it stands."""
        found: dict[str, CaseDefinition] = {}
        for path in sorted(self.directory.glob("*.jsonl")):
            try:
                with path.open("rb") as lines:
                    for raw in lines:
                        if not raw.startswith(b'{"case"'):
                            continue
                        try:
                            line = json.loads(raw)
                            key, definition = str(line["case"]), CaseDefinition.from_json(line)
                        except (ValueError, KeyError, TypeError):
                            continue
                        if key not in found or definition.launches > found[key].launches:
                            found[key] = definition
            except OSError:
                continue  # told where the records are read
        return found

    @property
    def cases(self) -> dict[str, CaseDefinition]:
        """The cases that the run names, by key."""
        if self._cases is None:
            self._cases = self._definitions()
        return self._cases

    @property
    def headers(self) -> dict[str, dict[str, Any]]:
        """The last header of each worker."""
        return self._rest().headers

    @property
    def environments(self) -> list[dict[str, Any]]:
        """Where it ran: one for each session of the run."""
        return self._rest().environments

    @property
    def in_flight(self) -> list[InFlight]:
        """The repetitions that were running when their process died (or that are running now)."""
        return self._rest().in_flight

    @property
    def problems(self) -> list[str]:
        """What could not be read, a sentence each."""
        return self._rest().problems

    def _rest(self) -> _Read:
        if self._read is None:
            for _ in self:
                pass
        assert self._read is not None
        return self._read


def read_run(directory: Path) -> Run:
    """The results of a run.

    Raises:
        UsageError: there is no such directory.
    """
    if not directory.is_dir():
        raise UsageError(f"{directory} is no run directory: there is no such folder.")
    return Run(directory)


def find_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs in these folders and below them: any number, of any machines.

    Raises:
        UsageError: there is no such folder, or no result in one.
    """
    runs = []
    for path in paths:
        if not path.is_dir():
            raise UsageError(f"{path} is no folder of results: name the folder of a run, or one that holds some.")
        folders = sorted({file.parent for file in path.rglob("*.jsonl")})
        if not folders:
            raise UsageError(f"{path} holds no results: name the folder of a run, or one that holds some.")
        runs += [Run(folder) for folder in folders]
    return runs


def _record(line: dict[str, Any], case: CaseDefinition, worker: str, header: dict[str, Any]) -> RepetitionRecord:
    number, plan = line["r"], line["p"]
    if not (isinstance(number, int) and isinstance(plan, str)):
        raise TypeError
    return RepetitionRecord(
        nodeid=case.nodeid,
        repetition=number,
        plan=plan,
        verdict=line.get("v", PASS),
        duration_us=line["us"],
        aimed=bool(line.get("a", 0)),
        adaptive=bool(line.get("x", 0)),
        fresh=bool(line.get("f", 0)),
        control=case.control is not None,
        defect=case.defect,
        raced_by=line.get("by", []),
        holds=line.get("h", usual_holds(plan)),
        message=line.get("m", ""),
        worker=worker,
        session=str(header.get("session", "")),
        load=",".join(header.get("loads") or ()),
        hold=str(header.get("hold", "")),
    )


def _read_in_flight(path: Path, worker: str) -> InFlight | None:
    try:
        line = json.loads(path.read_bytes())
        return InFlight(worker, line["n"], line["r"], line["p"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
