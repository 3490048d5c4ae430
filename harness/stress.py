"""``python -m harness stress``: rounds of pytest in one folder of results, until the budget is spent.

The first round is a sample of fixed size (``--count``), and the only one without ``--minutes``. What time is left goes
where the evidence is thin, a round a minute (``harness/campaign/allocate.py``). Every round is pytest with options that
anyone may give it; what it knows of the rounds before is in the result files.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from harness.exit_codes import ExitCode
from harness.processes import run_pytest

_ROUND_S = 60.0
_LEAST_ROUND_S = 5.0
"""Less time than it takes to start is no round."""
_WORST_FIRST = (
    ExitCode.INTERRUPTED,
    ExitCode.USAGE,
    ExitCode.RACE,
    ExitCode.INFRASTRUCTURE,
    ExitCode.INCONCLUSIVE,
    ExitCode.NOTHING_RAN,
)


@dataclass
class Stress:
    """The settings of a campaign, and what came of it."""

    tests: list[str]
    options: list[str]
    """Of every round."""
    workers: list[str]
    directory: Path
    deadline: float | None
    max_races: int | None
    until_race: bool
    codes: list[ExitCode] = field(default_factory=list)

    @property
    def exit_code(self) -> ExitCode:
        """The worst of the rounds."""
        return next((code for code in _WORST_FIRST if code in self.codes), ExitCode.CLEAN)

    @property
    def is_over(self) -> bool:
        """Whether no further round is to begin."""
        ended = {ExitCode.INTERRUPTED, ExitCode.USAGE, ExitCode.NOTHING_RAN}
        return bool(ended.intersection(self.codes)) or (self.until_race and ExitCode.RACE in self.codes)

    def left_s(self) -> float:
        """How much time is left."""
        return float("inf") if self.deadline is None else self.deadline - time.time()

    # Options of ours that name folders are written with =. Before it has loaded the plugin, pytest takes a word that it
    # does not know to belong to an option for a test, and looks for its root there.

    def round(self, *options: str, tests: Sequence[str] | None = None, workers: Sequence[str] | None = None) -> None:
        """One call of pytest."""
        budget = [] if self.deadline is None else ["--minutes", f"{max(self.left_s(), 0.001) / 60:.6f}"]
        arguments = [*self.options, *(self.workers if workers is None else workers), *budget, *options]
        self.codes.append(run_pytest([*arguments, "--", *(self.tests if tests is None else tests)]))

    def fixed(self, count: int, resumes: bool) -> None:
        """The sample of fixed size."""
        self.round("--count", str(count), f"--resume={self.directory}" if resumes else f"--results={self.directory}")

    def fresh(self, processes: int) -> None:
        """Each case once in so many processes of its own, one process at a time."""
        from harness.campaign.reader import read_run

        nodeids = sorted(definition.nodeid for definition in read_run(self.directory).cases.values())
        done = {(record.nodeid, record.repetition) for record in read_run(self.directory) if record.fresh}
        for number in range(processes):
            for nodeid in nodeids:
                if self.is_over or self.left_s() <= 0:
                    return
                if (nodeid, number) not in done:
                    options = [f"--resume={self.directory}", f"--fresh={number}", "--no-header", "--no-summary", "-q"]
                    self.round(*options, tests=[nodeid], workers=[])

    def further(self) -> Iterator[int]:
        """Rounds where the evidence is thin, as long as there is time; each gives how much it shared out."""
        from harness.campaign.allocate import allocate
        from harness.campaign.numbers import Numbers
        from harness.campaign.reader import read_run

        rate = 0.0
        began, had = time.time(), None
        while not self.is_over and self.left_s() > _LEAST_ROUND_S:
            numbers = Numbers.of([read_run(self.directory)])
            has = sum(case.repetitions for case in numbers.cases.values())
            rate = max(1.0, (has - had) / (time.time() - began)) if had is not None else 20.0
            total = int(rate * min(_ROUND_S, self.left_s()))
            shares = allocate(numbers.cases, total, self.max_races)
            if not shares.total:
                return
            began, had = time.time(), has
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "further.json"
                file.write_text(json.dumps(shares.repetitions))
                self.round(f"--resume={self.directory}", f"--further={file}")
            yield shares.total


def _announce(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def stress(
    tests: Annotated[list[str] | None, typer.Argument(help="files, folders, node ids; without any, the suite")] = None,
    device: Annotated[str, typer.Option(help="auto, cuda, cuda:N or sim")] = "auto",
    keyword: Annotated[str | None, typer.Option("-k", help="of the cases, those that match, as in pytest")] = None,
    processes: Annotated[str, typer.Option("-n", help="workers, as in pytest-xdist: a number or auto")] = "auto",
    count: Annotated[int, typer.Option(min=1, help="repetitions of each case, the sample of fixed size")] = 500,
    minutes: Annotated[float | None, typer.Option(help="go on where the evidence is thin until they are over")] = None,
    until_race: Annotated[bool, typer.Option("--until-race", help="stop at the first race of a safe case")] = False,
    max_races: Annotated[int | None, typer.Option(min=1, help="repeat a case no more once it raced so often")] = None,
    fresh: Annotated[int, typer.Option(min=0, help="run each case in so many processes of its own as well")] = 0,
    seed: Annotated[int, typer.Option(help="of the plans and of the order of the cases")] = 0,
    load: Annotated[str | None, typer.Option(help="as in pytest: compute, memory, mixed, ...")] = None,
    hold: Annotated[str | None, typer.Option(help="as in pytest: sleep or gate")] = None,
    results: Annotated[Path | None, typer.Option(metavar="DIRECTORY", help="a new folder for the results")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="DIRECTORY", help="go on with the run of this folder")] = None,
) -> None:
    """Repeat the cases under load until a budget is spent, and say what that proves.

    Results are kept as they come: a run that was killed goes on with --resume, with the same options.
    """
    from harness.campaign.run_directory import new_run_directory, resumed_run_directory, use_run_directory

    options = ["--device", device, "--seed", str(seed), "--shuffle"]
    for name, value in (("-k", keyword), ("--max-races", max_races), ("--load", load), ("--hold", hold)):
        if value is not None:
            options += [name, str(value)]
    if until_race:
        options.append("-x")
    if resume is not None:
        directory = resumed_run_directory(resume)
    else:
        directory = use_run_directory(results) if results is not None else new_run_directory(Path.cwd(), _announce)
    deadline = None if minutes is None else time.time() + 60.0 * minutes
    campaign = Stress(tests or [], options, ["-n", processes], directory, deadline, max_races, until_race)
    campaign.fixed(count, resumes=resume is not None)
    if fresh and not campaign.is_over:
        campaign.fresh(fresh)
    if deadline is not None:
        for shared_out in campaign.further():
            _announce(f"shared out {shared_out:,} repetitions where the evidence was thin")
    print(f"\nnumbers: python -m harness numbers {directory}")
    raise typer.Exit(campaign.exit_code)
