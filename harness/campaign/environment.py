"""Where a run takes place, in enough detail to tell two machines, builds or settings apart."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import harness

_PREFIXES = ("CUDA_", "PYTORCH_", "TORCH_", "NVIDIA_", "HIP_", "HSA_", "ROCR_", "AMD_", "NCCL_", "SIDESTREAM_")
"""Of environment variables that can change what runs where."""
_NVIDIA_SMI = (
    "name,uuid,driver_version,compute_mode,persistence_mode,"
    "clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu"
)
_LIMIT_S = 10.0


def fingerprint(device: dict[str, str], rootpath: Path) -> dict[str, Any]:
    """What identifies the build and the machine; what cannot be found out is left out.

    Args:
        device: what the backend says of itself (``Backend.describe``).
        rootpath: where the tests are.
    """
    found: dict[str, Any] = {
        "sidestream": harness.__version__,
        "harness_revision": _revision(Path(harness.__file__).parent),
        "tests_revision": _revision(rootpath),
        "torch": torch.__version__,
        "torch_revision": torch.version.git_version,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "debug": bool(torch.version.debug),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.node(),
        "processors": os.cpu_count(),
        **device,
        "flags": _flags(),
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)},
    }
    gpus = nvidia_gpus() if torch.version.cuda and torch.cuda.is_initialized() else None
    if gpus:
        found["gpus"] = gpus
    return {key: value for key, value in found.items() if value is not None}


def _flags() -> dict[str, Any]:
    return {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "multithreaded_backward": torch.autograd.is_multithreading_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "optimized": sys.flags.optimize > 0,
    }


def _revision(folder: Path) -> str | None:
    """The commit that is checked out, with ``+`` where files of it were changed; None outside a repository."""
    revision = _output(["git", "-C", str(folder), "rev-parse", "HEAD"])
    if revision is None:
        return None
    changed = _output(["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no"])
    return revision + ("+" if changed else "")


def nvidia_gpus() -> list[dict[str, str]]:
    """What nvidia-smi says of each GPU of the machine, by its own names; empty where it does not answer."""
    text = _output(["nvidia-smi", f"--query-gpu={_NVIDIA_SMI}", "--format=csv,noheader"])
    names = _NVIDIA_SMI.split(",")
    return [dict(zip(names, map(str.strip, line.split(",")), strict=False)) for line in (text or "").splitlines()]


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
