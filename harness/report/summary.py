"""What the run proved, at the end of pytest's output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pytest
from rich.table import Table

from harness.campaign.options import Options
from harness.campaign.result import CaseResult
from harness.campaign.statistics import race_rate_bound
from harness.judge.verdict import Verdict
from harness.perturb.load.load import LoadReport
from harness.report.load import load_sentences
from harness.report.outcome import counted, outcome_of
from harness.report.tables import add_by_file, new_table, rendered, width_for


def write_summary(
    reporter: pytest.TerminalReporter,
    results: Mapping[str, CaseResult],
    options: Options,
    loads: Sequence[LoadReport],
    elapsed_s: float,
) -> None:
    """Write one line a test function, or with ``-v`` one a case, and then what the whole run proved."""
    reporter.write_sep("=", f"sidestream: {counted(len(results), 'case')} on {options.device}, seed {options.seed}")
    groups = _groups(results, one_each=reporter.verbosity > 0)
    terminal = reporter._tw
    parts: list[Table | str] = [
        _table(groups, options),
        *conclusions(list(results.values()), options, loads, elapsed_s),
    ]
    width = width_for(terminal.fullwidth, is_terminal=terminal.hasmarkup)
    for line in rendered(parts, width, colour=terminal.hasmarkup):
        reporter.write_line(line)


def _groups(results: Mapping[str, CaseResult], one_each: bool) -> dict[str, list[CaseResult]]:
    groups: dict[str, list[CaseResult]] = {}
    for nodeid, result in sorted(results.items()):
        groups.setdefault(nodeid if one_each else nodeid.split("[")[0], []).append(result)
    return groups


def _table(groups: Mapping[str, list[CaseResult]], options: Options) -> Table:
    evidence = "race rate" if options.device != "sim" else "each launch held"
    table = new_table(["test"], ["cases", "repetitions", "plans", "verdicts", evidence])
    table.columns[4].justify = "left"
    file = None
    for name, cases in groups.items():
        figures = (
            str(len(cases)),
            f"{sum(case.repetitions for case in cases):,}",
            f"{sum(case.distinct_plans() for case in cases):,}",
            _verdicts(cases),
            _evidence(cases, options),
        )
        failed = any(outcome_of(case).text for case in cases)
        file = add_by_file(table, name, file, figures, "red" if failed else "")
    return table


def _verdicts(cases: Iterable[CaseResult]) -> str:
    cases = list(cases)
    counts = [f"{verdict.value} {n:,}" for verdict in Verdict if (n := sum(case.count(verdict) for case in cases))]
    kind = (
        " (defect)"
        if any(case.defect for case in cases)
        else " (control)"
        if any(case.control for case in cases)
        else ""
    )
    return ", ".join(counts) + kind


def _evidence(cases: Sequence[CaseResult], options: Options) -> str:
    """On the simulator, how often each launch was held; on a real device a bound on the rate of a fixed stratum."""
    thinnest = min(case.thinnest_plan() for case in cases)
    if not any(case.repetitions for case in cases):
        return "-"
    if options.device == "sim":
        held = all(case.singles_covered() == case.launches for case in cases)
        return _times(thinnest) if held and thinnest else "not each"
    if any(case.count(Verdict.RACE) for case in cases):
        races = sum(case.count(Verdict.RACE) for case in cases)
        return f"{races / sum(case.repetitions for case in cases):.1%} seen"
    if not thinnest:
        return "unknown"
    return f"< {race_rate_bound(0, thinnest):.2%} a plan"


def _times(least: int) -> str:
    return "at least once" if least == 1 else f"at least {least:,} times"


def conclusions(
    results: Sequence[CaseResult], options: Options, loads: Sequence[LoadReport], elapsed_s: float
) -> list[str]:
    """The sentences below the table."""
    total = sum(result.repetitions for result in results)
    controls = [result for result in results if result.control is not None and not result.defect]
    defects = [result for result in results if result.defect]
    safe = [result for result in results if result.control is None and result.repetitions]
    raced = [result for result in safe if result.count(Verdict.RACE)]
    lines = [f"{counted(total, 'repetition')} in {elapsed_s:.0f} s ({total / max(elapsed_s, 1e-9):,.0f} a second)."]
    if safe:
        lines.append(
            f"{len(safe) - len(raced)} of {len(safe)} safe cases never raced."
            + (" " + _bound_sentence(safe, options) if not raced else "")
        )
    if controls:
        lines.append(f"{_seen_sentence(controls, 'controls')}.")
    if defects:
        reports = ", ".join(dict.fromkeys(str(result.control) for result in defects))
        lines.append(f"{_seen_sentence(defects, 'cases of known defects of PyTorch')}: {reports}.")
    if not controls and not defects:
        lines.append("No control ran, so nothing shows that this run could have seen a race.")
    unreached = sum(not result.repetitions for result in results)
    if unreached and options.deadline is not None:
        lines.append(
            f"{counted(unreached, 'case')} {'was' if unreached == 1 else 'were'} not reached within --minutes."
        )
    inconclusive = sum(result.count(Verdict.INCONCLUSIVE) for result in results)
    if inconclusive:
        verb = "was" if inconclusive == 1 else "were"
        lines.append(f"{counted(inconclusive, 'repetition')} {verb} inconclusive: a hold did not take effect.")
    return lines + load_sentences(loads)


def _seen_sentence(results: Sequence[CaseResult], noun: str) -> str:
    seen = sum(bool(result.count(Verdict.RACE)) for result in results)
    aimed, aimed_seen = sum(result.aimed for result in results), sum(result.aimed_seen for result in results)
    how = f"in {aimed_seen:,} of the {aimed:,} repetitions" if aimed else "and no repetition was"
    return f"{seen} of {len(results)} {noun} were seen to race, {how} aimed at the racing access"


def _bound_sentence(safe: Sequence[CaseResult], options: Options) -> str:
    thinnest = min(case.thinnest_plan() for case in safe)
    if options.plan is not None:
        return f"Every repetition ran under {options.plan}, so nothing else was tried."
    if options.device == "sim":
        if all(case.singles_covered() == case.launches for case in safe):
            return (
                f"Each launch was held alone {_times(thinnest)}, which covers every race of a single pair "
                "of accesses; more repetitions add sets of held launches."
            )
        return "Not every launch was held: a whole cycle of plans takes more repetitions."
    if not thinnest:
        return ""
    return (
        f"Each plan ran {_times(thinnest)}: a race that it shows in {race_rate_bound(0, thinnest):.1%} of "
        "repetitions or more would have been seen (one-sided 95 % Clopper-Pearson)."
    )
