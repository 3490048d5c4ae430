"""What becomes of a race: its id, its replay, its reduction, its stand-alone script."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.campaign.reader import read_run
from harness.campaign.reduce import minimize
from harness.campaign.replay import find_repetition
from harness.errors import UsageError
from harness.tests.suite_runner import RACY, REPOSITORY, SAFE, Ran, Suite, new_suite

RUN_IN_VIRTUAL_TIME = """
import runpy, sys
from harness.backends import simulator
from harness.perturb.schedule import VirtualTime
simulator.register()
simulator.set_schedule(VirtualTime())
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@pytest.fixture
def suite(tmp_path) -> Suite:
    return new_suite(tmp_path, RACY)


def harness(suite: Suite, *arguments: str) -> Ran:
    done = subprocess.run(
        [sys.executable, "-m", "harness", *arguments],
        cwd=suite.folder,
        env=suite.environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=240,
    )
    return Ran(done.returncode, done.stdout, suite.folder)


def in_virtual_time(script: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", RUN_IN_VIRTUAL_TIME, str(script)],
        cwd=REPOSITORY,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=240,
    )
    return done.returncode, done.stdout


# Reduction.


@given(st.lists(st.integers(0, 30), unique=True, max_size=12), st.data())
def test_what_is_left_fails_and_nothing_of_it_can_be_left_out(items, data):
    needed = data.draw(st.sets(st.sampled_from(items), max_size=4)) if items else set()
    tried = []

    def fails(part):
        tried.append(tuple(part))
        return needed <= set(part)

    assert minimize(items, fails) == [item for item in items if item in needed]
    assert len(tried) < 200


def test_of_several_reasons_one_is_left():
    assert minimize([1, 2, 3, 4], lambda part: 2 in part or {1, 4} <= set(part)) in ([2], [1, 4])


TWO_HOLDS = """
def test_two_late(lab):
    leaf, product = lab.product(2.0, 3.0)
    first, second = lab.poisoned(product), lab.poisoned(product)
    with lab.preparing():
        total = lab.poisoned(product)
        first.fill_(0.0)
        second.fill_(0.0)
        total.fill_(5.0)
    with lab.stream("one"):
        first.fill_(1.0)
    with lab.stream("two"):
        second.fill_(1.0)
    with lab.stream("other"):
        lab.keep(total).mul_(1.0)
    with lab.stream("reader") as reader:
        lab.observe((first + second).clamp(min=1.0), 2.0)
    lab.keep((first, second))
"""


def test_the_minimal_plan_of_a_race(suite):
    suite.write(TWO_HOLDS)
    ran = harness(
        suite,
        "reduce",
        "test_written.py::test_two_late",
        "--device",
        "sim",
        "--plan",
        "hold=other:0,reader:1,one:0,two:0",
    )
    assert ran.code == 0, ran.output
    assert re.search(r"which reduces to hold=(one|two):0: 1 of 4 held launches", ran.output), ran.output
    assert "--plan hold=" in ran.output


def test_without_a_plan_one_is_looked_for(suite):
    ran = harness(suite, "reduce", "test_written.py::test_unordered", "--device", "sim")
    assert ran.code == 0, ran.output
    assert "by happens-before and values under hold=fill:0, which reduces to hold=fill:0" in ran.output


def test_what_does_not_race_cannot_be_reduced(suite):
    suite.write(SAFE)
    ran = harness(suite, "reduce", "test_written.py::test_ordered", "--device", "sim")
    assert ran.code == 6, ran.output
    assert "did not race in" in ran.output


# Replay.


def test_a_race_is_replayed_by_its_id(suite):
    ran = suite.run("--count", "6", "--seed", "7")
    identifier = re.search(r"id +(\w{8}-\d+)", ran.output)
    assert identifier is not None, ran.output
    again = harness(suite, "replay", identifier[1])
    assert again.code == 1, again.output
    run = min((suite.folder / ".sidestream" / "runs").iterdir())  # the replay is a run of its own
    assert again.output.startswith(f"repetition {identifier[1]} of .sidestream/runs/{run.name}\n")
    assert "--device sim --seed 7 --plan" in again.output
    first, second = (re.findall(r"value +(.*)", output) for output in (ran.output, again.output))
    assert first and first == second
    reduced = harness(suite, "reduce", identifier[1])
    assert reduced.code == 0, reduced.output


def test_the_newest_run_that_has_it_is_meant(suite):
    suite.run("--count", "3", "--leave-out", "wait@default:0/Engine::evaluate_function")
    suite.run("--count", "3", "--seed", "5")
    suite.run("--count", "2", "--seed", "6")
    runs = sorted((suite.folder / ".sidestream" / "runs").iterdir())
    identifier = next(record.id for record in read_run(runs[1]) if record.repetition == 2)
    assert find_repetition(identifier, None, suite.folder).options.seed == 5
    earlier = find_repetition(identifier, runs[0], suite.folder) if list(read_run(runs[0])) else None
    assert earlier is None or earlier.options.fault is not None
    with pytest.raises(UsageError, match="has a repetition"):
        find_repetition(identifier[:9] + "99", None, suite.folder)
    with pytest.raises(UsageError, match="is no id of a repetition"):
        find_repetition("test_written.py", None, suite.folder)


