"""The driver and the GPUs; on NVIDIA's machines also how they are set."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from harness.backends import visible_devices
from harness.campaign.environment import nvidia_gpus
from harness.doctor.check import Check, broken, warning
from harness.perturb.load import nvml

_MPS_CONTROL = "nvidia-cuda-mps-control"


def gpus(torch: ModuleType, environ: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """What GPUs there are, and whether this torch can use them."""
    name = "GPUs"
    there, visible = visible_devices.physical_count(), visible_devices.count(environ)
    usable, reason = _usable(torch)
    if usable:
        names = _names(torch)
        yield Check(name, f"{names}, {visible} of {there} visible")
    elif there == 0:
        yield Check(name, "none, so the simulated accelerator alone is tested")
    elif visible == 0:
        yield warning(name, f"none of {there} visible", "Unset CUDA_VISIBLE_DEVICES, or name some in it.")
    elif not torch.version.cuda and not torch.version.hip:
        yield warning(
            name,
            f"{there}, which this torch is not built for: the simulated accelerator alone is tested",
            "Install a torch that is built for them (pytorch.org/get-started).",
        )
    else:
        yield broken(
            name, f"{there}, and torch finds none: {reason}", "Check nvidia-smi, and that the driver is new enough."
        )


def _usable(torch: ModuleType) -> tuple[bool, str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    return usable, str(caught[-1].message).partition("\n")[0] if caught else "it gives no reason"


def _names(torch: ModuleType) -> str:
    # Not torch.cuda.get_device_name, which creates a context; there may be room for one process' only.
    names = [gpu["name"] for gpu in nvidia_gpus()]
    if not names or torch.version.hip:
        return f"{torch.cuda.device_count()} x {'ROCm' if torch.version.hip else 'CUDA'}"
    return " + ".join(f"{names.count(each)} x {each}" for each in dict.fromkeys(names))


def nvidia(rows: Sequence[Mapping[str, str]], environ: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """How NVIDIA's GPUs are set.

    Args:
        rows: what nvidia-smi says of them.
        environ: the environment, which may name the pipes of MPS.
    """
    yield Check("driver", ", ".join(dict.fromkeys(row["driver_version"] for row in rows)))
    yield _compute_mode(rows)
    yield mps(environ)
    if any(row.get("persistence_mode") == "Disabled" for row in rows):
        yield warning(
            "persistence",
            "off: the driver starts anew whenever no process uses a GPU, which takes seconds, and forgets clocks",
            "nvidia-smi -pm 1.",
        )
    else:
        yield Check("persistence", "on")
    yield Check("clocks", "; ".join(dict.fromkeys(map(_clocks, rows))))


def _compute_mode(rows: Sequence[Mapping[str, str]]) -> Check:
    name, modes = "compute mode", {row["compute_mode"] for row in rows}
    if "Prohibited" in modes:
        return broken(name, "Prohibited: no process can use the GPU", "nvidia-smi -c DEFAULT.")
    if "Exclusive_Process" in modes:
        return warning(
            name,
            "Exclusive_Process: one process a GPU, so workers fail (-n), since their controller looks at the GPU too",
            "nvidia-smi -c DEFAULT, or run without -n.",
        )
    return Check(name, ", ".join(sorted(modes)))


def mps(environ: Mapping[str, str], proc: Path = Path("/proc")) -> Check:
    """Whether the processes of this machine share a GPU by MPS.

    What it does to a run: docs.nvidia.com/deploy/mps, "Error Containment".
    """
    pipes = Path(environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    # The file stays behind when the daemon is killed; a container sees the file and not the daemon.
    runs = any(_is_mps(path) for path in proc.glob("[0-9]*/cmdline"))
    if not runs and not (pipes / "control").exists():
        return Check("MPS", "not running")
    return warning(
        "MPS",
        "running: a device error in one worker ends all on its GPU, and new ones are refused until all have gone",
        "Stop it for the suite (echo quit | nvidia-cuda-mps-control).",
    )


def _is_mps(cmdline: Path) -> bool:
    try:
        return Path(cmdline.read_bytes().split(b"\0")[0].decode(errors="replace")).name == _MPS_CONTROL
    except OSError:
        return False


def _clocks(row: Mapping[str, str]) -> str:
    most = f" (at most {row['clocks.max.sm']})"
    return (nvml.describe_gpu(lambda: row["uuid"]) or row["clocks.sm"]) + most
