"""The options of the pytest side: what they are, and what they mean once resolved on this machine."""

from __future__ import annotations

import os
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from harness.campaign.options import DEFAULT_LIMIT_S, Options
from harness.errors import UsageError
from harness.files import require_writable
from harness.observe.synchronizations import Fault, SynchronizationId
from harness.perturb.hold import DEFAULT_KIND, KINDS, require_kind
from harness.perturb.load import DEFAULT_MEMORY_MIB, DIMENSIONS, parse_loads, parse_memory_mib, require_device
from harness.perturb.plan import Plan

LAST_RUN = "last"
"""As ``--resume``: the run in ``.sidestream/runs`` that started last."""
_LONGEST_LIMIT_S = 1e7
_LONGEST_HOLD_MS = 1e5


def add_options(parser: pytest.Parser) -> None:
    """Add the options of Sidestream."""
    group = parser.getgroup("sidestream", "sidestream (streaming backward)")
    group.addoption(
        "--device", default="auto", help="auto, cuda, cuda:N or sim; auto: CUDA if there is a GPU (default: auto)"
    )
    group.addoption("--seed", type=int, default=0, help="seed of the plans that hold several launches (default: 0)")
    group.addoption("--plan", default=None, help="the plan of every repetition: baseline, or hold=stream:index[,...]")
    group.addoption(
        "--hold",
        default=None,
        metavar="KIND",
        help=f"how to hold a launch on a real device (default: {DEFAULT_KIND}): "
        + "; ".join(f"{kind}, {effect}" for kind, effect in KINDS.items()),
    )
    group.addoption(
        "--hold-ms",
        type=float,
        default=None,
        help="length of a sleep that holds a launch (default: measured for each case)",
    )
    group.addoption(
        "--load",
        default=None,
        metavar="DIMENSIONS",
        help="keep the machine busy meanwhile (default: no load): "
        + ", ".join(DIMENSIONS)
        + "; several, each with its share of the time: compute,alloc:0.5; or mixed, each in turn",
    )
    group.addoption(
        "--load-memory",
        default=None,
        metavar="SIZE",
        help=f"memory of the device that the load may use, such as 2GiB (default: {DEFAULT_MEMORY_MIB / 1024:g}GiB)",
    )
    group.addoption(
        "--twins",
        action="store_true",
        help="run each case once for each of its synchronizations, with that one left out, and say which of "
        "these twins are killed",
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
    group.addoption("--minutes", type=float, default=None, help="start no repetition after so many minutes")
    group.addoption(
        "--max-races",
        type=int,
        default=None,
        metavar="K",
        help="repeat a case no more in a worker once it has raced K times there; controls go on",
    )
    group.addoption("--shuffle", action="store_true", help="run the cases in an order drawn by --seed")
    group.addoption(
        "--further",
        default=None,
        metavar="FILE",
        help="with --resume: of the cases in the JSON of FILE, so many further repetitions each; they are marked as "
        "added where the evidence was thin, so that no rate counts them",
    )
    group.addoption(
        "--fresh",
        type=int,
        default=None,
        metavar="I",
        help="run the selected case once, unheld and before the process has run it for any other purpose, as the I-th "
        "repetition in a fresh process",
    )
    group.addoption(
        "--reduce",
        type=int,
        default=None,
        metavar="N",
        help="find the fewest held launches under which the selected case races as it does under --plan, or under the "
        "first plan that shows a race; each plan gets N repetitions",
    )
    group.addoption(
        "--script",
        default=None,
        metavar="FILE",
        help="write the selected case under --plan to FILE as a stand-alone script in plain PyTorch; - is the terminal",
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
        help="folder for the results of this run (default: a new one in .sidestream/runs, where the last 20 are kept, "
        "and the last 20 of 10 minutes or more)",
    )
    group.addoption(
        "--resume",
        nargs="?",
        const=LAST_RUN,
        default=None,
        metavar="DIRECTORY",
        help="go on with the run of this folder, the last one by default, with the same options: what has ended there "
        "is not run again",
    )


def options_of(config: pytest.Config) -> Options:
    """What the user asked for, checked, with the device resolved; the environment is made ready for it.

    Raises:
        UsageError: it cannot be done.
    """
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
    if option.hold_ms is not None and option.hold == "gate":
        raise UsageError("--hold-ms is the length of a sleep, and a gate is closed as long as it takes: leave it out.")
    from harness.backends import hardware_queues, module_loading, visible_devices

    loads = parse_loads(option.load) if option.load is not None else []
    if option.load_memory is not None and not loads:
        raise UsageError("--load-memory goes with --load, which is not given.")
    memory_mib = DEFAULT_MEMORY_MIB if option.load_memory is None else parse_memory_mib(option.load_memory)
    hardware_queues.use_all(os.environ)
    if option.hold == "gate":
        module_loading.load_at_start(os.environ)
    visible_devices.put_first(option.device)
    from harness.backends.select import is_rocm, resolve

    device = resolve(option.device)
    require_device(loads, device.partition(":")[0])
    if option.hold is not None:
        require_kind(option.hold, device, is_rocm=is_rocm())
    _check_twin_options(option)
    _check_questions(config)
    _check_budgets(config)
    _check_files(option)
    if option.resume is not None and option.results is not None:
        raise UsageError("--resume goes on in the folder of a run, and --results names a new one: give one of them.")
    from harness.campaign import csan

    if option.csan:
        csan.require_cuda(device)
    return Options(
        device=device,
        seed=option.seed,
        plan=Plan.parse(option.plan) if option.plan is not None else None,
        hold=option.hold or DEFAULT_KIND,
        hold_ms=option.hold_ms,
        loads=tuple(map(str, loads)),
        load_memory_mib=memory_mib,
        limit_s=option.repetition_timeout,
        max_races=1 if option.maxfail == 1 else option.max_races,
        deadline=None if option.minutes is None else time.time() + 60.0 * option.minutes,
        fresh=option.fresh,
        fault=_fault(option),
        reduce_repetitions=option.reduce,
        script=option.script,
        twins=option.twins,
        twin_repetitions=option.twin_repetitions,
        csan_folder=csan.folder_of(),
        session=f"{datetime.now(timezone.utc):%Y%m%dT%H%M%S.%fZ}-{os.getpid()}",
        resume=option.resume is not None,
    )


def _fault(option: Any) -> Fault | None:
    for text, misdirect in ((option.leave_out, False), (option.misdirect, True)):
        if text is not None:
            return Fault(SynchronizationId.parse(text), misdirect)
    return None


def _check_budgets(config: pytest.Config) -> None:
    option = config.option
    if option.minutes is not None and not 0 < option.minutes < _LONGEST_LIMIT_S:
        raise UsageError(f"--minutes {option.minutes:g} makes no sense: give minutes above 0.")
    if option.max_races is not None and option.max_races < 1:
        raise UsageError(f"--max-races {option.max_races} stops before anything ran: give a number from 1 on.")
    if option.further is not None and (option.resume is None or option.count > 1):
        raise UsageError("--further goes with --resume, and says how many repetitions itself: leave --count out.")
    if option.fresh is not None and (
        option.plan is not None or option.count > 1 or getattr(option, "dist", "no") != "no"
    ):
        raise UsageError(
            "--fresh runs one repetition with nothing held, in this process: leave --plan, --count and -n out."
        )


def _check_questions(config: pytest.Config) -> None:
    option = config.option
    for name, given in (("--reduce", option.reduce is not None), ("--script", option.script is not None)):
        if not given:
            continue
        if getattr(option, "dist", "no") != "no":
            raise UsageError(f"{name} asks one case in one process: leave -n out.")
        if option.twins or option.count > 1:
            raise UsageError(f"{name} asks the case once: leave --twins and --count out.")
    if option.reduce is not None and option.reduce < 1:
        raise UsageError(f"--reduce {option.reduce} runs nothing: give a number of repetitions from 1 on.")
    if option.reduce is not None and option.script is not None:
        raise UsageError("--reduce and --script are two questions: give one of them.")
    if option.script is not None and option.plan is None:
        raise UsageError("--script writes one repetition: say which with --plan.")
    if option.script is not None and (option.leave_out or option.misdirect):
        raise UsageError("--script cannot leave out or misdirect what PyTorch does; it writes cases as they are.")


def _check_files(option: Any) -> None:
    """Files that are written at the end are not to be found unwritable there."""
    files = {
        "--script": None if option.script == "-" else option.script,
        "--twins-json": option.twins_json,
        "--catalogue-json": option.catalogue_json,
        "--junitxml": getattr(option, "xmlpath", None),
    }
    for name, given in files.items():
        if given is None:
            continue
        path = Path(given)
        try:
            if name == "--junitxml":
                path.absolute().parent.mkdir(parents=True, exist_ok=True)  # as pytest does
            require_writable(path)
        except OSError as error:
            raise UsageError(f"{name} {path} cannot be written ({error.strerror}): name another file.") from None


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
