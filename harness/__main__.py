"""``python -m harness``: what is not pytest's business."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import harness
from harness import doctor_commands, result_commands, stress
from harness.errors import InfrastructureError, SidestreamError, UsageError
from harness.exit_codes import ExitCode
from harness.files import write_whole
from harness.processes import interrupt_when_terminated, preexec_dies_with_this_process, run_pytest

_TYPER_USAGE = 2
_TYPER_INTERRUPTED = 130

app = typer.Typer(
    help="Sidestream, the suite and stress harness for streaming backward. The suite itself runs under pytest.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _announce(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


@app.command()
def bench(
    device: Annotated[str, typer.Option(help="auto, cuda or sim")] = "sim",
    repetitions: Annotated[int, typer.Option(min=10, help="repetitions of each bench case")] = 1000,
    hold: Annotated[str | None, typer.Option(help="how to hold launches on a real device: sleep or gate")] = None,
    launches: Annotated[int, typer.Option(min=1000, help="launches over which the memory is watched")] = 1_000_000,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Measure what one repetition costs, judge and result file included; and what the simulator costs by itself."""
    from harness.backends import hardware_queues, module_loading
    from harness.backends.select import is_rocm, resolve
    from harness.campaign import bench, launch_bench
    from harness.perturb.hold import DEFAULT_KIND, require_kind

    hardware_queues.use_all(os.environ)
    if hold == "gate":
        module_loading.load_at_start(os.environ)
    name = resolve(device)
    if hold is not None:
        require_kind(hold, name, is_rocm())
    costs = bench.measure(name, repetitions, _announce, hold=hold or DEFAULT_KIND)
    simulator_costs = launch_bench.measure(launches, _announce) if name == "sim" else {}
    if as_json:
        print(json.dumps({**costs, **simulator_costs}, indent=2))
        return
    table = Table(title="cost of one repetition, in microseconds")
    for column in ("case", "launches", "repetitions", "median", "mean", "95th percentile"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for name, cost in costs.items():
        keys = ("launches", "repetitions", "median_us", "mean_us", "p95_us")
        table.add_row(name, *(f"{cost[key]:,}" for key in keys))
    Console().print(table)
    if not simulator_costs:
        return
    table = Table("figure", "value", title="costs of the simulator")
    for name, figures in simulator_costs.items():
        for figure, value in figures.items():
            table.add_row(f"{name}.{figure}", f"{value:,}")
    Console().print(table)


@app.command()
def build() -> None:
    """Build the native extensions now; otherwise they are built at their first use."""
    from harness.backends import simulator
    from harness.observe import tap

    for part in (simulator, tap):
        print(part.build(_announce))


@app.command()
def twins(
    tests: Annotated[list[str] | None, typer.Argument(help="files, folders, node ids; without any, the suite")] = None,
    device: Annotated[str, typer.Option(help="auto, cuda, cuda:N or sim")] = "auto",
    keyword: Annotated[str | None, typer.Option("-k", help="of the cases, those that match, as in pytest")] = None,
    processes: Annotated[str | None, typer.Option("-n", help="workers, as in pytest-xdist: a number or auto")] = None,
    repetitions: Annotated[int | None, typer.Option(min=1, help="aimed repetitions that a twin gets")] = None,
    csan: Annotated[bool, typer.Option("--csan", help="ask PyTorch's CUDA Sanitizer about each twin as well")] = False,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="write JUnit XML")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, and pytest's output on standard error")] = False,
) -> None:
    """Leave each synchronization of each case out, one at a time, and say which of these twins are killed.

    Exits with 1 if a twin survives.
    """
    options = ["-q", "--twins", "--device", device]
    for name, value in (("-k", keyword), ("-n", processes), ("--twin-repetitions", repetitions), ("--junitxml", junit)):
        if value is not None:
            options += [name, str(value)]
    if csan:
        options.append("--csan")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "twins.json"
        if as_json:
            options += ["--twins-json", str(file)]
        # A process of its own, whose output can go to standard error.
        code = run_pytest([*options, "--", *(tests or [])], stdout=sys.stderr if as_json else None)
        if file.exists():
            print(file.read_text())
    raise typer.Exit(code)


