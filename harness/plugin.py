"""The pytest side: options, the ``lab`` fixture, and the loop of repetitions inside each case.

Each case is collected once; its repetitions run inside one call. pytest-repeat supplies ``--count`` and the marker
``repeat``; pytest-xdist the workers, and ``harness/distribution.py`` the spreading of one case over them.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

import harness
from harness import distribution
from harness.campaign.options import DEFAULT_LIMIT_S, Options
from harness.errors import InfrastructureError, SidestreamError, UsageError
from harness.exit_codes import ExitCode
from harness.observe.synchronizations import Fault, SynchronizationId
from harness.perturb.plan import Plan

if TYPE_CHECKING:
    from harness.backends.select import Backend
    from harness.campaign.case import Case
    from harness.campaign.csan import Sanitizer
    from harness.campaign.lab import Lab
    from harness.campaign.result import CaseResult
    from harness.campaign.session import Session
    from harness.campaign.store import ResultWriter
    from harness.campaign.twins import TwinStudy
    from harness.campaign.watchdog import Watchdog
    from harness.observe.overlap import Timeline
    from harness.report.progress import Progress

_LONGEST_LIMIT_S = 1e7
_LONGEST_HOLD_MS = 1e5
REPEAT_FIXTURE = "__pytest_repeat_step_number"


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
    exit_codes: set[ExitCode] = field(default_factory=set)
    device: str = ""
    started: float = field(default_factory=time.monotonic)
    load_reports: list[dict[str, float]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """What went wrong beside the cases, a sentence each."""
    progress: Progress | None = None
    broken: str | None = None
    sanitizer: Sanitizer | None = None
    """PyTorch's CUDA Sanitizer, in the process that asks it."""
    stderr_descriptor: int | None = None
    """Standard error as it was before pytest captured it."""
    _session: Session | None = None
    _writer: ResultWriter | None = None
    _watchdog: Watchdog | None = None

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
            self._session = Session(self.options, announce=_announce)
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

    def result(self, nodeid: str) -> CaseResult:
        """What this process counts of a case."""
        from harness.campaign.result import CaseResult

        return self.results.setdefault(nodeid, CaseResult(nodeid))

    def close(self) -> None:
        """Stop the load and the timers, and close the result file."""
        if self._watchdog is not None:
            # Its alarm would end the process once the interpreter has dropped the handler.
            self._watchdog.rest()
        if self._session is not None:
            report = self._session.load_report()
            if report is not None:
                self.load_reports.append(report)
            self._session.close()
            self._session = None
        if self._writer is not None:
            self._writer.close()
            if self._writer.failure is not None:
                self.failures.append(self._writer.failure)
            self._writer = None


RUN = pytest.StashKey[Run]()
RESULT = pytest.StashKey["CaseResult"]()
STUDY = pytest.StashKey["TwinStudy"]()


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
        "device": options.device,
        "seed": options.seed,
        "plan": str(options.plan) if options.plan is not None else None,
        "loads": list(options.loads),
    }


def _announce(sentence: str) -> None:
    # Straight to the terminal: what pytest captures would be seen only after a failure.
    print(sentence, file=sys.__stderr__, flush=True)


