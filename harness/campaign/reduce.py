"""The fewest held launches under which a case still races: delta debugging over the holds of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from harness.campaign.runs import Runs
from harness.errors import SidestreamError
from harness.exit_codes import ExitCode
from harness.judge.verdict import Verdict
from harness.perturb.plan import Plan

_Item = TypeVar("_Item")


class NotReproducedError(SidestreamError):
    """The race that was to be reduced did not show."""

    exit_code = ExitCode.INCONCLUSIVE


@dataclass(frozen=True, slots=True)
class Reduction:
    """What a plan was reduced to."""

    nodeid: str
    plan: Plan
    minimal: Plan
    """Without any one of its holds the race does not show in as many repetitions."""
    oracles: tuple[str, ...]
    """Which oracles the race convinced, under either plan."""
    repetitions: int
    """How many it took."""


def reduce_plan(runs: Runs, plans: Iterable[Plan], repetitions: int) -> Reduction:
    """Reduce the first of some plans under which the case races, preferably by both oracles.

    Happens-before sees most races whatever is held. A plan is reduced as long as every oracle that it convinced at
    first is convinced, so that a wrong value stays one.

    Args:
        runs: runs the case.
        plans: the plan to reduce, or those to look for a race in.
        repetitions: how often a plan is tried before it counts as one that does not race.

    Raises:
        NotReproducedError: the case does not race under any of the plans.
    """
    done = 0

    def oracles_of(plan: Plan, wanted: frozenset[str] = frozenset()) -> frozenset[str]:
        """The most that one repetition convinced; at once where that is enough."""
        nonlocal done
        best: frozenset[str] = frozenset()
        for _ in range(repetitions):
            judgement = runs.once(plan, number=done).judgement
            done += 1
            if judgement.verdict is Verdict.RACE:
                best = max(best, frozenset(judgement.raced_by), key=len)
                if wanted and wanted <= best:
                    break
        return best

    best: tuple[Plan, frozenset[str]] | None = None
    for plan in plans:
        oracles = oracles_of(plan)
        if best is None or len(oracles) > len(best[1]):
            best = plan, oracles
        if len(oracles) > 1:
            break
    if best is None or not best[1]:
        under = "this plan" if done <= repetitions else "any plan"
        raise NotReproducedError(
            f"{runs.case.nodeid} did not race in {done} repetitions under {under}, so there is nothing to reduce: give "
            "more --repetitions, or the plan of a repetition that raced."
        )
    plan, wanted = best
    minimal = Plan(tuple(minimize(plan.holds, lambda holds: wanted <= oracles_of(Plan(tuple(holds)), wanted))))
    return Reduction(runs.case.nodeid, plan, minimal, tuple(sorted(wanted)), done)


def minimize(items: Sequence[_Item], fails: Callable[[Sequence[_Item]], bool]) -> list[_Item]:
    """A part of the items that fails, and of which no item can be left out.

    ddmin of Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", IEEE TSE 2002; the items keep
    their order.

    Args:
        items: they fail all together, which is not tried.
        fails: whether a part of them fails.
    """
    current = list(items)
    if current and fails([]):
        return []
    parts = 2
    while len(current) >= 2:
        chunks = list(_chunks(current, parts))
        smaller = next((chunk for chunk in chunks if fails(chunk)), None)
        if smaller is not None:
            current, parts = smaller, 2
            continue
        for position in range(len(chunks)) if parts > 2 else ():
            rest = [item for number, chunk in enumerate(chunks) if number != position for item in chunk]
            if fails(rest):
                current, parts = rest, max(parts - 1, 2)
                break
        else:
            if parts >= len(current):
                break
            parts = min(len(current), 2 * parts)
    return current


def _chunks(items: Sequence[_Item], parts: int) -> Iterator[list[_Item]]:
    for number in range(parts):
        yield list(items[number * len(items) // parts : (number + 1) * len(items) // parts])
