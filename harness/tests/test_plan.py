"""The string form of a plan replays it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.exit_codes import ExitCode
from harness.perturb.plan import LaunchId, Plan

names = st.text(st.characters(exclude_characters=",", exclude_categories=["Cs"]), min_size=1, max_size=8)
launches = st.builds(LaunchId, names, st.integers(0, 10**6))
plans = st.builds(Plan, st.lists(launches, unique=True, max_size=5).map(tuple))


@settings(max_examples=200, database=None, derandomize=True)
@given(plans)
def test_string_form_gives_the_plan_back(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan


@pytest.mark.parametrize(
    ("plan", "text", "kind"),
    [
        (Plan(), "baseline", "baseline"),
        (Plan((LaunchId("ambient", 3),)), "hold=ambient:3", "single"),
        (Plan((LaunchId("ambient", 3), LaunchId("fill", 0))), "hold=ambient:3,fill:0", "set"),
        (Plan((LaunchId("fill", 0), LaunchId("ambient", 3))), "hold=fill:0,ambient:3", "set"),
        (Plan((LaunchId("stream7.1", 12),)), "hold=stream7.1:12", "single"),
        (Plan((LaunchId("a:b", 1),)), "hold=a:b:1", "single"),
    ],
)
def test_forms(plan: Plan, text: str, kind: str) -> None:
    assert (str(plan), plan.kind) == (text, kind)
    assert Plan.parse(text) == plan


@pytest.mark.parametrize(
    "text",
    [
        "",
        "base",
        "Baseline",
        "hold=",
        "hold=ambient",
        "hold=ambient:",
        "hold=:3",
        "hold=ambient:three",
        "hold=ambient:-1",
        "hold=ambient:1.5",
        "hold=ambient:3,",
        "hold=,ambient:3",
        "hold=ambient:3,ambient:3",
        "ambient:3",
        "baseline,hold=ambient:3",
    ],
)
def test_bad_text_is_a_usage_error_that_shows_how(text: str) -> None:
    with pytest.raises(UsageError, match="hold=ambient:3,fill:0") as caught:
        Plan.parse(text)
    assert repr(text) in str(caught.value)
    assert caught.value.exit_code is ExitCode.USAGE
