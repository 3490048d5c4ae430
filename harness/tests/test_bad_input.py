"""Bad input: one clear sentence each, exit code 4, before any case runs."""

from __future__ import annotations

import os

import pytest

from harness.tests.suite_runner import SAFE, Suite, new_suite


@pytest.fixture
def suite(tmp_path) -> Suite:
    return new_suite(tmp_path)


def errors(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith("ERROR:")]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--device", "tpu"], "--device tpu is unknown: use auto, cuda, cuda:N or sim."),
        (["--count", "0"], "--count 0 runs nothing"),
        (["--count", "-3"], "--count -3 runs nothing"),
        (["--plan", "hold=fill"], "'hold=fill' is no plan"),
        (["--load", "compute"], "--load compute needs a real device"),
        (["--load", "coffee"], "coffee"),
        (["--hold-ms", "0"], "--hold-ms 0 holds nothing"),
        (["--hold", "hands"], "--hold hands is unknown: use sleep or gate."),
        (["--hold", "gate"], "the simulator's scheduler holds them exactly: leave --hold out"),
        (["--hold", "gate", "--hold-ms", "5"], "--hold-ms is the length of a sleep"),
        (["--repetition-timeout", "0"], "--repetition-timeout 0 makes no sense"),
        (["--results", "/dev/null/results"], "/dev/null/results"),
        (["--repetition-timeout", "nan"], "--repetition-timeout nan makes no sense"),
        (["--hold-ms", "inf"], "--hold-ms inf holds nothing"),
        (["--junitxml", "/proc/junit.xml"], "--junitxml /proc/junit.xml cannot be written (No such file or directory)"),
        (["--catalogue-json", "."], "--catalogue-json . cannot be written (Is a directory): name another file."),
        (["-n", "-1"], "-n -1 makes no worker"),
        (["-n", "2", "--dist", "each"], "--dist each"),
        (["-n", "2", "--device", "tpu"], "--device tpu is unknown"),
    ],
)
def test_option_value(suite, arguments, sentence):
    ran = suite.run(*arguments)
    assert ran.code == 4, ran.output
    (error,) = errors(ran.output)
    assert sentence in error
    assert "Traceback" not in ran.output


