"""Registered defects of PyTorch: seen where they are, safe cases elsewhere, and a question when they are gone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from harness import markers
from harness.errors import UsageError
from harness.exit_codes import ExitCode
from harness.markers import Defect
from harness.tests.suite_runner import CONTROL, RACY, REPOSITORY, SAFE, Suite, new_suite

ONE_PROCESS_AND_WORKERS = pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one_process", "workers"])


def marker(torch: str = ">=2.7", devices: str = '("cuda", "sim")', aim: str = ', aim="fill"') -> str:
    return f'import pytest\n\n@pytest.mark.defect("docs/x.md", torch="{torch}", devices={devices}{aim})'


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "x.md").write_text("# Wrong\n")
    return new_suite(tmp_path)


@pytest.mark.parametrize(
    ("versions", "devices", "torch_version", "device", "affected"),
    [
        (">=2.7", ("cuda", "sim"), "2.13.0+cpu", "sim", True),
        (">=2.7", ("cuda", "sim"), "2.11.0+cu130", "cuda:1", True),
        (">=2.7", ("cuda",), "2.13.0+cpu", "sim", False),
        (">=2.7,<2.13", ("sim",), "2.13.0+cpu", "sim", False),
        ("<=2.13.0", ("sim",), "2.13.0+cpu", "sim", True),
        (">=2.7", ("sim",), "2.15.0.dev20270101+cpu", "sim", True),
        ("<2.15", ("sim",), "2.15.0.dev20270101+cpu", "sim", False),
    ],
)
def test_versions_and_devices_say_where_it_is(versions, devices, torch_version, device, affected):
    defect = Defect("docs/x.md", "fill", SpecifierSet(versions), devices)
    assert defect.affects(torch_version, device) is affected


@ONE_PROCESS_AND_WORKERS
def test_a_defect_that_races_passes_and_is_listed_apart_from_controls(suite, workers):
    suite.write(CONTROL + marker().removeprefix("import pytest\n") + RACY.replace("test_unordered", "test_wrong"))
    ran = suite.run("--count", "60", *workers)
    assert ran.code == 0, ran.output
    assert "1 of 1 controls were seen to race" in ran.output
    assert "1 of 1 cases of known defects of PyTorch were seen to race" in ran.output
    assert "racing access: docs/x.md." in ran.output
    assert "race 60 (defect)" in ran.output


@ONE_PROCESS_AND_WORKERS
def test_a_defect_that_never_races_fails_the_run(suite, workers):
    suite.write(marker() + SAFE)
    ran = suite.run("--count", "40", *workers)
    assert ran.code == ExitCode.RACE, ran.output
    assert "fixed upstream?" in ran.output
    assert "docs/x.md" in ran.output
    assert "none of its 40 repetitions raced" in ran.output


@pytest.mark.parametrize(
    "elsewhere", [{"torch": ">=2.7,<2.8"}, {"devices": '("cuda",)'}], ids=["other versions", "other devices"]
)
def test_elsewhere_it_is_an_ordinary_safe_case(suite, elsewhere):
    suite.write(marker(**elsewhere) + SAFE)
    ran = suite.run()
    assert ran.code == 0, ran.output
    assert "1 of 1 safe cases never raced" in ran.output
    ran = suite.run("--twins")
    assert "raced as they are" not in ran.output
    suite.write(marker(**elsewhere) + RACY)
    ran = suite.run()
    assert ran.code == ExitCode.RACE, ran.output
    assert "0 of 1 safe cases never raced" in ran.output


@pytest.mark.parametrize("body", [RACY, SAFE], ids=["racy", "mended"])
def test_a_defect_has_no_twins_but_is_looked_at(suite, body):
    suite.write(marker() + body)
    ran = suite.run("--twins")
    assert ran.code == (ExitCode.CLEAN if body is RACY else ExitCode.RACE), ran.output
    assert f"{int(body is RACY)} of 1 cases of known defects of PyTorch raced as they are." in ran.output
    assert ("fixed upstream? test_written.py::test_" in ran.output) is (body is SAFE)
    assert "control" not in ran.output


RAISES = SAFE + "    raise NotImplementedError\n"


@ONE_PROCESS_AND_WORKERS
@pytest.mark.parametrize("study", [("--count", "40"), ("--twins",)], ids=["repetitions", "twins"])
def test_a_defect_that_raises_is_expected_to(suite, workers, study):
    suite.write(marker(aim=", raises=NotImplementedError") + RAISES)
    ran = suite.run(*study, *workers)
    assert ran.code == 0, ran.output
    assert "1 xfailed" in ran.output


def test_a_defect_that_raises_fails_the_run_when_it_stops_or_raises_something_else(suite):
    suite.write(marker(aim=", raises=NotImplementedError") + SAFE)
    ran = suite.run()
    assert ran.code == ExitCode.RACE, ran.output
    assert "described in docs/x.md; if this passes: fixed upstream?" in ran.output
    suite.write(marker(aim=", raises=KeyError") + RAISES)
    ran = suite.run()
    assert ran.code == ExitCode.RACE, ran.output
    assert "1 failed" in ran.output
    suite.write(marker(aim=", raises=NotImplementedError", torch=">=2.7,<2.8") + RAISES)
    assert "1 failed" in suite.run().output


@dataclass
class Marked:
    """As much of a pytest item as markers are read from."""

    marks: list[pytest.MarkDecorator]
    root: Path
    nodeid: str = "test_x.py::test_x"

    @property
    def config(self) -> SimpleNamespace:
        return SimpleNamespace(rootpath=self.root)

    def iter_markers(self, name: str) -> Iterator[pytest.Mark]:
        return (each.mark for each in self.marks if each.name == name)

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next(self.iter_markers(name), None)


def defect(*report: Any, **given: Any) -> Any:
    """A marker that makes sense but for what is given; None leaves something out."""
    usual = {"aim": "fill", "torch": ">=2.7", "devices": ("cuda", "sim")}
    told = {name: value for name, value in {**usual, **given}.items() if value is not None}
    return pytest.mark.defect(*(report or ("docs/x.md",)), **told)


def check(root: Path, *marks: Any) -> None:
    markers.check(cast(pytest.Item, Marked(list(marks), root)))


control = pytest.mark.control


@pytest.mark.parametrize(
    ("mark", "sentence"),
    [
        (defect(raises=KeyError), "takes aim or raises, and was given both: write @pytest.mark.defect("),
        (defect(aim=None, raises=Exception), "takes as raises an exception of PyTorch's or your own, narrower than"),
        (defect(aim=None, raises="KeyError"), "takes as raises an exception"),
        (defect(aim=None), "the marker defect lacks aim (or raises): write @pytest.mark.defect("),
        (defect(aim=3), "takes a text as aim"),
        (defect(torch=None, devices=None), "the marker defect lacks torch, devices: write"),
        (pytest.mark.defect(aim="fill"), "the marker defect lacks report, torch, devices: write"),
        (defect(device=("sim",)), "takes nothing beside report, aim, torch, devices, raises, and was given device"),
        (defect("docs/x.md", "fill"), "and was given 1: write"),
        (defect(devices="sim"), "takes as devices a tuple of 'cuda' and 'sim', and was given 'sim'"),
        (defect(devices=("smi",)), "takes as devices a tuple of 'cuda' and 'sim', and was given ('smi',)"),
        (defect(devices=([],)), "takes as devices a tuple"),
        (defect(torch="all of them"), "takes versions as torch, which 'all of them' are not"),
        (defect("docs/y.md"), "names docs/y.md as its report, and there is no such file in "),
        (control("Unsafe."), "the marker control lacks a text as aim: write @pytest.mark.control("),
        (control("Unsafe.", aim=3), "the marker control lacks a text as aim"),
        (control(aim="fill"), "the marker control lacks a text as reason"),
        (control(), "lacks a text as reason and aim"),
        (control("Unsafe.", aim="fill", torch=">=2.7"), "needs no more than reason and aim"),
        (pytest.mark.devices("2"), "write @pytest.mark.devices(2)"),
    ],
)
def test_a_marker_that_makes_no_sense(suite: Suite, mark: Any, sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        check(suite.folder, mark)
    assert str(refused.value).startswith("test_x.py::test_x: ") and sentence in str(refused.value)


def test_markers_that_make_sense(suite: Suite) -> None:
    for marks in ([defect()], [defect(aim=None, raises=KeyError)], [control("Unsafe.", aim="fill")], []):
        check(suite.folder, *marks)
    with pytest.raises(UsageError, match="is both a control and a defect"):
        check(suite.folder, defect(), control("Unsafe.", aim="fill"))


@ONE_PROCESS_AND_WORKERS
def test_a_marker_that_makes_no_sense_is_refused_before_anything_runs(suite, workers):
    suite.write(marker(aim="") + SAFE + "\ndef test_more():\n    raise KeyError\n")
    ran = suite.run(*workers)
    assert ran.code == ExitCode.USAGE, ran.output
    (error,) = [line for line in ran.output.splitlines() if line.startswith("ERROR:")]
    assert "test_written.py::test_ordered: the marker defect lacks aim (or raises)" in error
    assert "KeyError" not in ran.output and "INTERNALERROR" not in ran.output


# The register itself.


def test_the_defect_with_roots_on_two_devices_shows_in_its_script():
    script = REPOSITORY / "docs" / "defects" / "roots_on_two_devices_simulated.py"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ran = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120)
    rows = [re.split(r" {2,}", line) for line in ran.stdout.splitlines()[2:10]]
    for _, order, late, wrong, repaired in rows:
        assert wrong == ("5 of 5" if order.endswith(late) else "0 of 5"), ran.stdout
        assert repaired == "0 of 5"
    assert ran.returncode == 1, ran.stderr


def test_the_defect_with_default_streams_shows_in_its_script_before_2_8():
    script = REPOSITORY / "docs" / "defects" / "default_streams_between_devices_simulated.py"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ran = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120)
    rows = [re.split(r" {2,}", line) for line in ran.stdout.splitlines()[2:-1]]
    is_there = Version(torch.__version__) < Version("2.8")
    assert [row[1:] for row in rows] == [["5 of 5" if is_there else "0 of 5", "0 of 5"]] * 4, ran.stdout
    assert ran.returncode == int(is_there), ran.stderr


@pytest.mark.parametrize("name", ["shared_gradient", "unordered_intermediates"])
def test_a_defect_of_one_device_shows_in_its_script(name):
    script = REPOSITORY / "docs" / "defects" / f"{name}_simulated.py"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ran = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120)
    rows = [re.split(r" {2,}", line) for line in ran.stdout.splitlines()[2:-1]]
    assert rows and all(row[-2:] == ["5 of 5", "0 of 5"] for row in rows), ran.stdout
    assert ran.returncode == 1, ran.stderr


def test_the_defect_of_function_transforms_shows_in_its_script():
    script = REPOSITORY / "docs" / "defects" / "functional_gradients_simulated.py"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ran = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120)
    rows = [re.split(r" {2,}", line) for line in ran.stdout.splitlines()[2:-1]]
    assert [row[1] for row in rows] == ["right"] * 5, ran.stdout
    raises = [row[0] for row in rows if row[2].startswith("NotImplementedError: Cannot access storage of ")]
    assert raises == ["torch.func.grad", "torch.func.jacrev", "torch.func.vmap of grad"], ran.stdout
    assert ran.returncode == 1, ran.stderr
