"""What is needed to compile a native extension here: checked before building, one sentence for whatever is missing."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from harness.errors import UsageError

BYTES_PER_JOB = 1_600_000_000
"""Memory for one compiler: a translation unit that includes torch/extension.h was measured at 1.4 GiB."""


def build_environment(source_count: int) -> dict[str, str]:
    """The environment for a build of ``source_count`` translation units.

    It names a C++ compiler that exists (``CXX``), has a ninja that runs first on ``PATH``, and bounds the number of
    compilers by the free memory (``MAX_JOBS``, left alone if the user set it).

    Raises:
        UsageError: no C++ compiler, no Python headers, no ninja or no setuptools; the sentence says what to install.
    """
    compiler = find_compiler()
    _check_python_headers()
    _check_setuptools()
    ninja = _find_ninja()
    environment = dict(os.environ)
    environment["CXX"] = compiler
    environment["PATH"] = os.pathsep.join([str(ninja.parent), *filter(None, [environment.get("PATH")])])
    environment.setdefault("MAX_JOBS", str(compile_jobs(source_count, usable_cores(), available_memory_bytes())))
    return environment


def compile_jobs(source_count: int, core_count: int, memory_bytes: int | None) -> int:
    """How many compilers may run at once; at least one."""
    by_memory = source_count if memory_bytes is None else memory_bytes // BYTES_PER_JOB
    return max(1, min(source_count, core_count, by_memory))


def usable_cores() -> int:
    """CPU cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory_bytes() -> int | None:
    """Memory that can be had without swapping, as the system and the control group see it; None where nothing tells."""
    return min(_memory_limits(), default=None)


def _memory_limits() -> Iterator[int]:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) * 1024
    except OSError:
        pass
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            yield max(0, int(Path(limit).read_text()) - int(Path(usage).read_text()))
        except (OSError, ValueError):  # no such control group, or its limit is "max"
            continue


def find_compiler() -> str:
    """The C++ compiler for native extensions: ``$CXX``, else the first of the usual names.

    Raises:
        UsageError: there is none.
    """
    chosen = os.environ.get("CXX", "").strip()
    for command in [chosen] if chosen else ["c++", "g++", "clang++"]:
        if shutil.which(shlex.split(command)[0]):
            return command
    missing = f"CXX names {chosen!r}, which is not on PATH" if chosen else "there is no c++, g++ or clang++ on PATH"
    raise UsageError(
        f"No C++ compiler: {missing}; install one (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++) "
        "or set CXX to one."
    )


def _check_python_headers() -> None:
    # The same call as torch.utils.cpp_extension makes, so that what is checked is what will be used.
    folder = sysconfig.get_path("include", scheme="posix_prefix")
    if not Path(folder, "Python.h").is_file():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise UsageError(
            f"No Python headers: {folder} has no Python.h; install them (Debian, Ubuntu: apt-get install "
            f"python{version}-dev; Fedora: dnf install python{version}-devel)."
        )


def _check_setuptools() -> None:
    if find_spec("setuptools") is None:
        raise UsageError(
            "No setuptools, which torch needs to compile an extension: install it (pip install setuptools)."
        )


def _find_ninja() -> Path:
    for candidate in _ninja_candidates():
        try:
            # Run it: on PATH there may be a launcher of a version manager with nothing behind it.
            subprocess.run([candidate, "--version"], capture_output=True, check=True, timeout=30)
        except (OSError, subprocess.SubprocessError):
            continue
        return candidate.absolute()
    raise UsageError("No ninja, which torch needs to compile an extension: install it (pip install ninja).")


def _ninja_candidates() -> Iterator[Path]:
    # An interpreter started by its path, its virtual environment not activated, has its ninja beside it, not on PATH.
    yield Path(sysconfig.get_path("scripts"), "ninja")
    specification = find_spec("ninja")
    if specification is not None and specification.origin is not None:
        yield Path(specification.origin).parent / "data" / "bin" / "ninja"
        try:
            from ninja import BIN_DIR
        except ImportError:
            pass
        else:
            yield Path(BIN_DIR, "ninja")
    on_path = shutil.which("ninja")
    if on_path is not None:
        yield Path(on_path)
