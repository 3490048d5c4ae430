"""Numbers of runs, and the comparison of two builds, for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from harness.campaign.compare import Change, Comparison, Comparisons
from harness.campaign.numbers import CaseNumbers, Numbers, Stratum
from harness.judge.verdict import Verdict
from harness.perturb.hold import DEFAULT_KIND
from harness.report.outcome import counted
from harness.report.tables import add_by_file, new_table

_STYLES = {Change.REGRESSION: "red", Change.CANNOT_TELL: "yellow", Change.IMPROVEMENT: "green"}
_SHOWN_NAMES = 5
_PLAIN_HOLDS = ("", "scheduler", DEFAULT_KIND)


def numbers_tables(numbers: Numbers) -> list[Table | str]:
    """A line for each case and load, and what could not be read."""
    columns = ["load", "repetitions", "processes", "plans", "verdicts", "baseline", "single", "set"]
    table = new_table(["case"], columns)
    file = None
    for nodeid, case in sorted(numbers.cases.items()):
        style = "red" if case.races and not case.control else ""
        for position, key in enumerate(
            sorted({(stratum.load, stratum.fresh) for stratum in case.strata} or {("", False)})
        ):
            load, fresh = key
            cells = [load or "none", *([""] * 4)]
            if not position:
                cells[1:] = _whole(case)
            for kind in ("baseline", "single", "set"):
                here = [
                    each for each in sorted(case.strata) if (each.kind, each.load, each.fresh) == (kind, load, fresh)
                ]
                cells.append(", ".join(_rate(each, case) for each in here) or "-")
            name = nodeid + (" (fresh processes)" if fresh else "")
            file = add_by_file(table, name, file, cells, style)
    if not numbers.cases:
        return ["There is no repetition.", *(f"warning: {problem}" for problem in numbers.problems)]
    return [
        table,
        f"{counted(len(numbers.cases), 'case')}, "
        f"{counted(sum(case.repetitions for case in numbers.cases.values()), 'repetition')}. "
        "Rates are of repetitions of one plan kind and load, between one-sided 95 % Clopper-Pearson bounds; what was "
        "added where the evidence was thin is not among them.",
        *(f"stopped for its races, so no rate: {case.nodeid}" for case in numbers.cases.values() if case.stopped),
        *(f"warning: {problem}" for problem in numbers.problems),
    ]


def _whole(case: CaseNumbers) -> list[str]:
    verdicts = [
        f"{verdict.value} {case.verdicts[verdict.value]:,}" for verdict in Verdict if verdict.value in case.verdicts
    ]
    kind = " (defect)" if case.defect else " (control)" if case.control else ""
    added = f" (+{case.adaptive.repetitions:,})" if case.adaptive.repetitions else ""
    return [
        f"{case.repetitions - case.adaptive.repetitions:,}{added}",
        f"{len(case.processes):,}",
        f"{len(case.plans):,}",
        ", ".join(verdicts) + kind,
    ]


def _rate(stratum: Stratum, case: CaseNumbers) -> str:
    sample = case.strata[stratum]
    seen = f"{sample.races:,}/{sample.repetitions:,}"
    if stratum.hold not in _PLAIN_HOLDS:
        seen = f"{stratum.hold} {seen}"
    if case.stopped:
        return seen
    lower, upper = sample.interval()
    return f"{seen} < {upper:.2%}" if not sample.races else f"{seen} {lower:.2%} to {upper:.2%}"


def comparison_tables(comparisons: Comparisons, problems: Sequence[str]) -> list[Table | str]:
    """A line for each case whose answer is no plain no, a sentence for the rest, and the answer."""
    table = new_table(["case"], ["races in A", "races in B", "p", "adjusted p", "answer"])
    file = None
    told = [case for case in comparisons.cases if case.change is not Change.NO_REGRESSION]
    for case in told:
        cells = [
            _share(case.counts.races_a, case.counts.repetitions_a),
            _share(case.counts.races_b, case.counts.repetitions_b),
        ]
        cells += [f"{case.p_value:.2g}", f"{case.adjusted_p:.2g}", _answer(case)]
        file = add_by_file(table, case.nodeid, file, cells, "" if case.control else _STYLES[case.change])
    parts: list[Table | str] = [table] if told else []
    count = len(comparisons.cases) - len(told)
    if count:
        parts.append(f"{counted(count, 'case')} without a regression.")
    parts += list(_only("A", comparisons.only_a)) + list(_only("B", comparisons.only_b))
    for nodeid in comparisons.no_common_stratum:
        parts.append(f"cannot compare {nodeid}: the builds have no plan kind and load in common.")
    parts += [f"warning: {problem}" for problem in dict.fromkeys(problems)]
    parts.append(_conclusion(comparisons))
    return parts


def _only(build: str, names: Sequence[str]) -> Iterable[str]:
    if names:
        more = f" and {len(names) - _SHOWN_NAMES:,} more" if len(names) > _SHOWN_NAMES else ""
        yield f"only in {build}: {', '.join(names[:_SHOWN_NAMES])}{more}"


def _share(races: int, repetitions: int) -> str:
    return f"{races:,}/{repetitions:,}"


def _answer(case: Comparison) -> str:
    parts = [case.change.value + (" (a control)" if case.control else "")]
    if case.change is Change.CANNOT_TELL:
        needed = "more than 10,000,000" if case.needed is None else f"about {case.needed:,}"
        parts.append(f"not enough repetitions to tell, {needed} of each would be needed at these rates")
    if case.note:
        parts.append(case.note)
    return "; ".join(parts)


def _conclusion(comparisons: Comparisons) -> str:
    safe = [case for case in comparisons.cases if not case.control]
    counts = {change: sum(case.change is change for case in safe) for change in Change}
    if counts[Change.REGRESSION]:
        return f"B races more often than A: {counted(counts[Change.REGRESSION], 'regression')}."
    if counts[Change.CANNOT_TELL]:
        return f"No regression is proved, but {counted(counts[Change.CANNOT_TELL], 'case')} cannot be told."
    if not comparisons.cases:
        return "There was nothing to compare."
    return "No regression was seen."