# Options and start-up.


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of Sidestream."""
    group = parser.getgroup("sidestream", "sidestream (streaming backward)")
    group.addoption(
        "--device", default="auto", help="auto, cuda, cuda:N or sim; auto: CUDA if there is a GPU (default: auto)"
    )
    group.addoption("--seed", type=int, default=0, help="seed of the plans that hold several launches (default: 0)")
    group.addoption("--plan", default=None, help="the plan of every repetition: baseline, or hold=stream:index[,...]")
    group.addoption(
        "--hold-ms",
        type=float,
        default=None,
        help="length of a hold on a real device (default: measured for each case)",
    )
    group.addoption("--load", default=None, help="keep the device busy meanwhile: compute (default: no load)")
    group.addoption(
        "--twins",
        action="store_true",
        help="run each case once for each of its synchronizations, with that one left out, and say what was noticed",
    )
    group.addoption(
        "--twin-repetitions",
        type=int,
        default=None,
        metavar="N",
        help="aimed repetitions that a twin gets (default: 1 on sim, 3 on a real device)",
    )
    group.addoption(
        "--csan",
        action="store_true",
        help="with --twins, ask PyTorch's CUDA Sanitizer about each twin as well, in a process of its own",
    )
    group.addoption("--twins-json", default=None, metavar="FILE", help="write what --twins found to FILE as well")
    group.addoption(
        "--catalogue-json", default=None, metavar="FILE", help="write what is known of the collected cases to FILE"
    )
    group.addoption(
        "--leave-out",
        default=None,
        metavar="SYNCHRONIZATION",
        help="leave one synchronization out in every repetition, such as wait@ambient:0/user; --twins names them",
    )
    group.addoption(
        "--misdirect",
        default=None,
        metavar="WAIT",
        help="make one wait for another event than was asked for, as a broken runtime might",
    )
    group.addoption(
        "--repetition-timeout",
        type=float,
        default=DEFAULT_LIMIT_S,
        metavar="SECONDS",
        help=f"cut a repetition that takes longer (default: {DEFAULT_LIMIT_S:g})",
    )
    group.addoption(
        "--results",
        default=None,
        metavar="DIRECTORY",
        help="folder for the results of this run (default: a new one in .sidestream/runs, of which 20 are kept)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Settle the options; nothing is opened yet."""
    config.addinivalue_line(
        "markers",
        "control(reason, aim): documented as unsafe, so it must be seen to race; aim: the stream of the racing access.",
    )
    config.addinivalue_line(
        "markers",
        "defect(report, aim, torch, devices): safe, but PyTorch is wrong in these versions on these kinds of device, "
        "so it must be seen to race there; report: the file that describes the defect; aim: as for a control.",
    )
    config.addinivalue_line("markers", "contract(source): where the promise comes from that the docstring states.")
    config.addinivalue_line("markers", "devices(count): the case needs so many devices; elsewhere it is not covered.")
    try:
        run = _worker_run(config) if hasattr(config, "workerinput") else _main_run(config)
    except SidestreamError as error:
        raise _as_pytest_error(error) from None
    config.stash[RUN] = run
    config.pluginmanager.register(Recorder(run), "sidestream-recorder")
    if run.worker == "controller":
        config.pluginmanager.register(distribution.Controller(config, run), "sidestream-controller")


def _worker_run(config: pytest.Config) -> Run:
    given = distribution.WorkerInput.from_json(config.workerinput["sidestream"])  # type: ignore[attr-defined]
    given.apply_to_environment()
    from harness.campaign.watchdog import die_with_parent

    die_with_parent()
    return Run(given.options, Path(given.directory), config.workerinput["workerid"])  # type: ignore[attr-defined]


def _main_run(config: pytest.Config) -> Run:
    option = config.option
    if not hasattr(option, "count"):
        raise UsageError("--count comes from pytest-repeat, which is not installed: pip install pytest-repeat.")
    if option.count < 1:
        raise UsageError(f"--count {option.count} runs nothing: give a number of repetitions from 1 on.")
    if not 0 < option.repetition_timeout < _LONGEST_LIMIT_S:
        raise UsageError(f"--repetition-timeout {option.repetition_timeout:g} makes no sense: give seconds above 0.")
    if option.hold_ms is not None and not 0 < option.hold_ms < _LONGEST_HOLD_MS:
        raise UsageError(
            f"--hold-ms {option.hold_ms:g} holds nothing: give milliseconds from above 0 to 100,000, or leave it out."
        )
    from harness.backends import hardware_queues, visible_devices
    from harness.perturb.load import parse_loads, require_real_device

    loads = tuple(parse_loads(option.load)) if option.load is not None else ()
    hardware_queues.use_all(os.environ)
    visible_devices.put_first(option.device)
    from harness.backends.select import resolve

    device = resolve(option.device)
    if loads:
        require_real_device(device)
    _check_twin_options(option)
    from harness.campaign import csan

    if option.csan:
        csan.require_cuda(device)
    options = Options(
        device=device,
        seed=option.seed,
        plan=Plan.parse(option.plan) if option.plan is not None else None,
        hold_ms=option.hold_ms,
        loads=loads,
        limit_s=option.repetition_timeout,
        stop_at_first_race=option.maxfail == 1,
        fault=_fault(option),
        twins=option.twins,
        twin_repetitions=option.twin_repetitions,
        csan_folder=csan.folder_of(),
    )
    worker = "controller" if distribution.is_controller(config) else "main"
    return Run(options, config.rootpath, worker)


