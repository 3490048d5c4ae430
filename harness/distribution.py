"""One case over several pytest-xdist workers: slices on the way out, one result a case on the way back.

In a worker every case stands once for each slice of its repetitions (slice 1 of 3 runs the repetitions 0, 3, 6, ...),
under node ids that end in ``@slice-1-of-3``. In the controller the reports of the slices are merged before pytest or
any plugin sees them, so that counts, JUnit XML, ``--durations`` and ``-x`` are those of cases.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

from harness.backends import visible_devices
from harness.campaign.options import Options
from harness.campaign.reader import read_run
from harness.campaign.result import CaseResult
from harness.campaign.resume import Earlier
from harness.campaign.store import RepetitionRecord
from harness.judge.verdict import Verdict
from harness.observe.synchronizations import Fault, SynchronizationId
from harness.perturb.load.load import LoadReport
from harness.perturb.plan import Plan
from harness.report.junit import properties
from harness.report.outcome import outcome_of
from harness.report.progress import Tail, Ticker, terminal_progress

if TYPE_CHECKING:
    from harness.pytest_side.run import Run

Report: TypeAlias = Any
"""A ``pytest.TestReport``, with the attributes that xdist (``node``) and this plugin (``sidestream``) add to it."""

WORKERS_PER_GPU = 1
"""How many workers a GPU takes before more of them make the suite slower: holds are what takes time, and workers that
share a GPU take turns. On an H200 one worker got through 83 repetitions a second of the seed-gradient suite, eight
through 66; with the load compute through 39 and 31."""
_SLICE = re.compile(r"@slice-(\d+)-of-(\d+)$")


def is_controller(config: pytest.Config) -> bool:
    """Whether this process only hands out work to xdist workers."""
    distributes = getattr(config.option, "dist", "no") != "no" and not config.option.collectonly
    return distributes and not hasattr(config, "workerinput")


def stacks_path(directory: Path, worker: str) -> Path:
    """Where the watchdog of a worker leaves the stacks of a repetition that it cut."""
    return directory / f"{worker}.stacks"


# From the controller to a worker.


@dataclass(frozen=True, slots=True)
class WorkerInput:
    """What the controller tells a worker before it imports torch."""

    options: Options
    directory: str
    environment: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data that xdist can send."""
        options = asdict(self.options)
        options["plan"] = None if self.options.plan is None else str(self.options.plan)
        options["loads"] = list(self.options.loads)
        fault = self.options.fault
        options["fault"] = None if fault is None else [str(fault.target), fault.misdirect]
        return {"options": options, "directory": self.directory, "environment": self.environment}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> WorkerInput:
        """What ``to_json`` made the data of."""
        options = dict(data["options"])
        options["plan"] = None if options["plan"] is None else Plan.parse(options["plan"])
        options["loads"] = tuple(options["loads"])
        if options["fault"] is not None:
            target, misdirect = options["fault"]
            options["fault"] = Fault(SynchronizationId.parse(target), misdirect)
        return cls(Options(**options), data["directory"], data["environment"])

    def apply_to_environment(self) -> None:
        """Make the worker's own GPU its first one."""
        os.environ.update(self.environment)


def _file_name(gpu: str) -> str:
    return "gpu-" + re.sub(r"[^\w-]", "_", gpu)


def worker_environment(options: Options, index: int) -> dict[str, str]:
    """The variables by which worker ``index`` sees its own GPU first."""
    return {} if options.device == "sim" else visible_devices.environment_of_worker(os.environ, index)


def auto_worker_count(device: str) -> int | None:
    """What ``-n auto`` means on a real device; None on the simulator, where xdist's own answer, the cores, is right."""
    if device == "sim":
        return None
    return WORKERS_PER_GPU * max(1, visible_devices.count(os.environ))


def describe_workers(config: pytest.Config, options: Options) -> list[str]:
    """Which worker has which GPU, for the header."""
    if options.device == "sim":
        return []
    count = len(config.option.tx or [])
    gpus = [worker_environment(options, index).get("CUDA_VISIBLE_DEVICES", "") for index in range(count)]
    return ["workers: " + ", ".join(f"gw{index} has GPU {visible.split(',')[0]}" for index, visible in enumerate(gpus))]


