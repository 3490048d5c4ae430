"""What a number of repetitions proves about the rate of a race."""

from __future__ import annotations


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
