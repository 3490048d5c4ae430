"""An outside opinion on the twins: what PyTorch's CUDA Sanitizer (torch/cuda/_sanitizer.py) reports of them.

The sanitizer is a ``TorchDispatchMode``, under which the engine accumulates out of place, and it is there for the whole
process. So it is asked in a process of its own, after the twins have been studied without it: pytest once more, on the
same cases, with ``FOLDER_VARIABLE`` set. The questions lie in that folder, and the answers are written there.

Each case is run once complete and once for each of its twins, in the baseline: the sanitizer follows what is enqueued,
and needs no launch to be held. Its report alone counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import UsageError, first_line
from harness.observe.synchronizations import Fault, SynchronizationId
from harness.perturb.plan import Plan
from harness.processes import preexec_dies_with_this_process

if TYPE_CHECKING:
    from harness.campaign.runs import Runs
    from harness.campaign.twins import TwinStudy

FOLDER_VARIABLE = "SIDESTREAM_CSAN_FOLDER"
_QUESTIONS = "questions.json"
_ANSWERS = "answers.jsonl"


def require_cuda(device: str) -> None:
    """Refuse a resolved device that the sanitizer does not know.

    Raises:
        UsageError: it is no CUDA device.
    """
    if not device.startswith("cuda"):
        raise UsageError(
            f"--csan asks PyTorch's CUDA Sanitizer, which knows CUDA only, and the device is {device}: leave it out, "
            "or use --device cuda on a machine with a GPU."
        )


class Sanitizer:
    """PyTorch's CUDA Sanitizer, whose reports are collected instead of raised.

    What it raises inside backward ends the process under Python 3.12: the exception unwinds a frame, that frees device
    memory, and the sanitizer's own callback for the free runs Python code while the exception is still set
    (torch 2.11; "Segmentation fault").
    """

    def __init__(self) -> None:
        self._reports: list[Exception] = []

    def collect(self, launched: Callable[..., list[Exception]]) -> Callable[..., list[Exception]]:
        """The sanitizer's judgement of a launch, made to keep its reports and give none."""

        def collecting(*arguments: Any) -> list[Exception]:
            self._reports.extend(launched(*arguments))
            return []

        return collecting

    def take(self) -> list[Exception]:
        """What it has reported since this was asked last; in any thread."""
        taken, self._reports = self._reports, []
        return taken


def enable() -> Sanitizer:
    """Let the sanitizer watch this process from now on."""
    from torch.cuda import _sanitizer

    sanitizer = Sanitizer()
    handler: Any = _sanitizer.cuda_sanitizer.dispatch.event_handler
    handler._handle_kernel_launch = sanitizer.collect(handler._handle_kernel_launch)
    _sanitizer.enable_cuda_sanitizer()
    return sanitizer


@dataclass(slots=True)
class Opinion:
    """What the sanitizer says of one case and its twins."""

    nodeid: str
    complete: bool | None
    """Whether it reports the case with nothing left out, which is safe; None if the case failed otherwise."""
    twins: dict[str, bool | None] = field(default_factory=dict)
    """Whether it reports each twin, by the synchronization that is left out. None if that says nothing: it reports the
    complete case too, or the synchronization was not issued under it."""
    failure: str | None = None
    """How the complete case failed otherwise."""


# In the sanitizer's process.


def form_opinion(runs: Runs, synchronizations: Sequence[str], sanitizer: Sanitizer) -> Opinion:
    """Ask the sanitizer, which is enabled, about a case.

    Args:
        runs: of the case.
        synchronizations: which to leave out, one at a time.
        sanitizer: which watches this process.
    """
    opinion = Opinion(runs.case.nodeid, None)
    try:
        opinion.complete = _reports(runs, None, sanitizer)
    except Exception as error:
        opinion.failure = first_line(error)
    for each in synchronizations:
        asked = opinion.complete is False
        opinion.twins[each] = _reports_twin(runs, SynchronizationId.parse(each), sanitizer) if asked else None
    return opinion


def _reports(runs: Runs, fault: Fault | None, sanitizer: Sanitizer) -> bool | None:
    sanitizer.take()
    repetition = runs.once(Plan(), synchronizations=True, fault=fault)
    if sanitizer.take():
        return True
    if fault is None or any(each.left_out for each in repetition.recording.synchronizations):
        return False
    return None


def _reports_twin(runs: Runs, left_out: SynchronizationId, sanitizer: Sanitizer) -> bool | None:
    try:
        return _reports(runs, Fault(left_out), sanitizer)
    except Exception:  # not the sanitizer's, so it says nothing about the sanitizer
        return None


def answer(folder: Path, runs: Runs, sanitizer: Sanitizer) -> None:
    """Form the opinion on a case that is asked for, and write it."""
    questions = json.loads((folder / _QUESTIONS).read_text())
    opinion = form_opinion(runs, questions[runs.case.nodeid], sanitizer)
    with (folder / _ANSWERS).open("a") as file:
        file.write(json.dumps(asdict(opinion)) + "\n")


# In the process that studied the twins.


def ask(studies: Sequence[TwinStudy], device: str, root: Path, environment: Mapping[str, str]) -> str | None:
    """Have the sanitizer asked about each twin, and enter its answers into the studies.

    Args:
        studies: of the cases; controls have no twins.
        device: a resolved device.
        root: pytest's root folder, which node ids start from.
        environment: of the new process.

    Returns:
        What went wrong, in a sentence; the studies that were answered have their answers all the same.
    """
    asked = {study.nodeid: study for study in studies if study.twins}
    if not asked:
        return None
    with tempfile.TemporaryDirectory(prefix="sidestream-csan-") as name:
        folder = Path(name)
        questions = {nodeid: [twin.synchronization for twin in study.twins] for nodeid, study in asked.items()}
        (folder / _QUESTIONS).write_text(json.dumps(questions))
        command = [sys.executable, "-m", "pytest", "--rootdir", str(root), "-q", "-n0", "--twins", "--device", device]
        command += ["--results", str(folder / "results"), "--", *asked]
        done = subprocess.run(
            command,
            cwd=root,
            env={**environment, FOLDER_VARIABLE: name},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=preexec_dies_with_this_process(),
        )
        answers = folder / _ANSWERS
        lines = answers.read_text().splitlines() if answers.exists() else []
    opinions = [Opinion(**json.loads(line)) for line in lines]
    for opinion in opinions:
        _enter(asked[opinion.nodeid], opinion)
    failures = [f"{opinion.nodeid}: {opinion.failure}" for opinion in opinions if opinion.failure is not None]
    if failures:
        return f"csan says nothing of {len(failures)} cases, which fail under it; the first is {failures[0]}."
    if len(opinions) < len(asked):
        last = [line for line in done.stdout.splitlines() if line.strip()][-1:]
        return (
            f"csan was asked about {len(asked)} cases and answered for {len(opinions)}: its process ended with "
            f"{done.returncode} ({''.join(last).strip(' =') or 'it said nothing'})."
        )
    return None


def _enter(study: TwinStudy, opinion: Opinion) -> None:
    study.csan = opinion.complete
    for twin in study.twins:
        twin.csan = opinion.twins[twin.synchronization]


def folder_of(environment: Mapping[str, str] = os.environ) -> str | None:
    """The folder with the questions, in the sanitizer's process; else None."""
    return environment.get(FOLDER_VARIABLE)