# In a worker.


def split(nodeid: str) -> tuple[str, int, int]:
    """The case's own node id, the slice's position from 0, and the number of slices (1 for a whole case)."""
    match = _SLICE.search(nodeid)
    if match is None:
        return nodeid, 0, 1
    return nodeid[: match.start()], int(match[1]) - 1, int(match[2])


def _rename(item: Any, nodeid: str) -> None:
    # pytest makes node ids of names and parameters and has no way to give an item another one.
    if hasattr(item, "_id"):  # structured, from pytest 9.2 on
        item._id = type(item._id).parse(nodeid)
    else:
        item._nodeid = nodeid


def slice_items(
    items: list[pytest.Item], worker_count: int, repetition_count: Callable[[pytest.Item], int | None]
) -> None:
    """Replace each case by a slice for every worker; a case that runs one cycle of plans stays whole."""
    sliced: list[pytest.Item] = []
    for item in items:
        count = repetition_count(item) if "lab" in getattr(item, "fixturenames", ()) else None
        slices = min(worker_count, count or 1)
        if item.get_closest_marker("xfail"):
            # pytest decides about expected failures where the test runs, so all repetitions must run there.
            slices = 1
        if slices == 1 or not isinstance(item, pytest.Function):
            sliced.append(item)
            continue
        for number in range(1, slices + 1):
            copy = pytest.Function.from_parent(
                item.parent,
                name=item.name,
                callspec=getattr(item, "callspec", None),
                fixtureinfo=item._fixtureinfo,
                originalname=item.originalname,
            )
            _rename(copy, f"{item.nodeid}@slice-{number}-of-{slices}")
            copy.own_markers[:] = item.own_markers
            copy.keywords.update(item.keywords)
            sliced.append(copy)
    items[:] = sliced


# In the controller.


@dataclass
class _Slices:
    """The reports of one case's slices."""

    node: Any
    """The worker that the merged reports are said to come from."""
    slices: int
    setups: list[Report] = field(default_factory=list)
    calls: list[Report] = field(default_factory=list)
    teardowns: list[Report] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    recovered: list[CaseResult] = field(default_factory=list)

    def add(self, position: int, report: Report) -> None:
        {"setup": self.setups, "call": self.calls, "teardown": self.teardowns}[report.when].append(report)
        if report.when == "teardown":
            self.ended.add(position)

    @property
    def complete(self) -> bool:
        return len(self.ended) == self.slices

    def result(self, nodeid: str) -> CaseResult:
        merged = CaseResult(nodeid)
        for report in self.calls:
            data = getattr(report, "sidestream", None)
            if data is not None:
                merged.merge(CaseResult.from_json(data))
        for result in self.recovered:
            merged.merge(result)
        return merged

    def merged(self, nodeid: str) -> Iterator[Report]:
        """The reports of the case: one a phase, the worst, with the durations added up."""
        result = self.result(nodeid)
        text = outcome_of(result).text
        set_up = all(report.passed for report in self.setups)
        for when, reports in (("setup", self.setups), ("call", self.calls), ("teardown", self.teardowns)):
            if when == "call" and not set_up and text is None:
                continue
            if not reports and not (when == "call" and self.recovered):
                continue
            # What some slices have shown counts, even if the others were not set up or were skipped.
            worst = max if when == "setup" and text is not None else min
            report = worst(reports, key=_badness) if reports else _empty_call(nodeid, self.setups)
            report.nodeid = nodeid
            # Those of the slices are of their shares; pytest writes those of the teardown.
            report.user_properties = properties(result)
            report.duration = sum(each.duration for each in reports)
            if when == "call" or (when == "setup" and not report.passed):
                report.sidestream = result.to_json()
            if when == "call" and not report.failed and text is not None:
                report.outcome, report.longrepr = "failed", text
            yield report


def _badness(report: Report) -> int:
    return ("failed", "skipped", "passed").index(report.outcome)


