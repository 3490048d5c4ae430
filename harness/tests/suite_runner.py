"""Runs pytest with the plugin on a suite written for the test, in a process of its own, as a user would."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from harness.tests.warm_python import run_pytest

REPOSITORY = Path(__file__).parent.parent.parent
WHOLE_DRILL = "SIDESTREAM_DRILL_KILLS" in os.environ
"""Whether every fault is wanted, and not a sample that a machine for CI has the time for; see test_fault_drill.py."""
_TIMEOUT_S = 240.0
_MARK = "SIDESTREAM_SUITE"
"""Environment variable by which the processes of a suite are known."""

SAFE = """
def test_ordered(lab):
    leaf, product = lab.product(2.0, 3.0)
    seed = lab.poisoned(product)
    with lab.stream("fill") as fill:
        seed.fill_(5.0)
    with lab.stream("ambient") as ambient:
        ambient.wait_stream(fill)
        product.backward(seed)
        lab.observe(leaf.grad, 15.0)
"""

RACY = """
def test_unordered(lab):
    leaf, product = lab.product(2.0, 3.0)
    seed = lab.poisoned(product)
    with lab.stream("fill"):
        seed.fill_(5.0)  # the fill
    with lab.stream("ambient"):
        product.backward(seed)  # the backward
        lab.observe(leaf.grad, 15.0)  # the observation
"""

CONTROL = (
    """
import pytest

@pytest.mark.control("Nothing orders the fill before the backward.", aim="fill")
"""
    + RACY
)


@dataclass
class Ran:
    """What a run of pytest printed and left."""

    code: int
    output: str
    folder: Path


@dataclass
class Suite:
    """A folder with one test file and the plugin."""

    folder: Path

    def write(self, source: str, name: str = "test_written.py") -> Path:
        """Write the test file."""
        path = self.folder / name
        path.write_text(source)
        return path

    def command(self, *arguments: str) -> list[str]:
        """The command line that runs the suite."""
        return [sys.executable, "-m", "pytest", "--rootdir", str(self.folder), *arguments]

    def environment(self, **variables: str) -> dict[str, str]:
        """The environment of that command."""
        return {**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "120", _MARK: str(self.folder), **variables}

    def processes(self) -> list[int]:
        """Every process that a run of the suite has started, by whatever ways, and that has not ended."""
        found = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"{_MARK}={self.folder}\0".encode() in environ.read_bytes():
                    found.append(int(environ.parent.name))
        return found

    def run(self, *arguments: str, **variables: str) -> Ran:
        """Run pytest on the suite, on the simulator unless the arguments name another device."""
        device = () if "--device" in arguments else ("--device", "sim")
        output = self.folder / ".output"
        code = run_pytest(
            self.command(*device, *arguments)[3:],
            folder=self.folder,
            environment=self.environment(**variables),
            output=output,
            timeout_s=_TIMEOUT_S,
        )
        return Ran(code, output.read_text(errors="replace"), self.folder)


def new_suite(folder: Path, source: str = SAFE) -> Suite:
    """A suite in a folder, with one test file."""
    suite = Suite(folder)
    (folder / "conftest.py").write_text('pytest_plugins = ["harness.plugin"]\n')
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers --strict-config\n")
    suite.write(source)
    return suite
