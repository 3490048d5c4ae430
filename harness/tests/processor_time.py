"""How long something takes, whatever else the machine does."""

from __future__ import annotations

import time
from collections.abc import Callable


def seconds(run: Callable[[], object], repeat: int) -> float:
    """The shortest CPU time of several runs, so that a busy machine does not count."""
    best = float("inf")
    for _ in range(repeat):
        begin = time.thread_time()
        run()
        best = min(best, time.thread_time() - begin)
    return best
