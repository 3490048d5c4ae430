"""What one pytest process knows of the run: its options, device, result file, counts."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import harness
from harness import distribution
from harness.exit_codes import ExitCode

if TYPE_CHECKING:
    from harness.backends.select import Backend
    from harness.campaign.csan import Sanitizer
    from harness.campaign.options import Options
    from harness.campaign.result import CaseResult
    from harness.campaign.resume import Earlier
    from harness.campaign.session import Session
    from harness.campaign.store import ResultWriter
    from harness.campaign.twins import TwinStudy
    from harness.campaign.watchdog import Watchdog
    from harness.perturb.load.load import LoadReport
    from harness.report.progress import Progress


@dataclass
class Run:
    """What this pytest process knows of the run."""

    options: Options
    directory: Path
    """Where results go; settled at the start of the session."""
    worker: str
    """``main`` without xdist, else ``gw0``, ``gw1``, ...; ``controller`` in the process that runs no case."""
    results: dict[str, CaseResult] = field(default_factory=dict)
    studies: dict[str, TwinStudy] = field(default_factory=dict)
    """What became of the twins of each case."""
    reported: set[str] = field(default_factory=set)
    """The cases whose end pytest has reported."""
    has_run: bool = False
    """Whether any test has come so far as to run."""
    unfit: set[str] = field(default_factory=set)
    """The cases that do not have the launch or the synchronization that the user named."""
    not_covered: set[str] = field(default_factory=set)
    """The cases that were skipped for another reason."""
    exit_codes: set[ExitCode] = field(default_factory=set)
    device: str = ""
    started: float = field(default_factory=time.monotonic)
    load_reports: list[LoadReport] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """What went wrong beside the cases, a sentence each."""
    usage_errors: list[str] = field(default_factory=list)
    """Why the cases could not be run as asked, a sentence each."""
    case_count: int = 0
    """How many cases are selected; known where they are collected."""
    answers: list[str] = field(default_factory=list)
    """What a case was asked instead of being repeated has these answers, a sentence each."""
    progress: Progress | None = None
    broken: str | None = None
    sanitizer: Sanitizer | None = None
    """PyTorch's CUDA Sanitizer, in the process that asks it."""
    stderr_descriptor: int | None = None
    """Standard error as it was before pytest captured it."""
    claim: int | None = None
    """What keeps other sessions from adding to this run."""
    _session: Session | None = None
    _writer: ResultWriter | None = None
    _watchdog: Watchdog | None = None
    _earlier: Earlier | None = None

    @property
    def is_asked_in_vain(self) -> bool:
        """Whether the user named a launch or a synchronization that none of the cases has."""
        return bool(self.unfit) and not self.has_run

    @property
    def covers_nothing(self) -> bool:
        """Whether all that was selected are cases, and all of them were skipped."""
        return bool(self.not_covered) and not self.has_run and not self.unfit

    @property
    def prints_summary(self) -> bool:
        """Whether this is the process that reports to the user, and not a worker."""
        return self.worker in ("main", "controller")

    def session(self) -> Session:
        """The accelerator, opened at its first use."""
        if self._session is None:
            from harness.campaign import csan
            from harness.campaign.session import Session

            if self.options.csan_folder is not None:
                # Before anything is allocated.
                self.sanitizer = csan.enable()
            self._session = Session(self.options, announce=announce)
            self.device = describe(self._session.backend)
        return self._session

    def writer(self) -> ResultWriter:
        """Where this process writes its repetitions."""
        if self._writer is None:
            from harness.campaign.store import ResultWriter

            self._writer = ResultWriter(self.directory, self.worker, header(self))
        return self._writer

    def watchdog(self) -> Watchdog:
        """What cuts a repetition that hangs."""
        if self._watchdog is None:
            from harness.campaign.watchdog import Watchdog

            # A worker's stacks are read by the controller; without one they go to where the user reads.
            alone = self.worker == "main"
            path = None if alone else distribution.stacks_path(self.directory, self.worker)
            self._watchdog = Watchdog(self.options.limit_s, path, descriptor=self.stderr_descriptor)
        return self._watchdog

    def earlier(self) -> Earlier:
        """What earlier sessions of a resumed run have left; nothing in a new one."""
        if self._earlier is None:
            from harness.campaign.resume import Earlier

            self._earlier = Earlier.read(self.directory, self.options.session) if self.options.resume else Earlier()
        return self._earlier

    def close(self) -> None:
        """Stop the load and the timers, and close the result file."""
        if self._watchdog is not None:
            # Its alarm would end the process once the interpreter has dropped the handler.
            self._watchdog.rest()
        if self._session is not None:
            self._keep_load_reports(self._session.load_reports())
            self._session.close()
            self._session = None
        if self._writer is not None:
            self._writer.close()
            if self._writer.failure is not None:
                self.failures.append(self._writer.failure)
            self._writer = None
        if self.claim is not None:
            os.close(self.claim)
            self.claim = None

    def _keep_load_reports(self, reports: list[LoadReport]) -> None:
        if not reports:
            return
        from harness.report.load import write_loads_json

        self.load_reports += [dataclasses.replace(report, worker=self.worker) for report in reports]
        try:
            write_loads_json(self.directory / f"{self.worker}.load.json", self.load_reports)
        except OSError as error:
            self.failures.append(f"what the load achieved could not be written to {self.directory}: {error.strerror}.")


RUN = pytest.StashKey[Run]()
RESULT = pytest.StashKey["CaseResult"]()
FURTHER = pytest.StashKey[dict[str, int]]()
"""With ``--further``: how many repetitions the cases get, by node id."""
STUDY = pytest.StashKey["TwinStudy"]()
UNFIT = pytest.StashKey[bool]()
"""Whether a case does not have the launch or the synchronization that the user named."""


def describe(backend: Backend) -> str:
    """The device in a few words, for the header and for failures."""
    return ", ".join(backend.describe().values())


def header(run: Run) -> dict[str, Any]:
    """What a result file says about the run that it belongs to."""
    import torch

    options = run.options
    return {
        "sidestream": harness.__version__,
        "torch": torch.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "session": options.session,
        "device": options.device,
        "seed": options.seed,
        "plan": str(options.plan) if options.plan is not None else None,
        "hold": "scheduler" if options.device == "sim" else options.hold,
        "hold_ms": options.hold_ms,
        "max_races": options.max_races,
        "loads": list(options.loads),
        "load_memory_mib": options.load_memory_mib,
        "leave_out": str(options.fault.target) if options.fault is not None and not options.fault.misdirect else None,
        "misdirect": str(options.fault.target) if options.fault is not None and options.fault.misdirect else None,
    }


def announce(sentence: str) -> None:
    """Say something at once, whatever pytest captures."""
    # Straight to the terminal: what pytest captures would be seen only after a failure.
    print(sentence, file=sys.__stderr__, flush=True)
