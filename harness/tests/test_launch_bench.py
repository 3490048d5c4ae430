"""The simulator is fast enough to loop whole suites on: launches, a training step, and memory that does not grow."""

from __future__ import annotations

import pytest

from harness.campaign import launch_bench

MOST_LAUNCH_US = 20.0
MOST_TIMES_THE_CPU = 5.0


@pytest.fixture(scope="module")
def costs() -> dict[str, dict[str, float]]:
    return launch_bench.measure(launches=60_000)


def test_a_launch_costs_no_meta_kernel(costs: dict[str, dict[str, float]]) -> None:
    """A meta kernel in Python takes 60 microseconds: the cache of what they say must serve nearly every launch."""
    assert costs["launch"]["median_us"] < MOST_LAUNCH_US


def test_a_training_step_on_two_streams_costs_no_more_than_a_few_on_the_cpu(costs: dict[str, dict[str, float]]) -> None:
    assert costs["training_step"]["ratio"] < MOST_TIMES_THE_CPU


def test_memory_stays_flat_over_repetitions(costs: dict[str, dict[str, float]]) -> None:
    """A leak of 64 bytes a launch would be 3.7 MiB."""
    memory = costs["memory"]
    assert memory["resident_after_mib"] - memory["resident_before_mib"] < 2.0
