"""The length of a hold adapts to what it has to outlast, unless the user gave it."""

from __future__ import annotations

import pytest

from harness.perturb.hold import LONGEST_MS, SHORTEST_MS, HoldLength


@pytest.mark.parametrize(
    ("unheld_ms", "hold_ms"),
    [(0.0, SHORTEST_MS), (0.5, SHORTEST_MS), (10.0, 30.0), (160.0, 480.0), (200.0, LONGEST_MS), (1e6, LONGEST_MS)],
)
def test_a_hold_outlasts_the_body_within_its_limits(unheld_ms, hold_ms):
    length = HoldLength()
    length.fit(unheld_ms)
    assert length.milliseconds == pytest.approx(hold_ms)


def test_a_shorter_body_makes_a_long_hold_short_again():
    length = HoldLength()
    length.fit(100.0)
    length.fit(2.0)
    assert length.milliseconds == pytest.approx(6.0)


def test_a_hold_that_was_too_short_doubles_up_to_the_longest():
    length = HoldLength()
    seen = []
    for _ in range(9):
        seen.append(length.milliseconds)
        length.grow()
    assert seen == [4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 500.0, 500.0]


@pytest.mark.parametrize("given_ms", [0.1, 20.0, 5000.0])
def test_a_length_from_the_user_stays(given_ms):
    length = HoldLength(given_ms, fixed=True)
    length.fit(100.0)
    length.grow()
    assert length.milliseconds == given_ms