def _fault(option: Any) -> Fault | None:
    for text, misdirect in ((option.leave_out, False), (option.misdirect, True)):
        if text is not None:
            return Fault(SynchronizationId.parse(text), misdirect)
    return None


def _check_twin_options(option: Any) -> None:
    if option.leave_out is not None and option.misdirect is not None:
        raise UsageError("--leave-out and --misdirect are two faults; give one of them.")
    if option.misdirect is not None and SynchronizationId.parse(option.misdirect).kind != "wait":
        raise UsageError(f"--misdirect {option.misdirect}: only the wait for an event can be misdirected.")
    if option.csan and not option.twins:
        raise UsageError("--csan goes with --twins, which is not given.")
    if not option.twins:
        for name in ("--twin-repetitions", "--twins-json"):
            if getattr(option, name.strip("-").replace("-", "_")) is not None:
                raise UsageError(f"{name} goes with --twins, which is not given.")
        return
    if option.twin_repetitions is not None and option.twin_repetitions < 1:
        raise UsageError(f"--twin-repetitions {option.twin_repetitions} runs nothing: give a number from 1 on.")
    for name, given in (
        ("--count", option.count > 1),
        ("--plan", option.plan is not None),
        ("--leave-out", option.leave_out is not None),
        ("--misdirect", option.misdirect is not None),
    ):
        if given:
            raise UsageError(f"--twins chooses plans, repetitions and what to leave out itself; leave out {name}.")
    if option.twins_json is not None and not Path(option.twins_json).absolute().parent.is_dir():
        raise UsageError(f"--twins-json {option.twins_json}: there is no such folder.")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """What ``-n auto`` means: CPU cores on the simulator, a measured number of workers a GPU on a real device."""
    from harness.backends.select import resolve

    try:
        return distribution.auto_worker_count(resolve(config.option.device))
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None


