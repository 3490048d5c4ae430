"""JUnit XML has the counts of each case as properties, with and without workers."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from harness.tests.suite_runner import CONTROL, SAFE, new_suite


def properties_of(file: Path) -> dict[str, dict[str, str]]:
    """The properties of each test case."""
    return {
        str(case.get("name")): {str(each.get("name")): str(each.get("value")) for each in case.iter("property")}
        for case in ElementTree.parse(file).iter("testcase")
    }


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "workers"])
def test_each_case_has_its_counts(tmp_path: Path, workers: tuple[str, ...]) -> None:
    suite = new_suite(tmp_path, SAFE + CONTROL)
    assert suite.run("--count", "30", "--junitxml", "junit.xml", *workers).code == 0
    found = properties_of(tmp_path / "junit.xml")
    safe, control = found["test_ordered"], found["test_unordered"]
    assert (safe["sidestream.kind"], control["sidestream.kind"]) == ("safe", "control")
    for each in (safe, control):
        assert each["sidestream.repetitions"] == "30"
        assert int(each["sidestream.plans"]) > int(each["sidestream.launches"]) > 0
        verdicts = ("pass", "race", "timeout", "infra", "inconclusive")
        assert sum(int(each[f"sidestream.{verdict}"]) for verdict in verdicts) == 30
    assert safe["sidestream.pass"] == "30"
    assert int(control["sidestream.race"]) > 0
