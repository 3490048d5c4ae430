"""What a number of repetitions proves about the rate of a race, and about two rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def race_rate_bound(races: int, repetitions: int, confidence: float = 0.95) -> float:
    """The one-sided upper Clopper-Pearson bound on the race rate (Clopper and Pearson, Biometrika 1934).

    If the rate were any higher, so few races would be seen with a probability below ``1 - confidence``. It holds for
    repetitions of one fixed stratum (one plan kind, one load), not for a mixture of plans.

    Args:
        races: how many of the repetitions raced.
        repetitions: how many conclusive repetitions there were; none proves nothing, so the bound is 1.
        confidence: between 0 and 1.

    Returns:
        A rate from 0 to 1.

    Raises:
        ValueError: there are more races than repetitions, a negative number, or no such confidence.
    """
    if not 0 <= races <= repetitions:
        raise ValueError(f"{races} races in {repetitions} repetitions: must be from 0 to the number of repetitions.")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence {confidence}: must be between 0 and 1, both excluded.")
    if races == repetitions:
        return 1.0
    from scipy.special import betaincinv  # Importing scipy takes longer than most sessions can spare at their start.

    return float(betaincinv(races + 1, repetitions - races, confidence))


def race_rate_interval(races: int, repetitions: int, confidence: float = 0.95) -> tuple[float, float]:
    """The one-sided lower and the one-sided upper Clopper-Pearson bound on the race rate.

    Each of the two holds with ``confidence``; both at once with twice the doubt.

    Raises:
        ValueError: as for :func:`race_rate_bound`.
    """
    upper = race_rate_bound(races, repetitions, confidence)
    lower = 1.0 - race_rate_bound(repetitions - races, repetitions, confidence) if races else 0.0
    return lower, upper


@dataclass(frozen=True, slots=True)
class Counts:
    """What one stratum showed in two builds."""

    races_a: int
    repetitions_a: int
    races_b: int
    repetitions_b: int


def exact_test(strata: Sequence[Counts]) -> float:
    """The two-sided p-value of the hypothesis that A and B race equally often in each stratum.

    Given how many of a stratum's repetitions raced in all, how many of them B had is hypergeometric; the test is on the
    sum over the strata (the exact conditional test of common odds; Cox, "The Analysis of Binary Data", 1970, 5.3). Of
    one stratum that is Fisher's exact test. Strata may weigh differently in A and B.

    Returns:
        The probability of all sums that are no likelier than the observed one; 1 without repetitions.
    """
    import numpy
    from scipy.stats import hypergeom

    sums, least, observed = numpy.ones(1), 0, 0
    for each in strata:
        if not each.repetitions_a + each.repetitions_b:
            continue
        total, races = each.repetitions_a + each.repetitions_b, each.races_a + each.races_b
        lowest, highest = max(0, races - each.repetitions_a), min(races, each.repetitions_b)
        terms = hypergeom.pmf(numpy.arange(lowest, highest + 1), total, races, each.repetitions_b)
        sums = numpy.convolve(sums, terms)
        least += lowest
        observed += each.races_b
    # As in scipy's Fisher test, equal probabilities may differ in their last digits.
    return min(1.0, float(sums[sums <= sums[observed - least] * (1 + 1e-7)].sum()))


def repetitions_to_tell(counts: Counts, significance: float, most: int = 10**7) -> int | None:
    """How many repetitions of each build would tell these two rates apart, if they stayed what they are.

    Returns:
        A number with two significant digits; None if they are equal, or it would take more than ``most``.
    """
    rates = [
        races / repetitions if repetitions else 0.0
        for races, repetitions in (
            (counts.races_a, counts.repetitions_a),
            (counts.races_b, counts.repetitions_b),
        )
    ]
    if rates[0] == rates[1]:
        return None

    def tells(number: int) -> bool:
        races_a, races_b = (round(rate * number) for rate in rates)
        return exact_test([Counts(races_a, number, races_b, number)]) < significance

    high = 4
    while not tells(high):
        high *= 2
        if high > most:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if tells(middle) else (middle, high)
    step = 10 ** max(0, len(str(high)) - 2)
    return int(-(-high // step) * step)


def adjusted(p_values: Sequence[float]) -> list[float]:
    """The p-values of several tests, adjusted for the false discovery rate (Benjamini and Hochberg, 1995)."""
    if not p_values:
        return []
    from scipy.stats import false_discovery_control

    return [float(value) for value in false_discovery_control(list(p_values), method="bh")]
