"""The bound on the race rate."""

import subprocess
import sys

import pytest

from harness.campaign.statistics import race_rate_bound


@pytest.mark.parametrize(("repetitions", "percent"), [(500, 0.60), (3000, 0.10), (10000, 0.030)])
def test_clean_runs(repetitions: int, percent: float) -> None:
    assert float(f"{100 * race_rate_bound(0, repetitions):.2g}") == percent
    assert race_rate_bound(0, repetitions) == pytest.approx(1 - 0.05 ** (1 / repetitions))


@pytest.mark.parametrize(("races", "repetitions"), [(1, 500), (3, 40), (249, 500)])
def test_bound_is_where_so_few_races_become_improbable(races: int, repetitions: int) -> None:
    from scipy.stats import binom

    bound = race_rate_bound(races, repetitions)
    assert binom.cdf(races, repetitions, bound) == pytest.approx(0.05)
    assert binom.cdf(races, repetitions, race_rate_bound(races, repetitions, 0.99)) == pytest.approx(0.01)


def test_extremes() -> None:
    assert race_rate_bound(0, 0) == 1.0
    assert race_rate_bound(5, 5) == 1.0
    assert race_rate_bound(0, 1) == pytest.approx(0.95)


@pytest.mark.parametrize(
    ("races", "repetitions", "confidence"), [(-1, 5, 0.95), (6, 5, 0.95), (0, 5, 0.0), (0, 5, 1.0)]
)
def test_impossible_numbers(races: int, repetitions: int, confidence: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        race_rate_bound(races, repetitions, confidence)


def test_import_does_not_import_scipy() -> None:
    code = "import sys, harness.campaign.statistics; sys.exit('scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