def test_cuda_without_a_gpu(suite):
    ran = suite.run("--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert ran.code == 4, ran.output
    (error,) = errors(ran.output)
    assert "needs a GPU" in error
    assert "--device sim" in error


def test_no_compiler(suite, tmp_path):
    empty = tmp_path / "bin"
    empty.mkdir()
    ran = suite.run(PATH=str(empty), CXX="", SIDESTREAM_CACHE=str(tmp_path / "cache"))
    assert ran.code == 4, ran.output
    (error,) = errors(ran.output)
    assert "compiler" in error
    assert "g++" in error


def test_unwritable_cache(suite):
    ran = suite.run(SIDESTREAM_CACHE="/dev/null/cache")
    assert ran.code == 4, ran.output
    (error,) = errors(ran.output)
    assert "/dev/null/cache" in error
    assert "SIDESTREAM_CACHE" in error


@pytest.mark.parametrize("workers", [[], ["-n", "2"]], ids=["one_process", "workers"])
def test_another_privateuse1_backend(suite, workers):
    (suite.folder / "conftest.py").write_text(
        'import torch\ntorch.utils.rename_privateuse1_backend("other")\npytest_plugins = ["harness.plugin"]\n'
    )
    ran = suite.run(*workers)
    assert ran.code == 4, ran.output
    (error,) = errors(ran.output)
    assert "PrivateUse1" in error
    assert "other" in error


def test_control_without_its_aim(suite):
    suite.write('import pytest\n\n@pytest.mark.control("unsafe")' + SAFE)
    ran = suite.run()
    assert ran.code == 4, ran.output
    assert 'write @pytest.mark.control("why it is unsafe", aim="the racing stream")' in ran.output


def test_repeat_without_a_number(suite):
    suite.write('import pytest\n\n@pytest.mark.repeat("often")' + SAFE)
    ran = suite.run()
    assert ran.code == 2, "pytest's own code for what cannot be collected"
    assert "@pytest.mark.repeat takes a number of repetitions from 1 on." in ran.output
    assert "ValueError" not in ran.output


def test_plan_that_names_no_launch_of_the_case(suite):
    ran = suite.run("--plan", "hold=fill:7")
    assert ran.code == 4, ran.output
    assert "which test_written.py::test_ordered does not launch; it launches fill:0" in ran.output


MORE = SAFE.replace("test_ordered", "test_more").replace('"fill"', '"write"')


@pytest.mark.parametrize(
    "given", [("--plan", "hold=fill:7"), ("--misdirect", "wait@a:0/user", "-n", "2")], ids=["one_process", "workers"]
)
def test_what_no_selected_case_has_is_said_once(suite, given):
    suite.write(SAFE + MORE)
    ran = suite.run(*given)
    assert ran.code == 4, ran.output
    (error,) = errors(ran.output)
    assert f"none of the 2 selected cases has what is named by {' '.join(given[:2])}: run one of them" in error
    assert "2 skipped" in ran.output and "which test_" not in ran.output


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one_process", "workers"])
def test_cases_that_do_not_have_what_another_has_are_skipped(suite, workers):
    suite.write(SAFE + MORE)
    ran = suite.run("--plan", "hold=fill:0", "--count", "2", *workers)
    assert ran.code == 0, ran.output
    assert "1 passed, 1 skipped" in ran.output
    assert "1 case skipped: without what is named by --plan hold=fill:0." in ran.output
    assert "1 of 1 safe cases never raced" in ran.output and "test_more" not in ran.output


def test_a_plan_to_reduce_that_names_no_launch_of_the_case(suite):
    ran = suite.run("--plan", "hold=fill:7", "--reduce", "1")
    assert ran.code == 4, ran.output
    assert "which test_written.py::test_ordered does not launch" in ran.output


THREE_DEVICES = "import pytest\n\n@pytest.mark.devices(3)" + SAFE


@pytest.mark.parametrize("how", [("--twins",), ("-n", "2")], ids=["one_process", "workers"])
def test_a_run_that_covers_nothing_is_no_clean_run(suite, how):
    suite.write(THREE_DEVICES)
    ran = suite.run(*how)
    assert ran.code == 5, ran.output
    assert "Nothing ran: 1 case, and none is covered here (-rs says why)." in ran.output


@pytest.mark.parametrize(
    "more", [SAFE.replace("ordered", "more"), "\n@pytest.mark.xfail\ndef test_y():\n    raise KeyError\n"]
)
def test_a_run_that_covers_something_is_one(suite, more):
    suite.write(THREE_DEVICES + more)
    ran = suite.run()
    assert ran.code == 0, ran.output
    assert "Nothing ran" not in ran.output


def test_settings_that_hide_races_are_refused(suite):
    ran = suite.run("--device", "sim", CUDA_LAUNCH_BLOCKING="1")
    assert ran.code == 0, "it says nothing about the simulator"


def test_full_disk_loses_no_result(suite):
    """Results that cannot be written are counted all the same, and the summary says so."""
    if not os.path.exists("/dev/full"):
        pytest.fail("this test needs /dev/full")
    # The open result file of the only process becomes a device that is always full.
    (suite.folder / "conftest.py").write_text(
        "import os\n\npytest_plugins = ['harness.plugin']\n\n"
        "def pytest_collection_finish(session):\n"
        "    from harness.pytest_side.run import RUN\n"
        "    os.dup2(os.open('/dev/full', os.O_WRONLY), session.config.stash[RUN].writer()._results)\n"
    )
    ran = suite.run("--count", "20")
    assert ran.code == 0, ran.output
    assert "results could not be written" in ran.output
    assert "20 repetitions" in ran.output
