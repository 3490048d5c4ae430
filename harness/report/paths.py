"""How paths are shown."""

from __future__ import annotations

import os
from pathlib import Path


def shown(path: Path) -> str:
    """A path as a user here would write it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
