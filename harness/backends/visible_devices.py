"""Which GPUs a process sees, decided before CUDA is initialised: each worker's own GPU comes first.

Pure Python: the controller decides for workers that have not imported torch yet, and must not create a CUDA context
itself.

The variables mean this (CUDA Programming Guide, "CUDA_VISIBLE_DEVICES"; HIP documentation, "GPU isolation"): a list
of indices, of UUIDs (``GPU-...``, may be abbreviated) or of MIG instances (``MIG-...``), in the order in which the
process numbers them. An invalid entry ends the list, a repeated one empties it, an empty list hides every GPU. On
ROCm, ``HIP_VISIBLE_DEVICES`` goes before ``CUDA_VISIBLE_DEVICES``, which means the same there, and both count within
``ROCR_VISIBLE_DEVICES``.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, MutableMapping

CUDA = "CUDA_VISIBLE_DEVICES"
HIP = "HIP_VISIBLE_DEVICES"
ROCR = "ROCR_VISIBLE_DEVICES"

_QUERY_TIMEOUT_S = 60.0


def visible(outer: str | None, device_count: int) -> list[str]:
    """The entries of a list of visible devices that take effect, in order.

    Args:
        outer: the value of the variable, or None where it is not set (every device is visible).
        device_count: how many devices the machine has; indices from there on are invalid.
    """
    if outer is None:
        return [str(index) for index in range(device_count)]
    entries: list[str] = []
    for part in outer.split(","):
        entry = part.strip()
        if entry.startswith(("GPU-", "MIG-")):
            kind = entry[:4]
        else:
            # Read as strtoul would, by CUDA as by torch.cuda: 1gpu is 1.
            match = re.match(r"\+?(\d+)", entry)
            if match is None or int(match[1]) >= device_count:
                break
            kind, entry = "index", str(int(match[1]))
        if entries and kind != _kind(entries[0]):
            break
        if entry in entries:
            return []
        entries.append(entry)
    return entries


def _kind(entry: str) -> str:
    return entry[:4] if entry.startswith(("GPU-", "MIG-")) else "index"


def rotate(outer: str | None, device_count: int, worker_index: int) -> str:
    """The list of visible devices for a worker: the same ones as outside, its own first, in rotated order.

    With three GPUs, worker 0 gets ``0,1,2``, worker 1 ``1,2,0``, worker 3 what worker 0 got.

    Args:
        outer: the value of the variable outside, or None where it is not set.
        device_count: how many devices the machine has.
        worker_index: the worker's number, from 0.

    Returns:
        The value for the worker; the empty string where nothing is visible.
    """
    entries = visible(outer, device_count)
    if not entries:
        return ""
    start = worker_index % len(entries)
    return ",".join(entries[start:] + entries[:start])


def count(environ: Mapping[str, str]) -> int:
    """How many GPUs a process in this environment sees, without initialising CUDA in this one."""
    return len(visible(_outer(environ), _device_count(environ)))


def environment_of_worker(environ: Mapping[str, str], worker_index: int) -> dict[str, str]:
    """The variables that put a worker's own GPU first; none where no GPU is visible.

    Both the CUDA and the HIP variable are set where HIP is in use, so that neither contradicts the other.
    """
    rotated = rotate(_outer(environ), _device_count(environ), worker_index)
    if not rotated:
        return {}
    return {CUDA: rotated, HIP: rotated} if _uses_hip(environ) else {CUDA: rotated}


def put_first(device: str, environ: MutableMapping[str, str] | None = None) -> None:
    """Make ``cuda:N`` the first visible GPU of this process and of those that it starts: ``cuda:0`` to all of them.

    Call it before anything initialises CUDA. Nothing happens for a device without a number, or with one that does not
    exist.
    """
    environ = os.environ if environ is None else environ
    match = re.fullmatch(r"cuda:(\d+)", device)
    if match is None or int(match[1]) == 0 or int(match[1]) >= count(environ):
        return
    environ.update(environment_of_worker(environ, int(match[1])))


def _uses_hip(environ: Mapping[str, str]) -> bool:
    return HIP in environ or ROCR in environ or _torch_is_built_for_hip()


@functools.cache
def _torch_is_built_for_hip() -> bool:
    """What torch/version.py says, without importing torch."""
    specification = importlib.util.find_spec("torch")
    if specification is None or not specification.submodule_search_locations:
        return False
    try:
        with open(os.path.join(specification.submodule_search_locations[0], "version.py")) as file:
            return re.search(r"^hip\b[^=]*=\s*['\"]", file.read(), re.MULTILINE) is not None
    except OSError:
        return False


def _outer(environ: Mapping[str, str]) -> str | None:
    if not _uses_hip(environ):
        return environ.get(CUDA)
    for name in (HIP, CUDA):
        if name in environ:
            return environ[name]
    return None


def _device_count(environ: Mapping[str, str]) -> int:
    devices = environ.get(ROCR)
    if devices is not None:
        # The lists of HIP count within this one.
        return len([part for part in devices.split(",") if part.strip() not in {"", "-1"}])
    return physical_count()


@functools.cache
def physical_count() -> int:
    """How many GPUs the machine has, whatever the variables say.

    NVML says it, or nvidia-smi, or torch in a process of its own: the first that can.
    """
    for ask in (_count_by_nvml, _count_by_nvidia_smi, _count_by_torch):
        found = ask()
        if found is not None:
            return found
    return 0


def _count_by_nvml() -> int | None:
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # not installed, no driver, or no NVIDIA device: each says it with an error class of its own
        return None
    try:
        return int(nvml.nvmlDeviceGetCount())
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def _count_by_nvidia_smi() -> int | None:
    if shutil.which("nvidia-smi") is None:
        return None
    output = _output_of(["nvidia-smi", "-L"], os.environ)
    return None if output is None else len(re.findall(r"^GPU \d+:", output, re.MULTILINE))


def _count_by_torch() -> int | None:
    environ = {name: value for name, value in os.environ.items() if name not in {CUDA, HIP}}
    output = _output_of([sys.executable, "-c", "import torch; print(torch.cuda.device_count())"], environ)
    return int(output) if output is not None and output.strip().isdecimal() else None


def _output_of(command: list[str], environ: Mapping[str, str]) -> str | None:
    try:
        done = subprocess.run(
            command, env=dict(environ), capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
