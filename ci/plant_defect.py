"""Runs one of the defects in ``planted_defects.cpp``: ``python ci/plant_defect.py DEFECT``, for ci/sanitize.sh."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.backends import extension

NAME = "sidestream_planted"


def main(defect: str) -> None:
    """Runs the defect, in an extension built like any other."""
    source = Path(__file__).with_name("planted_defects.cpp")
    native = extension.load(NAME, [source], print, title="planted defects")
    getattr(native, defect.replace("-", "_"))()


if __name__ == "__main__":
    main(sys.argv[1])
