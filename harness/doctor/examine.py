"""All checks, in the order in which they are told."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from harness.backends.select import is_rocm
from harness.doctor import resources, software
from harness.doctor.check import Check, broken
from harness.doctor.planted import planted_races
from harness.errors import first_line


def examine(root: Path) -> Iterator[Check]:
    """Examine this machine, each check as it is ready; the last ones take seconds.

    Args:
        root: the folder in which runs are to be started.
    """
    yield software.python()
    yield software.compiler()
    try:
        import torch
    except Exception as error:  # a library that does not load raises many things
        yield broken("torch", first_line(error), "Install torch (pytorch.org/get-started).")
        return
    # What imports torch itself.
    from harness.campaign.environment import nvidia_gpus
    from harness.doctor import gpu

    yield software.torch_build(torch)
    yield from gpu.gpus(torch)
    rows = nvidia_gpus()
    if rows:
        yield from gpu.nvidia(rows)
    has_gpu = torch.cuda.is_available()
    yield from software.settings(os.environ, ["sim", "cuda"] if has_gpu or rows else ["sim"])
    yield from software.tracers()
    yield from software.plugins()
    yield resources.machine()
    yield resources.cache()
    yield resources.results(root)
    yield resources.shared_memory()
    yield from resources.limits()
    yield planted_races("sim")
    if has_gpu:
        yield planted_races("cuda", "sleep")
        if not is_rocm():
            yield planted_races("cuda", "gate")
