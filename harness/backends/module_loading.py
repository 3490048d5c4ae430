"""CUDA loads a kernel when it is first launched, and that can wait for work of the device.

So it can wait for a launch that is held, and where that waits for the host (a gate) it would wait for good. The
variable is read when CUDA is initialised (CUDA Programming Guide, "Lazy Loading").
"""

from __future__ import annotations

from collections.abc import MutableMapping

_VARIABLE = "CUDA_MODULE_LOADING"


def load_at_start(environ: MutableMapping[str, str]) -> None:
    """Have every kernel loaded when CUDA is initialised, unless the user has decided."""
    environ.setdefault(_VARIABLE, "EAGER")
