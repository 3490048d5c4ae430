"""Plans of repetitions: coverage of a cycle, and the same plans everywhere."""

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.perturb.enumerate_plans import LARGEST_SET, cycle_length, plan_for_repetition
from harness.perturb.plan import LaunchId, Plan


def make_launches(count: int) -> list[LaunchId]:
    return [LaunchId("ab"[index % 2], index // 2) for index in range(count)]


def cycle(count: int, seed: int = 0, number: int = 0) -> list[Plan]:
    length = cycle_length(count)
    return [plan_for_repetition(number * length + position, make_launches(count), seed) for position in range(length)]


@pytest.mark.parametrize(("count", "length"), [(0, 1), (1, 2), (2, 5), (3, 7), (12, 25)])
def test_cycle_length(count: int, length: int) -> None:
    assert cycle_length(count) == length


@settings(max_examples=100, database=None, derandomize=True)
@given(count=st.integers(0, 12), seed=st.integers(0, 10), number=st.integers(0, 100))
def test_a_cycle_is_the_baseline_each_launch_alone_and_sets(count: int, seed: int, number: int) -> None:
    launches = make_launches(count)
    baseline, *held = cycle(count, seed, number)
    assert baseline == Plan()
    assert [plan.holds for plan in held[:count]] == [(launch,) for launch in launches]
    for plan in held[count:]:
        assert 2 <= len(plan.holds) <= min(LARGEST_SET, count)
        assert len(set(plan.holds)) == len(plan.holds)
        assert set(plan.holds) <= set(launches)


def test_sets_vary_in_size_order_and_content() -> None:
    sets = [plan.holds for number in range(50) for plan in cycle(5, number=number)[6:]]
    assert {len(holds) for holds in sets} == {2, 3, 4}
    orders = {holds for holds in sets if len(holds) == 2}
    assert len(orders) == 5 * 4, "every ordered pair comes up in 250 sets"
    assert {holds[0] for holds in sets} == set(make_launches(5))


def test_two_launches_come_in_both_orders() -> None:
    a, b = make_launches(2)
    assert {plan.holds for number in range(20) for plan in cycle(2, number=number)[3:]} == {(a, b), (b, a)}


def test_cycles_and_seeds_differ() -> None:
    assert cycle(6, seed=1) == cycle(6, seed=1)
    assert cycle(6, seed=1) != cycle(6, seed=2)
    assert cycle(6, number=1) != cycle(6, number=2)


KNOWN = ["hold=a:1,a:0", "hold=a:1,b:1", "hold=b:0,b:1", "hold=b:2,b:0,a:2", "hold=a:1,b:2,b:1,a:0", "hold=a:1,b:0"]


def known_again() -> list[str]:
    return [str(plan) for plan in cycle(6, seed=7, number=3)[7:]]


def test_plans_are_the_same_in_every_version() -> None:
    """A plan named by seed and number in an old report must still be that plan."""
    assert known_again() == KNOWN


def test_plans_are_the_same_in_every_process() -> None:
    code = "from harness.tests.test_enumerate_plans import known_again; print(known_again())"
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert ran.stdout.strip() == str(KNOWN)


def test_late_repetition_needs_no_earlier_one() -> None:
    launches = make_launches(1000)
    assert plan_for_repetition(10**12 * cycle_length(1000) + 5, launches, 0) == Plan((launches[4],))


def test_negative_repetition() -> None:
    with pytest.raises(ValueError, match="from 0"):
        plan_for_repetition(-1, make_launches(3), 0)
