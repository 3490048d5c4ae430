"""The pytest side: hooks and fixtures; ``harness/pytest_side/`` has what they call.

Each case is collected once; its repetitions run inside one call. pytest-repeat supplies ``--count`` and the marker
``repeat``; pytest-xdist the workers, and ``harness/distribution.py`` the spreading of one case over them.
"""

from __future__ import annotations

import dataclasses
import os
import random
import re
import time
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

import harness
from harness import distribution
from harness.errors import SidestreamError, UsageError
from harness.exit_codes import ExitCode
from harness.processes import die_with_parent, interrupt_when_terminated
from harness.pytest_side.options import LAST_RUN, add_options, options_of
from harness.pytest_side.repetitions import repetition_count, run_case
from harness.pytest_side.reporting import Recorder, settle_exit_code, write_terminal_summary
from harness.pytest_side.run import FURTHER, RESULT, RUN, STUDY, UNFIT, Run, announce, describe, header

if TYPE_CHECKING:
    from harness.campaign.lab import Lab
    from harness.campaign.options import Options
    from harness.observe.overlap import Timeline

REPEAT_FIXTURE = "__pytest_repeat_step_number"


# Options and start-up.


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of Sidestream."""
    add_options(parser)


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
        "so it must be seen to race there; report: the file that describes the defect; aim: as for a control. With "
        "raises, the exception, instead of aim: so it must be seen to raise that there.",
    )
    config.addinivalue_line("markers", "contract(source): where the promise comes from that the docstring states.")
    config.addinivalue_line("markers", "devices(count): the case needs so many devices; elsewhere it is not covered.")
    try:
        run = _worker_run(config) if hasattr(config, "workerinput") else _main_run(config)
    except SidestreamError as error:
        raise _as_pytest_error(error) from None
    config.stash[RUN] = run
    config.add_cleanup(interrupt_when_terminated())
    config.pluginmanager.register(Recorder(run), "sidestream-recorder")
    if run.worker == "controller":
        config.pluginmanager.register(distribution.Controller(config, run), "sidestream-controller")


def _worker_run(config: pytest.Config) -> Run:
    given = distribution.WorkerInput.from_json(config.workerinput["sidestream"])  # type: ignore[attr-defined]
    given.apply_to_environment()
    die_with_parent()
    return Run(given.options, Path(given.directory), config.workerinput["workerid"])  # type: ignore[attr-defined]


def _main_run(config: pytest.Config) -> Run:
    worker = "controller" if distribution.is_controller(config) else "main"
    return Run(options_of(config), config.rootpath, worker)


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
        from harness.backends import hidden_races
        from harness.backends.select import open_backend
        from harness.campaign import environment, run_directory

        hidden_races.refuse(os.environ, run.options.device)
        backend = open_backend(run.options.device, announce)
        run.device = describe(backend)
        run.directory = _directory(config, run)
        run.claim = run_directory.claim(run.directory)
        run.writer().say({"environment": environment.fingerprint(backend.describe(), config.rootpath)})
        run.started = time.monotonic()
    except SidestreamError as error:
        raise _as_pytest_error(error) from None


def _directory(config: pytest.Config, run: Run) -> Path:
    from harness.campaign import resume, run_directory

    given, chosen = config.option.resume, config.option.results
    if given is not None:
        last = run_directory.last_run_directory(config.rootpath) if given == LAST_RUN else Path(given)
        directory = run_directory.resumed_run_directory(last)
        resume.require_same_settings(directory, header(run))
        return directory
    if chosen:
        return run_directory.use_run_directory(Path(chosen))
    return run_directory.new_run_directory(config.rootpath, announce)


def pytest_report_header(config: pytest.Config) -> list[str]:
    """What the run is about to do, and what could hide a race from it."""
    run = config.stash[RUN]
    if hasattr(config, "workerinput") or not run.device:
        return []
    import torch

    from harness.backends import hidden_races
    from harness.report.paths import shown

    options = run.options
    lines = [
        f"sidestream {harness.__version__}: {run.device}, torch {torch.__version__}",
        f"plans: {options.plan or 'one cycle after another'}, seed {options.seed}; "
        f"hold: {_hold_kind(options)}; load: {','.join(options.loads) or 'none'}",
        f"results: {shown(run.directory)}",
    ]
    for finding in hidden_races.find(os.environ, options.device):
        lines.append(f"warning: {finding.setting} is set: {finding.effect}")
    if run.worker == "controller":
        lines += distribution.describe_workers(config, options)
    return lines


def _hold_kind(options: Options) -> str:
    if options.device == "sim":
        return "scheduler (until something forces the launch)"
    if options.hold == "gate":
        return "gate (until the body has been enqueued)"
    return "sleep, " + (f"{options.hold_ms:g} ms" if options.hold_ms is not None else "length measured for each case")


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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the cases that get further repetitions, and draw the order."""
    option = config.option
    if option.further is not None:
        further = _read_further(Path(option.further))
        config.stash[FURTHER] = further
        left_out = [item for item in items if item.nodeid not in further]
        items[:] = [item for item in items if item.nodeid in further]
        config.hook.pytest_deselected(items=left_out)
    if option.shuffle:
        random.Random(f"{option.seed}/order").shuffle(items)


