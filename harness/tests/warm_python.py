"""Runs pytest in a process of its own, without the second or two that importing torch takes each time.

The standard library's fork server imports the packages once and forks a process for each run: the same code, in a
process that nothing else has run in, with its own working directory, environment and output. Only what the operating
system knows of it (its command line, its environment as ``/proc`` shows it) is that of the server; a test that looks
for either starts a process itself.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.tests import warm_workers

_PRELOADED = [
    "torch",
    "torch.utils.cpp_extension",
    "sympy",
    "scipy.stats",
    "rich.console",
    "pytest",
    "execnet.gateway_io",
]
"""No plugin of pytest's, whose assertions could not be rewritten any more."""
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(_PRELOADED)


def run_pytest(
    arguments: Sequence[str], *, folder: Path, environment: Mapping[str, str], output: Path, timeout_s: float
) -> int:
    """Run ``python -m pytest`` with these arguments.

    Args:
        arguments: what follows ``python -m pytest``.
        folder: its working directory.
        environment: all of its environment.
        output: the file that gets its standard output and standard error.
        timeout_s: after so many seconds it is killed.

    Returns:
        Its exit status, negative for the signal that ended it.

    Raises:
        TimeoutError: it had not ended in time.
    """
    process = _server.Process(target=_pytest, args=(list(arguments), str(folder), dict(environment), str(output)))
    process.start()
    process.join(timeout_s)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise TimeoutError(f"pytest {' '.join(arguments)} had not ended after {timeout_s:g} s:\n{output.read_text()}")
    return process.exitcode


def _pytest(arguments: list[str], folder: str, environment: dict[str, str], output: str) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = [folder, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *_installed_paths()]
    sys.argv = ["pytest", *arguments]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "-n" in arguments:
        warm_workers.prepare()
    try:
        runpy.run_module("pytest", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    # Processes of multiprocessing end without any of this.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _installed_paths() -> list[str]:
    return [path for path in sys.path if path.endswith((".zip", "lib-dynload", "-packages")) or "/lib/python" in path]
