"""Repetitions as a pytest user meets them: counted, spread over workers, merged, cut, replayed."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from harness.campaign.reader import read_run
from harness.campaign.store import RepetitionRecord
from harness.tests.suite_runner import CONTROL, RACY, SAFE, Suite, new_suite

ONE_PROCESS_AND_WORKERS = pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["one_process", "workers"])


@pytest.fixture
def suite(tmp_path) -> Suite:
    return new_suite(tmp_path)


def records(suite: Suite) -> list[RepetitionRecord]:
    (directory,) = (suite.folder / ".sidestream" / "runs").iterdir()
    return sorted(read_run(directory), key=lambda record: (record.nodeid, record.repetition))


@ONE_PROCESS_AND_WORKERS
def test_repetitions_of_a_case_are_one_test(suite, workers):
    suite.write(SAFE + "\ndef test_without_the_lab():\n    pass\n")
    ran = suite.run("--count", "40", "-k", "ordered", "--junitxml", "report.xml", *workers)
    assert ran.code == 0, ran.output
    assert "1 passed" in ran.output
    assert "40 repetitions" in ran.output
    assert [record.repetition for record in records(suite)] == list(range(40))
    (case,) = ElementTree.parse(suite.folder / "report.xml").getroot().iter("testcase")
    assert case.get("name") == "test_ordered"


def test_one_selected_test_uses_every_worker(suite):
    suite.run("--count", "40", "-n", "2")
    by_worker = {record.worker: 0 for record in records(suite)}
    for record in records(suite):
        by_worker[record.worker] += 1
    assert by_worker == {"gw0": 20, "gw1": 20}


def test_without_a_count_each_plan_of_a_cycle_runs_once(suite):
    ran = suite.run()
    assert ran.code == 0, ran.output
    plans = [record.plan for record in records(suite)]
    assert plans[0] == "baseline"
    singles = [plan for plan in plans if plan != "baseline" and "," not in plan]
    assert singles == sorted(set(singles), key=singles.index)
    assert "hold=fill:0" in singles
    assert len(plans) == 1 + 2 * len(singles)


def test_the_marker_repeat_overrides_the_count(suite):
    suite.write("import pytest\n\n@pytest.mark.repeat(7)" + SAFE)
    suite.run("--count", "40")
    assert len(records(suite)) == 7


@ONE_PROCESS_AND_WORKERS
def test_a_missing_wait_is_reported_by_both_oracles_with_its_lines(suite, workers):
    path = suite.write(RACY)
    ran = suite.run("--count", "60", *workers)
    assert ran.code == 1, ran.output
    assert "1 failed" in ran.output
    number = {word: line for line, text in enumerate(RACY.splitlines(), 1) for word in re.findall("# the (.*)", text)}
    assert re.search(rf"first +aten::fill_.* on fill:0, test_written.py:{number['fill']}", ran.output), ran.output
    assert re.search(r"second +aten::mul.* in MulBackward0 of the forward, test_written.py:\d+", ran.output), ran.output
    assert re.search(r"value .*15\.0.*nan", ran.output), ran.output
    assert f"test_written.py:{number['observation']}" in ran.output
    assert "must wait for stream 'fill'" in ran.output
    assert "no wait was issued" in ran.output
    assert "never 'just flaky'" in ran.output
    both = [record for record in records(suite) if record.raced_by == ["values", "happens-before"]]
    assert {record.plan for record in both} >= {"hold=fill:0"}
    replay = re.search(r"replay +(.*--plan hold=fill:0.*)", ran.output)
    assert path.name in ran.output
    if not workers:
        assert replay is not None or "--plan baseline" in ran.output


def test_the_replay_command_replays_exactly_that_repetition(suite):
    suite.write(RACY)
    ran = suite.run("--plan", "hold=fill:0")
    command = re.search(r"replay +python -m pytest (.*)", ran.output)
    assert command is not None, ran.output
    again = suite.run(*command[1].split())
    assert again.code == 1
    first, second = re.findall(r"value +(.*)", ran.output), re.findall(r"value +(.*)", again.output)
    assert first and first == second


@ONE_PROCESS_AND_WORKERS
def test_a_control_that_races_passes(suite, workers):
    suite.write(CONTROL)
    ran = suite.run("--count", "60", *workers)
    assert ran.code == 0, ran.output
    assert "1 of 1 controls were seen to race" in ran.output


@ONE_PROCESS_AND_WORKERS
def test_a_control_that_never_races_fails_the_run(suite, workers):
    suite.write('import pytest\n\n@pytest.mark.control("Nothing orders them.", aim="fill")' + SAFE)
    ran = suite.run("--count", "40", *workers)
    assert ran.code == 1, ran.output
    assert "this run could not have seen the race" in ran.output
    assert "none of its 40 repetitions raced" in ran.output


def test_the_same_seed_gives_the_same_plans_and_verdicts(tmp_path):
    seen = []
    for name, seed, *workers in (("first", "7", "-n", "2"), ("second", "7"), ("third", "8")):
        folder = tmp_path / name
        folder.mkdir()
        suite = new_suite(folder, SAFE + RACY)
        suite.run("--count", "60", "--seed", seed, *workers)
        seen.append([(r.nodeid, r.repetition, r.plan, r.verdict, r.raced_by, r.holds) for r in records(suite)])
    assert len(seen[0]) == 120
    assert seen[0] == seen[1]
    assert [record[2] for record in seen[0]] != [record[2] for record in seen[2]]


def test_an_ordinary_failure_keeps_its_traceback(suite):
    suite.write(SAFE.replace("        product.backward(seed)", "        assert product.dim() == 3, 'three dimensions'"))
    ran = suite.run("--count", "5")
    assert ran.code == 1, ran.output
    assert "three dimensions" in ran.output
    assert "assert product.dim() == 3" in ran.output


def test_a_case_that_is_wrong_in_itself_is_no_race(suite):
    suite.write(SAFE.replace("15.0", "16.0"))
    ran = suite.run("--count", "5")
    assert ran.code == 1, ran.output
    assert "is wrong in itself" in ran.output
    assert "never 'just flaky'" not in ran.output


def test_a_body_that_launches_other_things_each_time_is_refused(suite):
    suite.write(
        "runs = []\n" + SAFE + "        runs.append(1)\n        if len(runs) % 2:\n            seed.fill_(7.0)\n"
    )
    ran = suite.run("--count", "5")
    assert ran.code == 1, ran.output
    assert "does not launch the same each time" in ran.output


def test_a_race_that_changes_what_is_launched_is_reported_as_the_race(suite):
    suite.write(
        """