@app.command()
def upstream(
    tests: Annotated[str, typer.Argument(metavar="FILE", help="a test file, of a PyTorch checkout say; or a node id")],
    device: Annotated[str, typer.Option(help="auto, cuda, cuda:N or sim")] = "auto",
    keyword: Annotated[str | None, typer.Option("-k", help="of the tests, those that match, as in pytest")] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="runs that a missing synchronization gets")] = 3,
    limit_s: Annotated[float, typer.Option("--timeout", min=1, help="seconds that one run may take")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Leave each synchronization of somebody else's tests out, one at a time, and say which of these twins they kill.

    A measurement, so it exits with 0 whatever the rate is, and with 5 if there was nothing to judge.
    """
    from harness.backends.select import resolve
    from harness.report import upstream as report
    from harness.report.tables import rendered, width_for
    from harness.upstream.study import study_file

    name = resolve(device)
    studies = study_file(tests, name, keyword=keyword, repetitions=repetitions, limit_s=limit_s, announce=_announce)
    if as_json:
        print(json.dumps(report.to_json(studies, name), indent=1))
    else:
        console = Console()
        width = width_for(console.width, is_terminal=console.is_terminal)
        for line in rendered(report.tables(studies, name), width, colour=console.is_terminal):
            print(line)
    if all(study.excluded is not None for study in studies):
        raise typer.Exit(int(ExitCode.NOTHING_RAN))


@app.command()
def catalogue(
    tests: Annotated[list[str] | None, typer.Argument(help="files, folders, node ids; without any, the suite")] = None,
    with_twins: Annotated[
        bool, typer.Option("--twins", help="run the twins on the simulator, for what runs tell")
    ] = False,
    processes: Annotated[str | None, typer.Option("-n", help="workers of the twins: a number or auto")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    write: Annotated[bool, typer.Option("--write", help="write docs/catalogue.md; with --twins")] = False,
) -> None:
    """List every case: its promise, the source, what it needs; with --twins its streams, engine edges and twins."""
    from harness import catalogue

    if write and (tests or not with_twins):
        raise UsageError(f"--write writes the whole catalogue, twins included: {catalogue.COMMAND}.")
    with tempfile.TemporaryDirectory() as folder:
        cases, twins = Path(folder) / "cases.json", Path(folder) / "twins.json"
        code = _pytest(["-q", "--collect-only", "--catalogue-json", str(cases)], tests)
        if code or not cases.exists():
            raise typer.Exit(code or int(ExitCode.INFRASTRUCTURE))
        made = catalogue.Catalogue.from_json(json.loads(cases.read_text()))
        if with_twins:
            workers = ["-n", processes] if processes is not None else []
            code = _pytest(["-q", "--twins", "--twins-json", str(twins), *workers], tests, silent=False)
            if twins.exists():
                made.add_twins(json.loads(twins.read_text())["cases"])
    if as_json:
        print(json.dumps(made.to_json(), indent=1))
    elif write and code:
        _announce(f"{catalogue.PATH} was left as it is, since the twins did not end well.")
    elif write:
        _write(catalogue.PATH, made.to_markdown())
        _announce(f"Wrote {catalogue.PATH}")
    else:
        print(made.to_markdown(), end="")
    raise typer.Exit(code)


def _write(path: Path, text: str) -> None:
    try:
        write_whole(path, text)
    except OSError as error:
        raise InfrastructureError(f"{path} could not be written ({error.strerror}) and is as it was.") from None


def _pytest(options: list[str], tests: list[str] | None, silent: bool = True) -> int:
    """Run pytest on the simulator in a process of its own, its output on standard error; silent unless it fails."""
    arguments = ["--device", "sim", *options, "--", *(tests or [])]
    if not silent:
        return run_pytest(arguments, stdout=sys.stderr)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        preexec_fn=preexec_dies_with_this_process(),
    )
    if done.returncode:
        _announce(done.stdout.strip())
    return done.returncode


for command in (
    stress.stress,
    result_commands.numbers,
    result_commands.compare,
    result_commands.report,
    result_commands.reduce,
    result_commands.replay,
    doctor_commands.doctor,
    doctor_commands.canary,
):
    app.command()(command)


@app.command()
def operators(
    names: Annotated[list[str] | None, typer.Argument(help="operators to compare; without any, all")] = None,
    processes: Annotated[int, typer.Option(min=1, help="how many processes share the work")] = os.cpu_count() or 1,
    dtype: Annotated[str, typer.Option(help="of the named operators: float32 or float64")] = "float32",
) -> None:
    """Compare PyTorch's operators on the simulated accelerator with the CPU, and write OPERATORS.md."""
    from harness.backends.simulator.coverage import survey

    if dtype not in {"float32", "float64"}:
        raise UsageError(f"--dtype takes float32 or float64, not '{dtype}'.")
    if not names:
        table = survey.survey(processes, _announce)
        _write(survey.TABLE, table.to_markdown())
        for direction, outcomes in table.outcomes.items():
            print(f"{direction}: {len(outcomes.passed)} pass, {len(outcomes.out)} out")
        _announce(f"Wrote {survey.TABLE}")
        return
    results = survey.compare_some(names, dtype, processes, _announce)
    for result in results:
        for direction, outcome in (("forward", result.forward), ("backward", result.backward)):
            verdict = "pass" if outcome.passed else outcome.failure or outcome.not_applicable
            print(f"{result.name} {direction}: {verdict}")
    if any(result.forward.failure or result.backward.failure for result in results):
        sys.exit(int(ExitCode.RACE))


@app.command()
def version() -> None:
    """Print the versions of Sidestream and torch."""
    import torch

    print(f"sidestream {harness.__version__}, torch {torch.__version__}")


def _forget_standard_output() -> None:
    # Python flushes it once more at its end, which would fail again with a traceback.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    """Run a command; our own errors are one sentence and an exit code, and SIGTERM is as good as Ctrl-C."""
    interrupt_when_terminated()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except SidestreamError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        sys.exit(int(error.exit_code))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EPIPE, errno.EIO, errno.EDQUOT):
            raise
        print(f"ERROR: the output could not be written: {error.strerror}. Run it again elsewhere.", file=sys.stderr)
        _forget_standard_output()
        sys.exit(int(ExitCode.INFRASTRUCTURE))
    except SystemExit as ended:
        # typer's code for what it cannot parse means "interrupted" here, as in pytest; ours are told by their type.
        theirs = {_TYPER_USAGE: ExitCode.USAGE, _TYPER_INTERRUPTED: ExitCode.INTERRUPTED}
        known = not isinstance(ended.code, ExitCode) and ended.code in theirs
        sys.exit(int(theirs[ended.code]) if known else ended.code)  # type: ignore[index]


if __name__ == "__main__":
    main()