# Stand-alone scripts.


def script_of(suite: Suite, nodeid: str, plan: str) -> Path:
    path = suite.folder / "standalone.py"
    ran = suite.run(nodeid, "--plan", plan, "--script", str(path))
    assert ran.code == 0, ran.output
    return path


def imports_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    modules = {each.module or "" for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)}
    return modules | {alias.name for each in ast.walk(tree) if isinstance(each, ast.Import) for alias in each.names}


def test_the_script_of_a_planted_race_shows_it_and_imports_nothing_of_ours(suite):
    suite.run("--count", "4")
    (record,) = [
        one for one in read_run(next((suite.folder / ".sidestream" / "runs").iterdir())) if one.repetition == 1
    ]
    path = suite.folder / "standalone.py"
    ran = harness(suite, "replay", record.id, "--script", str(path))
    assert ran.code == 0, ran.output
    assert imports_of(path) == {"contextlib", "sys", "torch"}
    if not torch.cuda.is_available():
        alone = subprocess.run([sys.executable, str(path)], capture_output=True, text=True)
        assert (alone.returncode, alone.stdout) == (3, ""), alone.stderr
        assert alone.stderr.startswith("This needs an accelerator that torch finds")
    code, output = in_virtual_time(path)
    assert code == 1, output
    assert "5 of 5 trials were wrong" in output
    assert "256 of 256 wrong: expected 15.0, got nan" in output


def test_the_script_of_a_safe_case_shows_nothing(suite):
    suite.write(SAFE)
    code, output = in_virtual_time(script_of(suite, "test_written.py::test_ordered", "hold=fill:0"))
    assert code == 0, output
    assert "0 of 5 trials were wrong" in output and "was not found" not in output


IN_BACKWARD = """
import functools
import pytest
import torch
import torch

SCALES = {"three": 3.0}
times = functools.partial(torch.mul, other=2.0)


def doubled(value):
    return times(value)


def unused(value):
    return pytest.approx(value)


@pytest.mark.parametrize("scale, twice", [(SCALES, doubled)])
@pytest.mark.parametrize("limits", [[1.0, float("inf")]])
def test_side(lab, scale, twice, limits):
    with lab.preparing():
        leaf = torch.full((256,), 2.0, device=lab.device, requires_grad=True)
    with lab.stream("side") as side:
        output = twice(leaf * scale["three"])
    with lab.stream("ambient") as ambient:
        output.record_stream(ambient)
        (gradient,) = torch.autograd.grad(output, leaf, torch.ones_like(output), retain_graph=True)
        lab.observe(gradient, 6.0)
    with lab.stream("unordered"):
        lab.observe(gradient, 6.0)
    lab.keep((leaf, output, gradient))
"""


def test_a_launch_of_the_engine_is_made_late_by_a_hook_of_its_node(suite):
    """Helpers, constants and arguments of the case are in the script, and nothing that it does not use."""
    suite.write(IN_BACKWARD)
    failed = suite.run("-k", "test_side")
    plans = re.findall(r"first +aten::mul.* on (\w+:\d+) in MulBackward0", failed.output)
    assert plans, failed.output
    path = script_of(suite, "test_written.py::test_side", f"hold={plans[0]}")
    text = path.read_text()
    assert imports_of(path) == {"contextlib", "functools", "sys", "torch"}
    assert (
        "def doubled" in text
        and "SCALES = " in text
        and "def unused" not in text
        and "pytest" not in text.split('"""')[2]
    )
    assert 'limits=[1.0, float("inf")]' in text and "scale=SCALES, twice=doubled" in text
    assert "register_prehook" in text
    code, output = in_virtual_time(path)
    assert code == 1, output
    assert re.search("[1-5] of 5 trials were wrong", output), output  # memory used again may hold the right value


@pytest.mark.parametrize(
    ("source", "options", "sentence"),
    [
        (
            SAFE.replace("15.0", "pytest.approx(15.0).expected"),
            ["--plan", "baseline"],
            "it, or a helper of it, uses pytest",
        ),
        (SAFE, [], "say which with --plan"),
        (SAFE, ["--plan", "baseline", "--count", "5"], "leave --twins and --count out"),
        (SAFE, ["--plan", "baseline", "-n", "2"], "leave -n out"),
        (SAFE, ["--plan", "hold=none:0"], "which test_written.py::test_ordered does not launch"),
        (SAFE + RACY, ["--plan", "baseline"], "asks one case, and 2 are selected"),
    ],
)
def test_what_cannot_be_written_is_said(suite, source, options, sentence):
    suite.write("import pytest\n" + source)
    ran = suite.run("--script", "standalone.py", *options)
    assert ran.code == 4 or sentence.startswith(("it, or", "which")), ran.output
    assert sentence in ran.output
    assert not (suite.folder / "standalone.py").exists()
