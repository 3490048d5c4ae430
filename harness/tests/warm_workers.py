"""Forks the workers of pytest-xdist from a process that has imported torch, as ``warm_python`` forks pytest itself.

A helper process is forked before pytest starts, from the state that a fresh process would have, and forks a worker
whenever execnet would start Python. It ends with the process that it serves, and the workers with it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
from typing import Any

from harness.processes import die_with_parent


def prepare() -> None:
    """Fork the helper process, and let execnet take its workers from there."""
    from execnet import gateway_base, gateway_io

    ours, theirs = socket.socketpair()
    parent = os.getpid()
    if os.fork() == 0:
        ours.close()
        _serve(theirs, parent)
    theirs.close()

    def start(self: Any, args: object, execmodel: Any) -> None:
        self.popen = _Worker(ours)
        gateway_base.Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel=execmodel)

    gateway_io.Popen2IOMaster.__init__ = start  # type: ignore[method-assign]


class _Worker:
    """What execnet wants to know of a ``subprocess.Popen``."""

    def __init__(self, helper: socket.socket) -> None:
        stdin, to_stdin = os.pipe()
        from_stdout, stdout = os.pipe()
        socket.send_fds(helper, [b"w"], [stdin, stdout])
        os.close(stdin)
        os.close(stdout)
        self.pid = int.from_bytes(helper.recv(8), "little")
        self.stdin, self.stdout = os.fdopen(to_stdin, "wb"), os.fdopen(from_stdout, "rb")
        self._alive: int | None = None
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            self._alive = os.pidfd_open(self.pid)

    def wait(self) -> int:
        """Wait for its end; how it ended is known to the helper alone."""
        if self._alive is not None:
            select.select([self._alive], [], [])
            os.close(self._alive)
            self._alive = None
        return 0

    def kill(self) -> None:
        """Kill it, if it has not ended."""
        if self._alive is not None:
            signal.pidfd_send_signal(self._alive, signal.SIGKILL)


def _serve(requests: socket.socket, parent: int) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 1, 2)
        if not message:
            os._exit(0)
        worker = os.fork()
        if worker == 0:
            requests.close()
            _work(*descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        requests.send(worker.to_bytes(8, "little"))


def _work(stdin: int, stdout: int) -> None:
    """Be what ``python -c`` would be with execnet's first line."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for descriptor, standard in ((stdin, 0), (stdout, 1)):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    sys.stdin, sys.stdout = os.fdopen(0, "r", closefd=False), os.fdopen(1, "w", closefd=False)
    sys.argv = ["-c"]
    try:
        exec(eval(sys.stdin.readline()), {"__name__": "__main__"})
    finally:
        os._exit(0)
