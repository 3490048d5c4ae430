"""Files that are written whole or not at all, and asked about before what is to fill them is run."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file, so that what was there before stays until all of it has been written.

    A link stays one; what is no regular file, a pipe or a terminal, is written to as it is.

    Raises:
        OSError: it cannot be written, and is as it was.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def require_writable(path: Path) -> None:
    """Find out whether a file could be written, and leave everything as it is.

    Raises:
        OSError: it could not.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        return  # opening a pipe would wait for its reader
    existed = path.exists()
    with path.open("ab"):
        pass
    if not existed:
        path.unlink()
