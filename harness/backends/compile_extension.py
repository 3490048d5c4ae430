"""Compiles one native extension in a process of its own: ``python -m harness.backends.compile_extension``.

A child process keeps the compiler's output, torch's build machinery and its lock file out of the process that tests
run in, and can be killed whole. Used by :mod:`harness.backends.extension` alone.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

GRACE_S = 5.0
"""Time for ninja to end the compilers before everything is killed."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Compiles and imports the extension once, so that an unresolved symbol shows here and not in a test."""
    parser = argparse.ArgumentParser(prog="python -m harness.backends.compile_extension", description=__doc__)
    parser.add_argument("--name", required=True, help="name of the extension module")
    parser.add_argument(
        "--folder", required=True, type=Path, help="existing folder that receives the objects and the module"
    )
    parser.add_argument(
        "--flag",
        action="append",
        default=[],
        help="a compiler flag, as --flag=-O2; one that starts with -fsanitize is the linker's as well",
    )
    parser.add_argument("--include", action="append", default=[], help="a folder of headers, as --include=FOLDER")
    parser.add_argument("sources", nargs="+", type=Path, help="C++ files")
    options = parser.parse_args(arguments)
    # Ninja runs the compilers in process groups of their own, so only ninja can end them. It does so on SIGTERM, and
    # subprocess gives it the time on KeyboardInterrupt.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    threading.Thread(target=_die_with_standard_input, daemon=True).start()

    sanitized = [flag for flag in options.flag if flag.startswith("-fsanitize")]
    if sanitized:
        # The sanitizer's runtime is preloaded into this process, for the import at the end, and not for the compilers.
        os.environ.pop("LD_PRELOAD", None)

    from torch.utils import cpp_extension

    cpp_extension.load(
        name=options.name,
        sources=[str(source) for source in options.sources],
        extra_cflags=options.flag,
        extra_ldflags=sanitized,
        extra_include_paths=options.include,
        build_directory=str(options.folder),
        with_cuda=False,
        verbose=True,
    )


def _die_with_standard_input() -> None:
    # The other end of standard input is held by the process that asked for the build, and by nothing else: when that
    # ends in whatever way, also by SIGKILL, this reads the end of the file.
    while os.read(0, 4096):
        pass
    if os.getpgrp() != os.getpid():  # started by hand, not by harness.backends.extension
        os._exit(1)
    os.killpg(0, signal.SIGTERM)
    time.sleep(GRACE_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