def _as_pytest_error(error: SidestreamError) -> Exception:
    if error.exit_code is ExitCode.USAGE:
        return pytest.UsageError(str(error))
    return pytest.exit.Exception(str(error), returncode=int(error.exit_code))


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Open what the run needs before the first worker starts, so that what is missing is said once, at once."""
    config = session.config
    run = config.stash[RUN]
    run.stderr_descriptor = config.stash.get(fault_handler_stderr_fd_key, None)
    if hasattr(config, "workerinput") or config.option.collectonly or config.option.showfixtures:
        return
    try:
        _refuse_hiding_settings(run)
        from harness.backends.select import open_backend
        from harness.campaign.store import new_run_directory, use_run_directory

        run.device = describe(open_backend(run.options.device, _announce))
        chosen = config.option.results
        run.directory = use_run_directory(Path(chosen)) if chosen else new_run_directory(config.rootpath)
        run.started = time.monotonic()
    except SidestreamError as error:
        raise _as_pytest_error(error) from None


def _refuse_hiding_settings(run: Run) -> None:
    from harness.backends import hidden_races

    refused = [finding for finding in hidden_races.find(os.environ, run.options.device) if finding.refuse]
    if refused:
        raise UsageError(" ".join(f"{finding.setting} is set: {finding.effect} Unset it." for finding in refused))


def pytest_report_header(config: pytest.Config) -> list[str]:
    """What the run is about to do, and what could hide a race from it."""
    run = config.stash[RUN]
    if hasattr(config, "workerinput") or not run.device:
        return []
    import torch

    from harness.backends import hidden_races

    options = run.options
    lines = [
        f"sidestream {harness.__version__}: {run.device}, torch {torch.__version__}",
        f"plans: {options.plan or 'one cycle after another'}, seed {options.seed}; "
        f"hold: {_hold_kind(options)}; load: {','.join(options.loads) or 'none'}",
        f"results: {_shown(run.directory)}",
    ]
    for finding in hidden_races.find(os.environ, options.device):
        lines.append(f"warning: {finding.setting} is set: {finding.effect}")
    if run.worker == "controller":
        lines += distribution.describe_workers(config, options)
    return lines


def _hold_kind(options: Options) -> str:
    if options.device == "sim":
        return "scheduler (until something forces the launch)"
    return "sleep, " + (f"{options.hold_ms:g} ms" if options.hold_ms is not None else "length measured for each case")


def _shown(path: Path) -> str:
    shown = os.path.relpath(path)
    return str(path) if shown.startswith("..") else shown


# Collection: a case is one item, whatever its repetitions.


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None, object, object]:
    """Keep pytest-repeat from making an item of every repetition of a case.

    What is profiled is run once: a timeline is looked at, and no race is looked for.
    """
    if not {"lab", "profiled"} & set(metafunc.fixturenames):
        return (yield)
    try:
        repetition_count(metafunc.definition)
    except UsageError as error:
        raise pytest.Collector.CollectError(str(error)) from None
    parametrize = metafunc.parametrize

    def without_repetitions(argnames: str, *args: Any, **kwargs: Any) -> None:
        if argnames != REPEAT_FIXTURE:
            parametrize(argnames, *args, **kwargs)

    metafunc.parametrize = without_repetitions  # type: ignore[assignment, method-assign]
    result = yield
    while REPEAT_FIXTURE in metafunc.fixturenames:
        metafunc.fixturenames.remove(REPEAT_FIXTURE)
    return result


def repetition_count(item: pytest.Item) -> int | None:
    """How many repetitions were asked for; None (``--count 1``, the default) means one cycle of the case's plans.

    Raises:
        UsageError: the marker ``repeat`` has no sensible number.
    """
    marker = item.get_closest_marker("repeat")
    count = item.config.option.count
    if marker is not None:
        count = marker.args[0] if marker.args else 0
        if not isinstance(count, int) or count < 1:
            raise UsageError(f"{item.nodeid}: @pytest.mark.repeat takes a number of repetitions from 1 on.")
    return count if count > 1 else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """In a worker make a slice of each case for every worker, so that even one selected test uses all of them.

    Here, after all selection, since --lf and others know cases by their own names. Without workers, start to say how
    far the repetitions are.
    """
    config = session.config
    if hasattr(config, "workerinput"):
        distribution.slice_items(session.items, config.workerinput["workercount"], repetition_count)
    run = config.stash[RUN]
    if run.prints_summary and config.option.catalogue_json is not None:
        _write_catalogue(Path(config.option.catalogue_json), session.items)
    if run.worker != "main" or config.option.collectonly:
        return
    from harness.report.progress import terminal_progress

    counts = [repetition_count(item) for item in session.items if "lab" in getattr(item, "fixturenames", ())]
    run.progress = terminal_progress(config.pluginmanager.getplugin("terminalreporter"))
    run.progress.total = sum(count or 0 for count in counts) if None not in counts else None


def _write_catalogue(path: Path, items: Iterable[pytest.Item]) -> None:
    import json

    from harness import catalogue

    try:
        path.write_text(json.dumps(catalogue.collect(items).to_json(), indent=1))
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None
    except OSError as error:
        raise pytest.UsageError(f"--catalogue-json {path}: {error.strerror}.") from None


# Running.


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Lab:
    """Named streams, prepared and poisoned tensors, staged observations: what a case works with.

    A test that uses it is a case: its body runs once a repetition, each under a plan that holds other launches.
    """
    session = request.config.stash[RUN].session()
    marker = request.node.get_closest_marker("devices")
    needed = marker.args[0] if marker is not None else 1
    if session.backend.device_count < needed:
        pytest.skip(f"not covered: needs {needed} devices, and there is {session.backend.device_count}")
    return session.lab()


@pytest.fixture
def profiled(request: pytest.FixtureRequest) -> Callable[[Callable[[], object]], Timeline]:
    """Runs a function on a real device under PyTorch's profiler, and says which kernels and copies ran when.

    The function is run three times before, so that what is loaded or allocated once does not count. The trace is kept
    in the folder of the run's results.
    """
    run = request.config.stash[RUN]
    if run.options.device == "sim":
        pytest.skip("not covered: what runs at the same time takes a real device to see")
    backend = run.session().backend

    def profile(body: Callable[[], object]) -> Timeline:
        import json

        from torch.profiler import ProfilerActivity, profile

        from harness.observe.overlap import Timeline

        for _ in range(3):
            body()
            backend.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            body()
            backend.synchronize()
        path = run.directory / f"{re.sub(r'[^a-zA-Z0-9_-]+', '-', request.node.name)}.trace.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        trace.export_chrome_trace(str(path))
        return Timeline.of(json.loads(path.read_text()))

    return profile


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a case: all its repetitions, or this worker's slice of them."""
    if "lab" not in pyfuncitem.fixturenames:
        return None
    import torch

    from harness.campaign.case import Case
    from harness.campaign.result import CaseResult
    from harness.judge.verdict import Verdict
    from harness.markers import control_of
    from harness.report.failure import describe_failure
    from harness.report.outcome import outcome_of

    run = pyfuncitem.config.stash[RUN]
    nodeid, position, slices = distribution.split(pyfuncitem.nodeid)
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    case = Case(
        nodeid,
        lambda: pyfuncitem.obj(**arguments),
        run.session(),
        cast("Lab", pyfuncitem.funcargs["lab"]),
        control_of(pyfuncitem, torch.__version__, run.options.device),
    )
    if run.options.twins:
        _study_twins(pyfuncitem, case, run)
        return True
    count = repetition_count(pyfuncitem)

    def numbers(cycle: int) -> Iterable[int]:
        return range(position, count if count is not None else cycle, slices)

    # In a worker it goes to the controller with the report; what is kept here would grow with the cases.
    result = run.result(nodeid) if run.prints_summary else CaseResult(nodeid)
    result.control = case.control.reason if case.control else None
    result.defect = case.control is not None and case.control.defect
    pyfuncitem.stash[RESULT] = result
    try:
        case.run(
            numbers,
            result,
            run.writer(),
            run.watchdog(),
            describe=lambda case, repetition: describe_failure(case, repetition, run.options, run.device),
            progress=run.progress.repetition if run.progress is not None else lambda: None,
        )
    except InfrastructureError as error:
        run.broken = str(error)
        raise
    except SidestreamError:
        raise
    except (Exception, pytest.skip.Exception, pytest.xfail.Exception):
        where = case.where()
        if where is not None:
            pyfuncitem.add_report_section("call", "sidestream", f"raised in {where}")
        text = outcome_of(result).text if slices == 1 else None
        if text is not None and result.count(Verdict.RACE) and case.control is None:
            # A race that has been seen is not undone by a body that gives up later.
            pytest.fail(text, pytrace=False)
        raise
    finally:
        run.session().turns.end()
    if slices == 1:
        text = outcome_of(result).text
        if text is not None:
            pytest.fail(text, pytrace=False)
    return True


