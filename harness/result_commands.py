"""The commands about results: numbers, compare, report, reduce, replay."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from harness.errors import UsageError
from harness.exit_codes import ExitCode
from harness.perturb.plan import Plan
from harness.processes import run_pytest

if TYPE_CHECKING:
    from harness.campaign.replay import Found

Folders = Annotated[
    list[Path] | None, typer.Argument(metavar="DIRECTORY...", help="folders of runs; without any, the last run here")
]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
Results = Annotated[
    Path | None, typer.Option("--results", metavar="DIRECTORY", help="where to look for it (default: the runs here)")
]


def numbers(directories: Folders = None, as_json: Json = False) -> None:
    """Say what any number of runs, of any machines, add up to: verdicts and rates of each case.

    Exits with 5 if nothing ran.
    """
    from harness.campaign.numbers import Numbers
    from harness.campaign.reader import find_runs
    from harness.campaign.run_directory import last_run_directory
    from harness.report.numbers import numbers_tables

    found = Numbers.of(find_runs(directories or [last_run_directory(Path.cwd())]))
    if as_json:
        print(
            json.dumps(
                {"cases": [case.to_json() for case in found.cases.values()], "problems": found.problems}, indent=1
            )
        )
    else:
        _print(numbers_tables(found))
    if not any(case.repetitions for case in found.cases.values()):
        raise typer.Exit(ExitCode.NOTHING_RAN)


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help="folder of the runs of the build to compare with")],
    b: Annotated[Path, typer.Argument(metavar="B", help="folder of the runs of the build in question")],
    as_json: Json = False,
) -> None:
    """Say for each case whether B races more often than A, or that there are not enough repetitions to tell.

    Exits with 1 if a case does, with 6 if one cannot be told, with 5 if there was nothing to compare.
    """
    from harness.campaign.compare import compare as compared
    from harness.campaign.numbers import Numbers
    from harness.campaign.reader import find_runs
    from harness.report.numbers import comparison_tables

    first, second = (Numbers.of(find_runs([path])) for path in (a, b))
    found = compared(first, second)
    problems = [*first.problems, *second.problems]
    if as_json:
        cases = [case.to_json() for case in found.cases]
        rest = {"only_a": found.only_a, "only_b": found.only_b, "no_common_stratum": found.no_common_stratum}
        print(json.dumps({"cases": cases, **rest, "problems": problems}, indent=1))
    else:
        _print(comparison_tables(found, problems))
    raise typer.Exit(int(found.exit_code))


def report(
    directories: Folders = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="the file (default: report.html in the first folder)")
    ] = None,
) -> None:
    """Write one HTML file of any number of runs: outcomes, rates, races with their timelines, load, environment."""
    from harness.campaign.reader import find_runs
    from harness.campaign.run_directory import last_run_directory
    from harness.report.html import Report, write_html

    folders = directories or [last_run_directory(Path.cwd())]
    path = html if html is not None else folders[0] / "report.html"
    write_html(path, Report.of(find_runs(folders)))
    print(path)


def reduce(
    target: Annotated[str, typer.Argument(metavar="ID_OR_CASE", help="id of a repetition, or node id of a case")],
    results: Results = None,
    plan: Annotated[str | None, typer.Option(help="the plan to reduce; with a node id")] = None,
    device: Annotated[str, typer.Option(help="auto, cuda, cuda:N or sim; with a node id")] = "auto",
    repetitions: Annotated[
        int | None, typer.Option(min=1, help="tries of a plan (default: 1 on sim, 5 elsewhere)")
    ] = None,
) -> None:
    """Find the fewest held launches under which a case still races."""
    from harness.backends.select import resolve
    from harness.campaign.replay import find_repetition, is_id
    from harness.report.failure import replay_options

    if is_id(target):
        if plan is not None:
            raise UsageError("--plan goes with the node id of a case; the id of a repetition has its plan.")
        found = find_repetition(target, results, Path.cwd())
        _say_where(found)
        nodeid, options = found.record.nodeid, replay_options(found.plan, found.options)
        kind = found.options.device
    else:
        kind = resolve(device)
        nodeid, options = target, ["--device", kind]
        if plan is not None:
            options += ["--plan", str(Plan.parse(plan))]
    tries = repetitions if repetitions is not None else 1 if kind == "sim" else 5
    raise typer.Exit(run_pytest(["-q", nodeid, *options, "--reduce", str(tries)]))


def replay(
    identifier: Annotated[str, typer.Argument(metavar="ID", help="id of a repetition: 0c8b7a51-3")],
    results: Results = None,
    script: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="write it to FILE as a stand-alone script in plain PyTorch; - is the terminal"
        ),
    ] = None,
) -> None:
    """Run a repetition again as it was, or write it as a script that needs nothing of the harness."""
    from harness.campaign.replay import find_repetition
    from harness.report.failure import replay_command, replay_options

    found = find_repetition(identifier, results, Path.cwd())
    _say_where(found)
    nodeid, options = found.record.nodeid, replay_options(found.plan, found.options)
    if script is None:
        print(replay_command(nodeid, found.plan, found.options), file=sys.stderr, flush=True)
        raise typer.Exit(run_pytest(["-q", nodeid, *options]))
    raise typer.Exit(run_pytest(["-q", nodeid, *options, f"--script={script}"]))


def _say_where(found: Found) -> None:
    from harness.report.paths import shown

    print(f"repetition {found.record.id} of {shown(found.directory)}", file=sys.stderr, flush=True)


def _print(parts: list[Table | str]) -> None:
    from harness.report.tables import rendered, width_for

    console = Console()
    width = width_for(console.width, is_terminal=console.is_terminal)
    for line in rendered(parts, width, colour=console.is_terminal):
        print(line)
