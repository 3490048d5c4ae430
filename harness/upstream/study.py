"""What became of each test of a file: starts the process that runs them, again where it dies, and reads its log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness.campaign.twins import KILLED, REDUNDANT, SURVIVED
from harness.errors import InfrastructureError, SidestreamError, UsageError
from harness.exit_codes import ExitCode
from harness.upstream.runs import AGAIN, ALONE, COMPLETE, DIED, PASSED, SKIPPED, TRACED, WHOLE, Log, Run, judged

UNSTABLE = "unstable"
"""Not issued the same way in each run, so that nobody can say what was left out."""

_LOOK_S = 1.0
_LAST_LINES = 5


class NothingToStudy(SidestreamError):
    """There is no test."""

    exit_code = ExitCode.NOTHING_RAN


@dataclass(slots=True)
class LeftOut:
    """What became of a test without one of its synchronizations."""

    synchronization: str
    kind: str
    issuer: str
    where: str
    outcome: str
    """``killed``, ``survived``, ``redundant`` or ``unstable``."""
    runs: int = 0
    reason: str | None = None
    """How the test failed, where that killed it."""
    proof: str | None = None
    """Why the others imply its order, where the trace shows that."""


@dataclass(slots=True)
class TestStudy:
    """What became of one test."""

    nodeid: str
    excluded: str | None
    """Why it does not count; None if it does."""
    by_framework: int = 0
    """How many synchronizations the test framework issues around it, which do not count."""
    left_out: list[LeftOut] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def assemble(nodeid: str, runs: list[Run]) -> TestStudy:
    """What the runs of a test say."""
    for run in runs:
        if run.key.what in WHOLE and run.outcome != PASSED:
            return TestStudy(nodeid, excluded=_why_excluded(run))
    found = {run.key.what: run for run in runs}
    complete, again = found[COMPLETE].issued, found[AGAIN].issued
    study = TestStudy(nodeid, None, by_framework=sum(each.by_framework for each in complete))
    proofs = {each.id: each.proof for each in found[TRACED].issued} if TRACED in found else {}
    stable = judged(runs)
    names = {each.id for each in stable}
    once = {each.id: each for each in (*complete, *again) if each.id not in names and not each.by_framework}
    for each in stable:
        tries = [run for run in runs if run.key.what == each.id]
        kills = [run for run in tries if run.kills]
        left = LeftOut(each.id, each.kind, each.issuer, each.where, SURVIVED, len(tries), proof=proofs.get(each.id))
        if kills:
            left.outcome, left.reason = KILLED, kills[0].reason
        elif not any(run.left_out for run in tries):
            left.outcome = UNSTABLE
        elif left.proof is not None:
            left.outcome = REDUNDANT
        study.left_out.append(left)
    study.left_out += [LeftOut(each.id, each.kind, each.issuer, each.where, UNSTABLE) for each in once.values()]
    if not study.left_out:
        study.excluded = "it issues no synchronization"
    elif all(left.outcome == UNSTABLE for left in study.left_out):
        study.excluded = "it does not synchronize the same way twice"
    return study


def _why_excluded(run: Run) -> str:
    if run.outcome == SKIPPED:
        return f"skipped: {run.reason}"
    when = {ALONE: "", COMPLETE: " under the tap"}.get(run.key.what, " each time")
    return f"it does not pass{when} with nothing left out: {run.reason}"


def study_file(
    tests: str,
    device: str,
    *,
    keyword: str | None,
    repetitions: int,
    limit_s: float,
    announce: Callable[[str], None],
) -> list[TestStudy]:
    """Run every test of a file, complete and with each synchronization left out.

    Args:
        tests: a file, or a node id in one.
        device: a resolved device, as ``harness.backends.select.resolve`` gives it.
        keyword: of the tests, those that match, as pytest's ``-k``.
        repetitions: how often each synchronization is left out at most, until a test fails of it.
        limit_s: how long one run may take, in seconds.
        announce: receives a sentence for each test.

    Raises:
        UsageError: the file is not there, or cannot be collected.
        NothingToStudy: it has no such test.
        InfrastructureError: the process that runs the tests does not come so far.
    """
    path, separator, rest = tests.partition("::")
    file = Path(path).absolute()
    if not file.is_file():
        raise UsageError(f"{path} is no file: give a test file, such as test/test_autograd.py of a PyTorch checkout.")
    with tempfile.TemporaryDirectory(prefix="sidestream-upstream-") as folder:
        log = Log(Path(folder) / "runs.jsonl")
        command = [sys.executable, "-m", "harness.upstream.child", "--log", str(Path(folder) / "runs.jsonl")]
        command += ["--device", device, "--repetitions", str(repetitions), "--limit-s", str(limit_s)]
        command += ["--keyword", keyword] if keyword is not None else []
        command += ["--", file.name + separator + rest]
        while not log.finished:
            _run_once(command, file, log, Path(folder) / "output", announce)
        nodeids = log.nodeids or []
        if not nodeids:
            matching = "" if keyword is None else f" that matches -k {keyword!r}"
            raise NothingToStudy(f"{tests} has no test{matching}.")
        return [assemble(nodeid, log.runs.get(nodeid, [])) for nodeid in nodeids]


def _run_once(command: list[str], file: Path, log: Log, output: Path, announce: Callable[[str], None]) -> None:
    known = sum(map(len, log.runs.values()))
    with output.open("wb") as sink:
        process = subprocess.Popen(command, cwd=file.parent, env=_environment(), stdout=sink, stderr=sink)
        try:
            code = _wait(process, log, announce)
        finally:
            process.kill()
            process.wait()
    log.refresh()
    if log.unusable is not None:
        raise UsageError(f"{file.name} cannot be collected: {log.unusable}. Mend that first, or install what it needs.")
    if log.finished:
        return
    if log.flying is not None:
        what = f"the process died of {signal.Signals(-code).name}" if code < 0 else f"the process ended with {code}"
        # Before the test issued it nothing was missing; but then the complete runs would have ended so as well.
        log.write(ended=Run(log.flying, DIED, what, left_out=log.flying.what not in (*WHOLE, TRACED)).to_json())
    elif sum(map(len, log.runs.values())) == known:
        lines = [line for line in output.read_text(errors="replace").splitlines() if line.strip()]
        raise InfrastructureError(
            f"The process that runs {file.name} ended with {code} before any test: "
            f"{' | '.join(lines[-_LAST_LINES:]) or 'it said nothing'}."
        )


def _wait(process: subprocess.Popen[bytes], log: Log, announce: Callable[[str], None]) -> int:
    shown = ""
    while True:
        try:
            return process.wait(_LOOK_S)
        except subprocess.TimeoutExpired:
            log.refresh()
        nodeid = log.flying.nodeid if log.flying is not None else ""
        if nodeid and nodeid != shown:
            shown = nodeid
            announce(f"Studying {nodeid}")


def _environment() -> dict[str, str]:
    # The process starts in the file's folder, so that the file finds its neighbours.
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