def _study_twins(item: pytest.Function, case: Case, run: Run) -> None:
    from harness.campaign import csan
    from harness.campaign.twins import Runs, study_twins
    from harness.report.twins import describe_survivors

    options = run.options
    session = run.session()
    if options.csan_folder is not None and run.sanitizer is not None:
        try:
            csan.answer(Path(options.csan_folder), Runs(case, session.turns, run.watchdog()), run.sanitizer)
        finally:
            session.turns.end()
        return
    most = options.twin_repetitions or (1 if session.simulated else 3)
    try:
        study = item.stash[STUDY] = study_twins(case, most, session.turns, run.watchdog())
    except InfrastructureError as error:
        run.broken = str(error)
        raise
    finally:
        session.turns.end()
    if study.survivors:
        pytest.fail(describe_survivors(study, options), pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, distribution.Report, distribution.Report]:
    """Send a case's counts along with its report, and our own errors as their sentence alone."""
    report = yield
    if call.when == "call" and RESULT in item.stash:
        report.sidestream = item.stash[RESULT].to_json()
        del item.stash[RESULT]  # pytest keeps the items until its end
    if call.when == "call" and STUDY in item.stash:
        report.sidestream_twins = item.stash[STUDY].to_json()
        del item.stash[STUDY]
    if call.excinfo is not None and isinstance(call.excinfo.value, SidestreamError):
        report.longrepr = str(call.excinfo.value)
        report.sidestream_exit_code = int(call.excinfo.value.exit_code)
    return report


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
        if study is not None:
            from harness.campaign.twins import TwinStudy

            self._run.studies[report.nodeid] = TwinStudy.from_json(study)
        code = getattr(report, "sidestream_exit_code", None)
        if data is not None:
            self._run.reported.add(report.nodeid)
            result = self._run.results[report.nodeid] = CaseResult.from_json(data)
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


