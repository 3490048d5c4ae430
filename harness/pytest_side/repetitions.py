"""The loop of repetitions inside one test, as pytest calls it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from harness import distribution
from harness.errors import InfrastructureError, SidestreamError, UsageError
from harness.files import write_whole
from harness.pytest_side.run import FURTHER, RESULT, RUN, STUDY, UNFIT, Run

if TYPE_CHECKING:
    from harness.campaign.case import Case
    from harness.campaign.lab import Lab


def repetition_count(item: pytest.Item) -> int | None:
    """How many repetitions were asked for; None (``--count 1``, the default) means one cycle of the case's plans.

    Raises:
        UsageError: the marker ``repeat`` has no sensible number.
    """
    further = item.config.stash.get(FURTHER, None)
    if further is not None:
        return further[distribution.split(item.nodeid)[0]]
    marker = item.get_closest_marker("repeat")
    count = item.config.option.count
    if marker is not None:
        count = marker.args[0] if marker.args else 0
        if not isinstance(count, int) or count < 1:
            raise UsageError(f"{item.nodeid}: @pytest.mark.repeat takes a number of repetitions from 1 on.")
    return count if count > 1 else None


def run_case(pyfuncitem: pytest.Function) -> None:
    """Run a case: all its repetitions, or this worker's slice of them."""
    import torch

    from harness.campaign.case import Case, NotOfThisCase
    from harness.campaign.race_tally import RaceTally
    from harness.campaign.result import CaseResult
    from harness.campaign.resume import Earlier
    from harness.judge.verdict import Verdict
    from harness.markers import control_of
    from harness.report.junit import properties
    from harness.report.outcome import outcome_of
    from harness.report.races import RaceKeeper

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
        return
    if run.options.reduce_repetitions is not None:
        _reduce(case, run, run.options.reduce_repetitions)
        return
    if run.options.script is not None:
        given = {name: value for name, value in arguments.items() if name != "lab"}
        _write_script(pyfuncitem, case, given, run, run.options.script)
        return
    count = repetition_count(pyfuncitem)

    # What is fresh is counted by itself.
    earlier = run.earlier() if run.options.fresh is None else Earlier()

    case.adaptive = FURTHER in pyfuncitem.config.stash
    first = earlier.end(nodeid) if case.adaptive else 0

    def numbers(cycle: int) -> Iterable[int]:
        every = range(first + position, first + (count if count is not None else cycle), slices)
        return (number for number in every if not earlier.has(nodeid, number))

    # In a worker it goes to the controller with the report; what is kept here would grow with the cases. One slice
    # counts what earlier sessions have left.
    result = earlier.result(nodeid) if position == 0 else CaseResult(nodeid)
    if run.prints_summary:
        run.results[nodeid] = result
    result.control = case.control.reason if case.control else None
    result.defect = case.control is not None and case.control.defect
    pyfuncitem.stash[RESULT] = result
    if run.options.is_late() and not result.repetitions:
        return  # the summary says so
    keeper = RaceKeeper(run.directory, run.options, run.device)
    try:
        if run.options.fresh is not None:
            case.run_fresh(run.options.fresh, result, run.writer(), run.watchdog(), keeper.describe)
        else:
            progress = run.progress.repetition if run.progress is not None else lambda: None
            most = run.options.max_races if case.control is None else None
            tally = None if most is None else RaceTally(run.directory, most)
            case.run(numbers, result, run.writer(), run.watchdog(), keeper.describe, progress, tally)
    except InfrastructureError as error:
        run.broken = str(error)
        raise
    except NotOfThisCase as error:
        if run.case_count == 1:
            raise
        # Another case may have it; if none has, the summary says so once.
        del pyfuncitem.stash[RESULT]
        run.results.pop(nodeid, None)
        pyfuncitem.stash[UNFIT] = True
        pytest.skip(f"not covered: {error}")
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
        pyfuncitem.user_properties += properties(result)
        if keeper.failure is not None:
            run.failures.append(keeper.failure)
        run.session().turns.end()
    if slices == 1:
        text = outcome_of(result).text
        if text is not None:
            pytest.fail(text, pytrace=False)


def _reduce(case: Case, run: Run, repetitions: int) -> None:
    from harness.campaign.reduce import reduce_plan
    from harness.campaign.runs import Runs
    from harness.perturb.enumerate_plans import cycle_length, plan_for_repetition
    from harness.report.failure import replay_command
    from harness.report.outcome import counted

    options = run.options
    runs = Runs(case, run.session().turns, run.watchdog())
    runs.discover()
    assert case.discovery is not None
    if options.plan is not None:
        case.check_plan(options.plan)
    order = case.discovery.order()
    numbers = range(cycle_length(len(order)))
    plans = [options.plan] if options.plan else (plan_for_repetition(each, order, options.seed) for each in numbers)
    found = reduce_plan(runs, plans, repetitions)
    run.answers += [
        f"{found.nodeid} races by {' and '.join(found.oracles)} under {found.plan}, which reduces to {found.minimal}: "
        f"{len(found.minimal.holds)} of {counted(len(found.plan.holds), 'held launch', 'held launches')}, found in "
        f"{counted(found.repetitions, 'repetition')}.",
        f"replay: {replay_command(found.nodeid, found.minimal, options)}",
    ]


def _write_script(item: pytest.Function, case: Case, arguments: dict[str, object], run: Run, path: str) -> None:
    from harness.campaign.runs import Runs
    from harness.report.script import Origin, write_script

    plan = run.options.plan
    assert plan is not None
    runs = Runs(case, run.session().turns, run.watchdog())
    runs.discover()
    case.check_plan(plan)
    judgement = runs.once(plan, lines=True).judgement
    seen = [*map(str, judgement.mismatches), *map(str, judgement.races)]
    devices, contract = item.get_closest_marker("devices"), item.get_closest_marker("contract")
    origin = Origin(
        case.nodeid,
        plan,
        f"{judgement.verdict.value} on {run.device}" + (f": {seen[0]}" if seen else ""),
        devices.args[0] if devices is not None else 1,
        contract.args[0] if contract is not None else None,
    )
    assert case.discovery is not None
    text = write_script(item.obj, arguments, case.discovery, origin)
    if path == "-":
        run.answers += text.splitlines()
        return
    try:
        write_whole(Path(path), text)
    except OSError as error:
        raise UsageError(f"--script {path}: {error.strerror}.") from None
    run.answers.append(f"script: {path}")


def _study_twins(item: pytest.Function, case: Case, run: Run) -> None:
    from harness.campaign import csan
    from harness.campaign.runs import Runs
    from harness.campaign.twins import study_twins
    from harness.report.twins import describe_failures

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
    text = describe_failures(study, options)
    if text:
        pytest.fail(text, pytrace=False)
