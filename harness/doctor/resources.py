"""Folders, memory, limits."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from harness.backends import toolchain
from harness.backends.extension import cache_folder
from harness.doctor.check import Check, broken, warning
from harness.errors import UsageError

_CACHE_BYTES = 100 << 20
"""Both extensions take 2 MB, and more while they are built."""
_RESULTS_BYTES = 100 << 20
"""Half a million repetitions that pass."""
_SHARED_BYTES = 64 << 20
"""What Docker gives a container."""
_FILES = 256
"""A controller opens 3 for each of its workers."""
_PROCESSES = 512
"""Linux counts threads, of which a controller has 12 beside the 3 of each worker, and builds start compilers."""


def machine() -> Check:
    """Cores and memory."""
    cores, free = toolchain.usable_cores(), toolchain.available_memory_bytes()
    found = f"{cores} {'core' if cores == 1 else 'cores'}"
    if free is None:
        return Check("machine", found)
    found += f", {_size(free)} of memory free"
    if free < toolchain.BYTES_PER_JOB:
        return warning("machine", found, f"Free some: one compiler takes {_size(toolchain.BYTES_PER_JOB)}.")
    return Check("machine", found)


def cache() -> Check:
    """Where compiled extensions are kept."""
    advice = "Set SIDESTREAM_CACHE to a writable folder."
    try:
        return _folder("cache", cache_folder(), _CACHE_BYTES, advice)
    except UsageError as error:
        return broken("cache", str(error), advice)


def results(root: Path) -> Check:
    """Where a run that is started in ``root`` leaves its results."""
    return _folder("results", root / ".sidestream", _RESULTS_BYTES, "Run from a folder that is, or give --results=DIR.")


def _folder(name: str, folder: Path, needed_bytes: int, advice: str) -> Check:
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        # As root every folder looks writable; a read-only file system says no only when asked.
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(bytes(4096))
            file.flush()
        free = shutil.disk_usage(existing).free
    except OSError as error:
        return broken(name, f"{folder} is not writable ({error.strerror or error})", advice)
    found = f"{folder}, {_size(free)} free"
    if free < needed_bytes:
        return warning(name, found, f"Free {_size(needed_bytes)}: results that do not fit on the disk are lost.")
    return Check(name, found)


def shared_memory(folder: Path = Path("/dev/shm")) -> Check:
    """What processes share."""
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return warning(str(folder), f"not there ({error.strerror})", "Mount it: NCCL and torch's data loaders need it.")
    if free < _SHARED_BYTES:
        return warning(str(folder), f"{_size(free)} free", "Give it more (docker run --shm-size=1g): NCCL needs it.")
    return Check(str(folder), f"{_size(free)} free")


def limits() -> Iterator[Check]:
    """The limits of this process that a run could meet."""
    name = "limits"
    meant = True
    for kind, option, least, consequence in (
        (resource.RLIMIT_NOFILE, "-n", _FILES, "a run with many workers may run out of open files"),
        (resource.RLIMIT_NPROC, "-u", _PROCESSES, "workers may fail to start their threads"),
        (resource.RLIMIT_FSIZE, "-f", None, "a result file that reaches it takes no more repetitions"),
        (resource.RLIMIT_CPU, "-t", None, "workers that reach it are killed"),
        (resource.RLIMIT_AS, "-v", None, "CUDA reserves far more addresses than it uses, and may not start"),
    ):
        soft, _ = resource.getrlimit(kind)
        if soft == resource.RLIM_INFINITY or (least is not None and soft >= least):
            continue
        if kind == resource.RLIMIT_NPROC and os.geteuid() == 0:
            continue  # it does not hold for root
        meant = False
        value = "unlimited" if least is None else str(least)
        yield warning(name, f"ulimit {option} is {soft}: {consequence}", f"ulimit {option} {value}.")
    if meant:
        yield Check(name, "none that a run meets")


def _size(number: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"