import torch

def test_racy(lab):
    with lab.preparing():
        mask = lab.keep(torch.ones(8, device=lab.device))
    with lab.stream("fill"):
        mask.zero_()
    with lab.stream("reader"):
        found = lab.keep(mask.nonzero())  # how many launches follow depends on what it read
        for _ in range(len(found)):
            mask.add(1)
        lab.observe(mask, 0.0)
"""
    )
    ran = suite.run("--count", "6")
    assert ran.code == 1, ran.output
    assert "race: of" in ran.output
    assert "stream 'reader' must wait for stream 'fill'" in ran.output
    assert "does not launch the same" not in ran.output


def test_mostly_inconclusive_is_not_green(suite):
    suite.write(
        "runs = []\n"
        + SAFE.replace(
            '    with lab.stream("ambient")',
            """    runs.append(1)
    if len(runs) <= 2:
        with lab.stream("other"):
            lab.poisoned(product).fill_(1.0)
    with lab.stream("ambient")""",
        )
    )
    ran = suite.run("--plan", "hold=other:0", "--count", "10")
    assert ran.code == 6, ran.output
    assert "inconclusive: in 10 of 10 repetitions the hold did not take effect" in ran.output


@ONE_PROCESS_AND_WORKERS
def test_a_hang_in_python_is_cut_and_the_rest_goes_on(suite, workers):
    suite.write(
        "import time\nruns = []\n" + SAFE + "        runs.append(1)\n        if len(runs) == 9:\n"
        "            time.sleep(600)\n" + SAFE.replace("test_ordered", "test_after")
    )
    ran = suite.run("--count", "20", "--repetition-timeout", "5", *workers)
    assert ran.code == 1, ran.output
    assert "1 failed, 1 passed" in ran.output
    assert "timed out" in ran.output
    assert "in test_ordered" in ran.output, "the stacks name the line that hung"


# A mutex that is locked twice: unlike a sleep, no signal ends that, and the GIL is held meanwhile.
HANG_WITH_THE_GIL = (
    "import ctypes\nruns = []\nmutex = ctypes.create_string_buffer(64)\n"
    + SAFE
    + "        runs.append(1)\n        if len(runs) == 9:\n"
    "            ctypes.PyDLL(None).pthread_mutex_lock(mutex)\n"
    "            ctypes.PyDLL(None).pthread_mutex_lock(mutex)\n" + SAFE.replace("test_ordered", "test_after")
)


def test_a_hang_with_the_gil_in_one_process_ends_it_with_the_stacks(suite):
    suite.write(HANG_WITH_THE_GIL)
    ran = suite.run("--count", "40", "--repetition-timeout", "5")
    assert ran.code == 1, ran.output
    assert "in test_ordered" in ran.output
    assert len(records(suite)) >= 5, "what had ended is on disk"


@ONE_PROCESS_AND_WORKERS
def test_x_stops_at_the_first_failure(suite, workers):
    suite.write(RACY + "".join(SAFE.replace("test_ordered", f"test_{n}") for n in range(30)))
    ran = suite.run("-x", "--count", "20", *workers)
    assert ran.code == 1, ran.output
    assert "1 failed" in ran.output
    passed = re.search(r"(\d+) passed", ran.output)
    assert passed is None or int(passed[1]) < 25


def test_durations_are_those_of_cases(suite):
    ran = suite.run("--count", "40", "-n", "2", "--durations", "3", "-vv")
    calls = [line for line in ran.output.splitlines() if re.match(r"[\d.]+s call ", line)]
    assert len(calls) == 1, ran.output
    assert calls[0].endswith("test_written.py::test_ordered")


def test_verbose_lists_each_case_and_terse_each_function(suite):
    suite.write("import pytest\n\n@pytest.mark.parametrize('n', [1, 2])" + SAFE.replace("(lab)", "(lab, n)"))
    terse, verbose = suite.run().output, suite.run("-v").output
    summary = re.compile(r"^ +test_ordered(\S*) +(\d) ", re.MULTILINE)
    assert summary.findall(terse) == [("", "2")]
    assert summary.findall(verbose) == [("[1]", "1"), ("[2]", "1")]


def test_results_are_json_lines(suite):
    suite.run("--count", "5", "--results", "here")
    (path,) = (suite.folder / "here").glob("*.jsonl")
    first, *lines = map(json.loads, path.read_text().splitlines())
    assert first["header"]["device"] == "sim"
    assert [line["r"] for line in lines if "k" in line] == [0, 1, 2, 3, 4]


GIVES_UP = """
import pytest
runs = []

