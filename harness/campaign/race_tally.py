"""How often each case has raced, over all the processes of a run: ``--max-races`` is a number for all of them."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from harness.campaign.store import case_key

FOLDER = "tally"


class RaceTally:
    """A file for each case that has raced, a byte longer with each race: appending needs no lock, a kill spoils none.

    Where it cannot be written (a full disk), each process counts its own races.

    Args:
        directory: the directory of the run.
        most: after so many races a case is not repeated any more.
    """

    def __init__(self, directory: Path, most: int) -> None:
        self._folder = directory / FOLDER
        self._most = most
        self._own: Counter[str] = Counter()

    def add(self, nodeid: str) -> None:
        """Count a race of a case."""
        self._own[nodeid] += 1
        try:
            self._folder.mkdir(exist_ok=True)
            file = os.open(self._path(nodeid), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                os.write(file, b"r")
            finally:
                os.close(file)
        except OSError:
            return

    def is_full(self, nodeid: str) -> bool:
        """Whether a case has raced often enough."""
        try:
            kept = self._path(nodeid).stat().st_size
        except OSError:
            kept = 0
        return max(kept, self._own[nodeid]) >= self._most

    def _path(self, nodeid: str) -> Path:
        return self._folder / case_key(nodeid)