# The end.


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    """Close the device, and settle the exit code after everyone else has had a say."""
    run = session.config.stash.get(RUN, None)
    if run is not None:
        run.close()
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["sidestream"] = {"loads": run.load_reports, "failures": run.failures}
    result = yield
    if run is not None:
        controller = session.config.pluginmanager.getplugin("sidestream-controller")
        status = int(session.exitstatus)
        if status == ExitCode.INTERRUPTED and controller is not None and controller.stopped_for_failures():
            status = ExitCode.RACE
        session.exitstatus = settle_exit_code(run, status)
    return result


def settle_exit_code(run: Run, status: int) -> int:
    """The exit status of the run: pytest's own, refined by why cases failed.

    A race is a definite answer and outranks everything; a usage error comes before a broken machine, and that before a
    run that proves nothing.
    """
    if status not in (ExitCode.CLEAN, ExitCode.RACE):
        return status
    for code in (ExitCode.RACE, ExitCode.USAGE, ExitCode.INFRASTRUCTURE, ExitCode.INCONCLUSIVE):
        if code in run.exit_codes:
            return int(code)
    return status


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what the run proved."""
    run = config.stash.get(RUN, None)
    if run is None:
        return
    from harness.judge.verdict import Verdict
    from harness.report.outcome import outcome_of
    from harness.report.summary import write_summary

    controller = config.pluginmanager.getplugin("sidestream-controller")
    if controller is not None:
        for result in controller.interrupted():
            run.results.setdefault(result.nodeid, result)
    if run.studies:
        _report_twins(terminalreporter, config, run)
    if not run.results:
        return
    for nodeid, result in run.results.items():
        # Cases that were cut off have no report, but a race that they have shown is known all the same.
        text = None if nodeid in run.reported else outcome_of(result).text
        if text is not None and result.count(Verdict.RACE):
            terminalreporter.write_sep("_", f"{nodeid} (interrupted)")
            terminalreporter.write_line(text)

    write_summary(terminalreporter, run.results, run.options, run.load_reports, time.monotonic() - run.started)
    terminalreporter.write_line(f"results: {_shown(run.directory)}")
    for failure in dict.fromkeys(run.failures):
        terminalreporter.write_line(f"warning: {failure}", yellow=True)


def _report_twins(terminalreporter: pytest.TerminalReporter, config: pytest.Config, run: Run) -> None:
    from harness.report.twins import write_twins, write_twins_json

    studies = [study for _, study in sorted(run.studies.items())]
    if config.option.csan:
        from harness.campaign import csan

        warning = csan.ask(studies, run.options.device, config.rootpath, os.environ)
        if warning is not None:
            terminalreporter.write_line(f"warning: {warning}", yellow=True)
    write_twins(terminalreporter, studies, run.options)
    path = config.option.twins_json
    if path is None:
        return
    try:
        write_twins_json(Path(path), studies, run.options)
    except OSError as error:
        terminalreporter.write_line(
            f"warning: --twins-json {path}: {error.strerror}; the twins are above.", yellow=True
        )
    else:
        terminalreporter.write_line(f"twins: {path}")