def test_gives_up(lab):
    leaf, product = lab.product(2.0, 3.0)
    seed = lab.poisoned(product)
    with lab.stream("fill"):
        seed.fill_(5.0)
    with lab.stream("ambient"):
        product.backward(seed)
        lab.observe(leaf.grad, 15.0)
    runs.append(1)
    if len(runs) == 8:
        pytest.{how}("enough")
"""


@ONE_PROCESS_AND_WORKERS
@pytest.mark.parametrize("how", ["skip", "xfail"])
def test_a_race_that_was_seen_is_not_undone_by_a_body_that_gives_up(suite, workers, how):
    suite.write(GIVES_UP.replace("{how}", how))
    ran = suite.run("--count", "30", *workers)
    assert ran.code == 1, ran.output
    assert "1 failed" in ran.output
    assert "an unordered access" in ran.output


def test_a_slice_that_is_not_set_up_does_not_hide_the_others(suite):
    skips = "import os\nimport pytest\n\n@pytest.fixture\ndef choosy():\n"
    skips += "    if os.environ['PYTEST_XDIST_WORKER'] == 'gw1':\n"
    suite.write(skips + "        pytest.skip('not here')\n" + RACY.replace("(lab)", "(choosy, lab)"))
    ran = suite.run("--count", "30", "-n", "2")
    assert ran.code == 1, ran.output
    assert "15 repetitions" in ran.output
    assert "an unordered access" in ran.output


@ONE_PROCESS_AND_WORKERS
def test_an_expected_failure_is_one_with_workers_too(suite, workers):
    suite.write("import pytest\n\n@pytest.mark.xfail(strict=True)" + RACY)
    ran = suite.run("--count", "10", *workers)
    assert ran.code == 0, ran.output
    assert "1 xfailed" in ran.output


def test_a_free_is_reported_with_its_line(suite):
    suite.write("""
