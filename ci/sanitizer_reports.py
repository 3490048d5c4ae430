"""Prints the sanitizers' reports that have a frame in our code: ``python ci/sanitizer_reports.py FOLDER``.

The folder holds what the sanitizers wrote. Python and PyTorch are not built with them, so they misunderstand much of
what happens there: a report counts only if a frame of it lies in one of the libraries that the harness builds.

Exit status: 0 if there is none, 10 if there are some: not 1, which is Python's for a program that failed.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections import Counter
from pathlib import Path

FOUND = 10
START = re.compile(
    r"^(?:WARNING: ThreadSanitizer: |==\d+==ERROR: AddressSanitizer: |.*: runtime error: )", re.MULTILINE
)
# Where a mutex was first locked and a thread was started, which says nothing about who is to blame.
CIRCUMSTANCES = re.compile(r"^  (?:Mutex|Thread) .*?(?:\n\n|\Z)", re.MULTILINE | re.DOTALL)
OURS = re.compile(r"^ +#\d+ .*/sidestream_\w+\.so\b", re.MULTILINE)


def split(text: str) -> list[str]:
    """The single reports in what a process wrote."""
    edges = [*(found.start() for found in START.finditer(text)), len(text)]
    return [text[start:stop].rstrip() for start, stop in itertools.pairwise(edges)]


def main(folder: Path) -> int:
    """Prints each report that counts once, and how many there are of either kind."""
    reports = [report for file in sorted(folder.iterdir()) for report in split(file.read_text(errors="replace"))]
    ours = Counter(report for report in reports if OURS.search(CIRCUMSTANCES.sub("", report)))
    for report in ours:
        print(report, end="\n\n")
    print(f"Sanitizers: {ours.total()} reports in our code, {len(reports) - ours.total()} in other code alone")
    return FOUND if ours else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
