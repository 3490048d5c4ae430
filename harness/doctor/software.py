"""Python, the compiler, torch, pytest and its plugins, settings, debuggers."""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType

from harness.backends import hidden_races, toolchain
from harness.doctor.check import Check, blind, broken, warning
from harness.errors import UsageError

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 7)

_NEEDED_PLUGINS = ("pytest-xdist", "pytest-repeat")
_RERUNS = "runs a failed test again and calls it passed: a race is never 'just flaky', and would be hidden"
_REORDERS = "runs the cases in another order in each run"
_DISTURBING_PLUGINS = {
    "pytest-rerunfailures": (_RERUNS, "give no --reruns, or add -p no:rerunfailures"),
    "flaky": (_RERUNS, "mark no case flaky, or add -p no:flaky"),
    "pytest-randomly": (
        f"{_REORDERS}, and seeds Python and NumPy anew for each test",
        "add -p no:randomly; python -m harness stress draws an order that its seed repeats",
    ),
    "pytest-random-order": (_REORDERS, "give no --random-order; python -m harness stress draws an order"),
    "pytest-timeout": (
        "limits a whole test, which here is all repetitions of a case, and does not cut a hang that holds the GIL",
        "set no timeout for the suite: --repetition-timeout limits each repetition",
    ),
    "pytest-cov": (
        "traces every line while it measures coverage, which makes repetitions many times slower",
        "give no --cov to the suite",
    ),
    "pytest-parallel": ("runs cases in threads, and a case has its process to itself", "add -p no:parallel"),
    "pytest-forked": ("forks a process that has initialised CUDA, which CUDA forbids", "give no --forked"),
}

_TRACERS = {
    "compute-sanitizer": "runs kernels one after another, so no race can show",
    "cuda-memcheck": "runs kernels one after another, so no race can show",
    "cuda-gdb": "makes launches synchronous, so no race can show",
    "ncu": "runs kernels one after another, so no race can show",
    "nsys": "slows launches down and listens where the tap does",
    "gdb": "stops all threads at every event that it looks at",
    "rr": "runs one thread at a time",
    "strace": "stops a thread at each of its system calls",
    "ltrace": "stops a thread at each of its calls",
    "valgrind": "runs one thread at a time",
}
_NAME_LENGTH = 15
"""To which Linux cuts the name of a process."""


def python() -> Check:
    """The interpreter."""
    name, found = "Python", ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST_PYTHON:
        return broken(name, found, f"Use Python {'.'.join(map(str, OLDEST_PYTHON))} or newer.")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return warning(name, f"{found}, built to run without the GIL", "Use a build with the GIL: this is untested.")
    if sys.flags.optimize:
        return warning(name, f"{found} with -O, which drops assertions", "Run without -O and PYTHONOPTIMIZE.")
    return Check(name, found)


def compiler() -> Check:
    """What builds the native extensions."""
    name = "compiler"
    try:
        command = toolchain.build_environment(1)["CXX"]
    except UsageError as error:
        # A cache that has them already needs none; whether it does shows in the planted races.
        return warning(name, "the native extensions cannot be built here, only used where they have been", str(error))
    return Check(name, command)


def torch_build(torch: ModuleType) -> Check:
    """PyTorch's version, and what it is built for."""
    name = "torch"
    built_for = "the CPU alone"
    if torch.version.hip:
        built_for = f"ROCm {torch.version.hip}"
    elif torch.version.cuda:
        built_for = f"CUDA {torch.version.cuda}"
    found = f"{torch.__version__}, built for {built_for}"
    match = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if match is None or (int(match[1]), int(match[2])) < OLDEST_TORCH:
        return broken(name, found, f"Install torch {'.'.join(map(str, OLDEST_TORCH))} or newer.")
    return Check(name, found)


def plugins(installed: Mapping[str, str] | None = None) -> Iterator[Check]:
    """The plugins that pytest would load by itself.

    Args:
        installed: their versions by the names of their distributions; by default those that are installed.
    """
    versions = _installed_plugins() if installed is None else installed
    missing = [plugin for plugin in _NEEDED_PLUGINS if plugin not in versions]
    if missing:
        yield broken("pytest", f"{' and '.join(missing)} not installed", f"pip install {' '.join(missing)}.")
    else:
        yield Check("pytest", ", ".join(f"{plugin} {versions[plugin]}" for plugin in _NEEDED_PLUGINS))
    for plugin, (effect, advice) in _DISTURBING_PLUGINS.items():
        if plugin in versions:
            yield warning(plugin, effect, f"{advice[0].upper()}{advice[1:]}.")


def _installed_plugins() -> dict[str, str]:
    found = {}
    for point in metadata.entry_points(group="pytest11"):
        if point.dist is not None:
            found[re.sub(r"[-_.]+", "-", point.dist.name).lower()] = point.dist.version
    return found


def settings(environ: Mapping[str, str], devices: Iterable[str]) -> Iterator[Check]:
    """Settings that hide races on one of these devices."""
    name = "settings"
    findings = dict.fromkeys(finding for device in devices for finding in hidden_races.find(environ, device))
    for finding in findings:
        make = blind if finding.refuse else warning
        yield make(name, f"{finding.setting}: {finding.effect}", "Unset it.")
    added = environ.get("PYTEST_ADDOPTS")
    if added:
        yield warning(name, f"PYTEST_ADDOPTS={added}: added to every call of pytest", "Unset it if that is not meant.")
    if not findings and not added:
        yield Check(name, "none that hides races")


def tracers(process: int | str = "self", proc: Path = Path("/proc")) -> Iterator[Check]:
    """Debuggers and profilers that this process runs under.

    Args:
        process: its number.
        proc: where Linux describes processes.
    """
    name = "debuggers"
    known = {tracer[:_NAME_LENGTH]: (tracer, effect) for tracer, effect in _TRACERS.items()}
    found = {}
    number = str(process)
    traced_by = _status(proc, number).get("TracerPid", "0")
    while number not in ("", "0"):
        status = _status(proc, number)
        if status.get("Name") in known:
            tracer, effect = known[status["Name"]]
            found[tracer] = effect
        number = status.get("PPid", "")
    if traced_by != "0":
        tracer = _status(proc, traced_by).get("Name", f"process {traced_by}")
        found.setdefault(*known.get(tracer, (tracer, "traces this process")))
    for tracer, effect in found.items():
        make = blind if effect.endswith("no race can show") else warning
        yield make(name, f"this runs under {tracer}, which {effect}", f"Run without {tracer}.")
    if not found:
        yield Check(name, "none")


def _status(proc: Path, number: str) -> dict[str, str]:
    try:
        lines = (proc / number / "status").read_text().splitlines()
    except OSError:
        return {}
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