import torch

def test_freed(lab):
    with lab.stream("owner") as owner:
        scratch = torch.ones(256, device=lab.device)
    with lab.stream("user") as user:
        user.wait_stream(owner)
        lab.observe(scratch * 2, 2.0)
    del scratch  # the free
""")
    ran = suite.run()
    assert ran.code == 1, ran.output
    assert "freed while in use" in ran.output
    assert "free of the block, owned by owner, test_written.py:10" in ran.output


def test_variables_of_the_body_live_until_its_work_is_done(suite):
    suite.write("""
import torch

def test_kept(lab):
    with lab.preparing():
        weight = torch.ones(256, device=lab.device)
    with lab.stream("side"):
        lab.observe(weight * 2, 2.0)
""")
    ran = suite.run("--count", "20")
    assert ran.code == 0, ran.output


def test_an_aim_that_is_no_stream_of_the_body_is_refused(suite):
    suite.write(CONTROL.replace('aim="fill"', 'aim="frist"'))
    ran = suite.run()
    assert ran.code == 1, ran.output
    assert "aims at stream 'frist' but launches nothing there" in ran.output


def test_failed_cases_are_selected_again_whatever_their_slices(suite):
    suite.write(RACY + SAFE)
    suite.run("--count", "6", "-n", "2")
    again = suite.run("--count", "6", "--lf")
    assert "1 failed" in again.output
    assert "passed" not in again.output.splitlines()[-1]


def test_a_hang_in_the_first_execution_is_a_timeout(suite):
    suite.write("import time\n" + SAFE + "        time.sleep(600)\n")
    ran = suite.run("--repetition-timeout", "4")
    assert ran.code == 1, ran.output
    assert "timeout: of 1 repetition 1 timed out" in ran.output
    assert "in test_ordered" in ran.output


def test_a_case_that_needs_more_devices_than_there_are_is_not_covered(suite):
    marked = "import pytest\n\n@pytest.mark.devices({count})" + SAFE
    suite.write(marked.format(count=3))
    ran = suite.run("-rs")
    assert ran.code == 5 and "not covered: needs 3 devices, and there is 2" in ran.output
    suite.write(marked.format(count=2))
    assert "1 passed" in suite.run().output


def test_what_is_profiled_is_one_test_whatever_the_count(suite):
    suite.write("def test_overlap(profiled):\n    pass\n")
    ran = suite.run("--count", "40", "-rs")
    assert "1 skipped" in ran.output and "takes a real device to see" in ran.output