def _empty_call(nodeid: str, setups: list[Report]) -> Report:
    location = setups[0].location if setups else (nodeid.split("::")[0], None, nodeid)
    keywords = setups[0].keywords if setups else {}
    return pytest.TestReport(nodeid, location, keywords, "passed", None, "call")


class Controller:
    """The controller's side: tells workers what to do, and merges what they report."""

    def __init__(self, config: pytest.Config, run: Run) -> None:
        self._config = config
        self._run = run
        self._cases: dict[str, _Slices] = {}
        self._whole: set[str] = set()
        self._whole_ended: set[str] = set()
        self._started: set[str] = set()
        self._collected: set[str] = set()
        self._forward: Callable[[Any, Report], None]
        self._dsession: Any = None
        self._ticker: Ticker | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Step between xdist and the rest of pytest, before the first report."""
        if self._config.option.dist == "each":
            raise pytest.UsageError(
                "--dist each makes every worker run everything, which --count already does: leave it out."
            )
        if self._config.option.maxschedchunk is None:
            # Slices of one case stand next to each other; sent one by one they reach different workers.
            self._config.option.maxschedchunk = 1
        if self._config.pluginmanager.getplugin("dsession") is None:
            raise pytest.UsageError(
                f"-n {self._config.option.numprocesses} makes no worker: give a number from 1 on, or auto."
            )
        dsession = self._dsession = self._config.pluginmanager.getplugin("dsession")
        self._forward = dsession.worker_testreport
        forward_start, forward_finish = dsession.worker_logstart, dsession.worker_logfinish

        # xdist has no hook that can hold a report back: pytest_runtest_logreport is called for all plugins at once.
        def worker_testreport(node: Any, rep: Report) -> None:
            # xdist has set this to the number of slices just now; pytest's percentages are of cases.
            session.testscollected = len(self._collected)
            for report in self._take(node, rep):
                self._forward(report.node, report)

        def worker_logstart(node: Any, nodeid: str, location: tuple[str, int | None, str]) -> None:
            base = split(nodeid)[0]
            if base not in self._started:
                self._started.add(base)
                forward_start(node, nodeid=base, location=location)

        def worker_logfinish(node: Any, nodeid: str, location: tuple[str, int | None, str]) -> None:
            base, _, slices = split(nodeid)
            if slices == 1 or self._cases[base].complete:
                forward_finish(node, nodeid=base, location=location)

        dsession.worker_testreport = worker_testreport
        dsession.worker_logstart = worker_logstart
        dsession.worker_logfinish = worker_logfinish
        if not self._config.option.collectonly:
            self._start_progress()

    def _start_progress(self) -> None:
        reporter = self._config.pluginmanager.getplugin("terminalreporter")
        progress = terminal_progress(reporter)
        tail = Tail(self._run.directory)

        def tick() -> None:
            count = self._config.option.count
            progress.total = count * len(self._collected) if count > 1 else None
            progress.update(tail.lines())

        self._ticker = Ticker(tick, 1.0)

    def stopped_for_failures(self) -> bool:
        """Whether the run ended early because of ``-x`` or ``--maxfail``, which xdist reports as an interruption."""
        return str(getattr(self._dsession, "shouldstop", "")).startswith("stopping after")

    def pytest_sessionfinish(self) -> None:
        """Stop reporting progress."""
        if self._ticker is not None:
            self._ticker.stop()

    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        """Count cases, not slices."""
        self._collected = {split(nodeid)[0] for nodeid in ids}

    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker its options and its GPU."""
        index = int(re.sub(r"\D", "", node.gateway.id) or 0)
        environment = worker_environment(self._run.options, index)
        options = self._run.options
        if environment:
            gpu = next(iter(environment.values())).split(",")[0]
            options = dataclasses.replace(options, turns=str(self._run.directory / f"{_file_name(gpu)}.turns"))
        given = WorkerInput(options, str(self._run.directory), environment)
        node.workerinput["sidestream"] = given.to_json()

    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Take what the load of a worker achieved, and what went wrong there."""
        told = getattr(node, "workeroutput", {}).get("sidestream", {})
        self._run.load_reports += map(LoadReport.from_json, told.get("loads", []))
        self._run.failures += told.get("failures", [])
        self._run.usage_errors += told.get("usage_errors", [])

    def _take(self, node: Any, report: Report) -> Iterator[Report]:
        nodeid, position, slices = split(report.nodeid)
        if slices == 1:
            self._whole.add(nodeid)
            if report.when == "teardown":
                self._whole_ended.add(nodeid)
            report.node = node
            yield report
            return
        case = self._cases.setdefault(nodeid, _Slices(node, slices))
        case.add(position, report)
        if case.complete:
            yield from self._finished(nodeid, case)

    def _finished(self, nodeid: str, case: _Slices) -> Iterator[Report]:
        for report in case.merged(nodeid):
            report.node = case.node
            yield report
        # What the slices have counted is in the merged reports; kept here it would grow with the cases.
        for reports in (case.setups, case.calls, case.teardowns):
            reports.clear()
        case.recovered.clear()

    def pytest_handlecrashitem(self, crashitem: str, report: Report) -> None:
        """A worker died in a case: keep the repetitions that it had finished, and say what it was doing."""
        node = report.node
        nodeid, position, slices = split(crashitem)
        result = self._recover(node.gateway.id, nodeid, position, slices)
        if slices == 1 and nodeid not in self._whole_ended:
            report.when = "call"
            report.longrepr = outcome_of(result).text or report.longrepr
            report.sidestream = result.to_json()
            self._whole.add(nodeid)
            return
        # xdist logs this report right after this hook; as a passed set-up of the case it says nothing.
        report.nodeid, report.when, report.outcome, report.longrepr = nodeid, "setup", "passed", None
        if slices == 1:
            return  # what became of the case had been said before the worker gave up its broken device
        case = self._cases.setdefault(nodeid, _Slices(node, slices))
        report.node = case.node
        if position in case.ended:
            return
        case.ended.add(position)
        case.recovered.append(result)
        if case.complete:
            for merged in self._finished(nodeid, case):
                self._forward(merged.node, merged)

    def _recover(self, worker: str, nodeid: str, position: int, slices: int) -> CaseResult:
        session = self._run.options.session
        # The first slice counts what earlier sessions have left, whoever ran it.
        earlier = position == 0 and self._run.options.resume
        result = Earlier.read(self._run.directory, session).result(nodeid) if earlier else CaseResult(nodeid)
        run = read_run(self._run.directory)
        for record in run:
            here = (record.session, record.worker, record.nodeid) == (session, worker, nodeid)
            if here and record.repetition % slices == position:
                result.add(record)
        stacks = stacks_path(self._run.directory, worker)
        hung = stacks.exists() and stacks.stat().st_size > 0
        verdict = Verdict.TIMEOUT if hung else Verdict.INFRA
        flying = [lost for lost in run.in_flight if (lost.worker, lost.nodeid) == (worker, nodeid)]
        what = f"repetition {flying[0].repetition} under {flying[0].plan}" if flying else "the fully synchronized run"
        number, plan = (flying[0].repetition, flying[0].plan) if flying else (0, "baseline")
        result.add(RepetitionRecord(nodeid, number, plan, verdict.value, 0.0))
        if hung:
            limit_s = self._run.options.limit_s
            result.describe_failure(
                "timeout", f"timeout: worker {worker} hung for {limit_s:g} s in {what}\n{stacks.read_text()}"
            )
        else:
            result.describe_failure(
                "infra",
                f"infra: worker {worker} died in {what}; the repetitions before it are counted. Look for a crash or "
                "the out-of-memory killer in the system's log.",
            )
        return result

    def interrupted(self) -> Iterator[CaseResult]:
        """What is known of cases that never came to their end, from the result files of the workers."""
        unfinished: dict[str, CaseResult] = {}
        for record in read_run(self._run.directory):
            ended = record.nodeid in self._whole or (
                record.nodeid in self._cases and self._cases[record.nodeid].complete
            )
            if not ended:
                result = unfinished.setdefault(record.nodeid, CaseResult(record.nodeid))
                result.add(record)
                if record.message:
                    result.describe_failure(record.message, f"{record.verdict} under {record.plan}: {record.message}")
        yield from unfinished.values()
