"""Which plan the i-th repetition takes: the baseline, each launch alone, then seeded sets, and around again.

In the baseline every stream runs in submission order. A race between two conflicting accesses shows when the
launch of the earlier one is held until the later one has run, so holding each launch once covers every race
between a single pair. What takes several late launches at once is left to the sets: a few launches held together
and released in a random order are the priority change points of PCT, which bounds the probability of missing a bug
by the number of ordering constraints it takes (Burckhardt, Kothari, Musuvathi and Nagarakatte, "A Randomized Scheduler
with Probabilistic Guarantees of Finding Bugs", ASPLOS 2010).
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from harness.perturb.plan import LaunchId, Plan

LARGEST_SET = 4
"""Most launches held together. Known ordering bugs take few constraints (PCT's bug depth)."""


def cycle_length(launch_count: int) -> int:
    """Repetitions in one cycle of plans for a body of ``launch_count`` launches.

    The baseline, each launch alone, and as many sets as launches (none for fewer than two launches).
    """
    sets = launch_count if launch_count >= 2 else 0
    return 1 + launch_count + sets


def plan_for_repetition(repetition: int, launches: Sequence[LaunchId], seed: int) -> Plan:
    """The plan of one repetition; a pure function, so that workers can take any slice of the repetitions.

    Args:
        repetition: which repetition, from 0.
        launches: the launches of the body that may be held, each once, in the order in which they are held alone.
        seed: decides the sets; the same seed gives the same plans in every process, on every platform and Python.

    Raises:
        ValueError: ``repetition`` is negative.
    """
    if repetition < 0:
        raise ValueError(f"repetition {repetition}: repetitions count from 0.")
    count = len(launches)
    cycle, position = divmod(repetition, cycle_length(count))
    if position == 0:
        return Plan()
    if position <= count:
        return Plan((launches[position - 1],))
    # A string seeds through SHA-512; Python promises that random() stays the same, but not sample() or randrange().
    random = Random(f"{seed}/{cycle}/{position}").random
    size = 2 + int(random() * (min(LARGEST_SET, count) - 1))
    chosen: list[int] = []
    while len(chosen) < size:
        candidate = int(random() * count)
        if candidate not in chosen:
            chosen.append(candidate)
    return Plan(tuple(launches[index] for index in chosen))
