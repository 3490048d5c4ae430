"""A process that keeps a core of the CPU busy: ``python -m harness.perturb.load.spin INTENSITY PARENT``.

Started by :mod:`harness.perturb.load.host` alone. It ends with its parent, whatever that dies of.
"""

from __future__ import annotations

import signal
import sys
import time

from harness.processes import die_with_parent

_SLICE_S = 0.01


def main(intensity: float, parent: int) -> None:
    """Be busy for that share of each slice of time, until the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    die_with_parent(parent)
    print("busy", flush=True)
    while True:
        busy_until = time.perf_counter() + intensity * _SLICE_S
        while time.perf_counter() < busy_until:
            pass
        if intensity < 1:
            time.sleep((1 - intensity) * _SLICE_S)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
