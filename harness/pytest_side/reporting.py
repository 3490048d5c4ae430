"""What becomes of the reports of cases: counts, the exit code, the summary at the end."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness.exit_codes import ExitCode

if TYPE_CHECKING:
    from harness.pytest_side.run import Run


class Recorder:
    """Keeps what final reports say where the summary is printed, and ends a process whose device is broken."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take a case's counts, and the exit code that its failure asks for.

        The counts are taken off the report, after xdist has sent it: pytest's own terminal reporter keeps every report,
        in the workers as well.
        """
        from harness.campaign.result import CaseResult
        from harness.report.outcome import outcome_of

        data = report.__dict__.pop("sidestream", None)
        study = report.__dict__.pop("sidestream_twins", None)
        if not self._run.prints_summary:
            return
        skipped = getattr(report, "sidestream_skipped", None) if not hasattr(report, "wasxfail") else None
        if skipped is not None:
            (self._run.unfit if skipped == "unfit" else self._run.not_covered).add(report.nodeid)
        elif report.failed or (report.when == "call" and (report.passed or hasattr(report, "wasxfail"))):
            self._run.has_run = True
        if skipped == "unfit":
            return
        code = getattr(report, "sidestream_exit_code", None)
        if study is not None:
            from harness.campaign.twins import TwinStudy

            known = self._run.studies[report.nodeid] = TwinStudy.from_json(study)
            if known.look is not None:
                code = code or outcome_of(known.look).exit_code
        if data is not None:
            self._run.reported.add(report.nodeid)
            result = self._run.results[report.nodeid] = CaseResult.from_json(data)
            result.settle()
            code = code or outcome_of(result).exit_code
        if report.failed:
            self._run.exit_codes.add(ExitCode(code or ExitCode.RACE))

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        """Leave a process whose device is broken; with xdist another worker takes its place."""
        if self._run.broken is None:
            return
        if self._run.worker == "main":
            pytest.exit(self._run.broken, returncode=int(ExitCode.INFRASTRUCTURE))
        os._exit(int(ExitCode.INFRASTRUCTURE))


def settle_exit_code(run: Run, status: int) -> int:
    """The exit status of the run: pytest's own, refined by why cases failed.

    A race is a definite answer and outranks everything; a usage error comes before a broken machine, and that before a
    run that proves nothing.
    """
    if status == ExitCode.NOTHING_RAN and run.usage_errors:
        return ExitCode.USAGE
    if status not in (ExitCode.CLEAN, ExitCode.RACE):
        return status
    if status == ExitCode.CLEAN and run.is_asked_in_vain:
        return ExitCode.USAGE
    if status == ExitCode.CLEAN and run.covers_nothing:
        return ExitCode.NOTHING_RAN
    if any(not report.is_delivered for report in run.load_reports):
        run.exit_codes.add(ExitCode.INCONCLUSIVE)
    for code in (ExitCode.RACE, ExitCode.USAGE, ExitCode.INFRASTRUCTURE, ExitCode.INCONCLUSIVE):
        if code in run.exit_codes:
            return int(code)
    return status


def write_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config, run: Run) -> None:
    """Say what the run proved."""
    from harness.judge.verdict import Verdict
    from harness.report.outcome import counted, outcome_of
    from harness.report.paths import shown
    from harness.report.summary import write_summary

    controller = config.pluginmanager.getplugin("sidestream-controller")
    if controller is not None:
        for result in controller.interrupted():
            run.results.setdefault(result.nodeid, result)
    if run.studies:
        _report_twins(terminalreporter, config, run)
    for answer in run.answers:
        terminalreporter.write_line(answer)
    if run.is_asked_in_vain:
        run.usage_errors.append(
            f"none of the {len(run.unfit):,} selected cases has what is named by {_asked_for(run)}: run one of them by "
            "its node id to see what it has."
        )
    for error in dict.fromkeys(run.usage_errors):
        terminalreporter.write_line(f"ERROR: {error}", red=True)
    if run.covers_nothing:
        terminalreporter.write_line(
            f"Nothing ran: {counted(len(run.not_covered), 'case')}, and none is covered here (-rs says why)."
        )
    if not run.results:
        _write_warnings(terminalreporter, run)
        return
    for nodeid, result in run.results.items():
        # Cases that were cut off have no report, but a race that they have shown is known all the same.
        text = None if nodeid in run.reported else outcome_of(result).text
        if text is not None and result.count(Verdict.RACE):
            terminalreporter.write_sep("_", f"{nodeid} (interrupted)")
            terminalreporter.write_line(text)

    write_summary(terminalreporter, run.results, run.options, run.load_reports, time.monotonic() - run.started)
    if run.unfit:
        terminalreporter.write_line(
            f"{counted(len(run.unfit), 'case')} skipped: without what is named by {_asked_for(run)}."
        )
    terminalreporter.write_line(f"results: {shown(run.directory)}")
    _write_warnings(terminalreporter, run)


def _asked_for(run: Run) -> str:
    """The options by which the user named something of a case."""
    fault, plan = run.options.fault, run.options.plan
    given = [] if plan is None else [f"--plan {plan}"]
    if fault is not None:
        given.append(f"{'--misdirect' if fault.misdirect else '--leave-out'} {fault.target}")
    return " and ".join(given)


def _write_warnings(terminalreporter: pytest.TerminalReporter, run: Run) -> None:
    for failure in dict.fromkeys(run.failures):
        terminalreporter.write_line(f"warning: {failure}", yellow=True)


def _report_twins(terminalreporter: pytest.TerminalReporter, config: pytest.Config, run: Run) -> None:
    from harness.report.twins import TWINS, write_twins, write_twins_json

    studies = [study for _, study in sorted(run.studies.items())]
    if config.option.csan:
        from harness.campaign import csan

        warning = csan.ask(studies, run.options.device, config.rootpath, os.environ)
        if warning is not None:
            terminalreporter.write_line(f"warning: {warning}", yellow=True)
    write_twins(terminalreporter, studies, run.options)
    try:
        write_twins_json(run.directory / TWINS, studies, run.options)
    except OSError as error:
        run.failures.append(f"the twins could not be written to {run.directory}: {error.strerror}.")
    path = config.option.twins_json
    if path is None:
        return
    try:
        write_twins_json(Path(path), studies, run.options)
    except OSError as error:
        run.failures.append(f"--twins-json {path}: {error.strerror}; the twins are above.")
    else:
        terminalreporter.write_line(f"twins: {path}")
