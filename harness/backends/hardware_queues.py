"""CUDA runs streams on a number of hardware queues, and streams that share one wait for each other.

With the default of 8, a hold on one stream could hold another stream as well: the launch that should overtake it would
not, and a race would stay hidden. The variable is read when CUDA is initialised (CUDA Programming Guide,
``CUDA_DEVICE_MAX_CONNECTIONS``).
"""

from __future__ import annotations

from collections.abc import MutableMapping

_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
_MOST = "32"


def use_all(environ: MutableMapping[str, str]) -> None:
    """Ask for as many queues as there can be, unless the user has decided on a number."""
    environ.setdefault(_VARIABLE, _MOST)