def _read_further(path: Path) -> dict[str, int]:
    import json

    try:
        return {str(nodeid): int(count) for nodeid, count in json.loads(path.read_text()).items() if int(count) > 0}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise pytest.UsageError(f"--further {path}: {error}.") from None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """In a worker make a slice of each case for every worker, so that even one selected test uses all of them.

    Here, after all selection, since --lf and others know cases by their own names. Without workers, start to say how
    far the repetitions are.
    """
    config = session.config
    run = config.stash[RUN]
    try:
        _check_cases(session.items, run)
    except UsageError as error:
        if not hasattr(config, "workerinput"):
            raise pytest.UsageError(str(error)) from None
        # xdist would call it an internal error: the controller says it once this worker has ended without a test.
        run.usage_errors.append(str(error))
        session.items.clear()
    # All workers collect the same; the first one that is started writes.
    if run.worker in ("main", "gw0") and config.option.catalogue_json is not None:
        _write_catalogue(Path(config.option.catalogue_json), session.items, run)
    if hasattr(config, "workerinput"):
        distribution.slice_items(session.items, config.workerinput["workercount"], repetition_count)
    if run.worker != "main" or config.option.collectonly:
        return
    from harness.report.progress import terminal_progress

    _require_one_case(run, session.items)
    counts = [repetition_count(item) for item in session.items if "lab" in getattr(item, "fixturenames", ())]
    run.progress = terminal_progress(config.pluginmanager.getplugin("terminalreporter"))
    run.progress.total = sum(count or 0 for count in counts) if None not in counts else None


def _check_cases(items: Iterable[pytest.Item], run: Run) -> None:
    from harness import markers

    cases = [item for item in items if "lab" in getattr(item, "fixturenames", ())]
    for item in cases:
        markers.check(item)
    run.case_count = len(cases)
    marked = [item for item in items if item.get_closest_marker("defect") is not None]
    if not marked:
        return
    import torch

    for item in marked:
        markers.expect_defect_to_raise(item, torch.__version__, run.options.device)


def _require_one_case(run: Run, items: list[pytest.Item]) -> None:
    options = run.options
    given = {"--script": options.script, "--reduce": options.reduce_repetitions, "--fresh": options.fresh}
    named = [name for name, value in given.items() if value is not None]
    if not named:
        return
    cases = [item for item in items if "lab" in getattr(item, "fixturenames", ())]
    if len(cases) != 1:
        raise pytest.UsageError(f"{named[0]} asks one case, and {len(cases)} are selected: give its node id.")


def _write_catalogue(path: Path, items: Iterable[pytest.Item], run: Run) -> None:
    import json

    from harness import catalogue
    from harness.files import write_whole

    try:
        write_whole(path, json.dumps(catalogue.collect(items).to_json(), indent=1))
    except OSError as error:
        sentence = f"--catalogue-json {path}: {error.strerror}."
        if run.prints_summary:
            raise pytest.UsageError(sentence) from None
        run.failures.append(sentence)


# Running.


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Lab:
    """Named streams, prepared and poisoned tensors, staged observations: what a case works with.

    A test that uses it is a case: its body runs once a repetition, each under a plan that holds other launches.
    """
    session = request.config.stash[RUN].session()
    from harness.markers import devices_needed

    needed = devices_needed(request.node)
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
    """Run a case."""
    if "lab" not in pyfuncitem.fixturenames:
        return None
    run_case(pyfuncitem)
    return True


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
    if report.skipped and {"lab", "profiled"} & set(getattr(item, "fixturenames", ())):
        report.sidestream_skipped = "unfit" if UNFIT in item.stash else "not covered"
    if call.excinfo is not None and isinstance(call.excinfo.value, SidestreamError):
        report.longrepr = str(call.excinfo.value)
        report.sidestream_exit_code = int(call.excinfo.value.exit_code)
    return report


# The end.


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    """Close the device, and settle the exit code after everyone else has had a say."""
    run = session.config.stash.get(RUN, None)
    if run is not None:
        run.close()
        if hasattr(session.config, "workeroutput"):
            loads = [dataclasses.asdict(report) for report in run.load_reports]
            told = {"loads": loads, "failures": run.failures, "usage_errors": run.usage_errors}
            session.config.workeroutput["sidestream"] = told
    result = yield
    if run is not None:
        controller = session.config.pluginmanager.getplugin("sidestream-controller")
        status = int(session.exitstatus)
        if status == ExitCode.INTERRUPTED and controller is not None and controller.stopped_for_failures():
            status = ExitCode.RACE
        session.exitstatus = settle_exit_code(run, status)
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what the run proved."""
    run = config.stash.get(RUN, None)
    if run is not None:
        write_terminal_summary(terminalreporter, config, run)
