"""The load ``host``: busy processes on the CPU, and a thread in the process under test that keeps taking the GIL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from harness.errors import InfrastructureError
from harness.perturb.load import spin
from harness.perturb.load.load import Meter

_ROOT = Path(__file__).resolve().parents[3]
_GIL_BURST_S = 1e-3
"""How long the thread keeps the GIL at a time, and stays away from it. Python takes it away only after 5 ms
(``sys.getswitchinterval``), so whoever wants it meanwhile waits until the burst ends."""
_WORKER_COUNT_VARIABLE = "PYTEST_XDIST_WORKER_COUNT"


def process_count() -> int:
    """How many processes one worker starts, so that all workers together start about one a core."""
    workers = int(os.environ.get(_WORKER_COUNT_VARIABLE, "1"))
    return max(1, round(len(os.sched_getaffinity(0)) / max(1, workers)))


class HostLoad:
    """CPU contention and GIL pressure (:class:`harness.perturb.load.load.Load`), on any device.

    Its rate is CPU time a second, so cores: what the operating system gave it, besides the cases.
    """

    dimension = "host"
    unit = "cores"
    # It shares the cores with the cases, and with the load of other workers, without which it was measured.
    least_share = 0.25

    def __init__(self, intensity: float = 1.0) -> None:
        """Start nothing yet; ``intensity`` is the share of the time in which it is busy."""
        self.stream_ids: list[int] = []
        self._intensity = intensity
        self._meter = Meter()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._thread: threading.Thread | None = None
        self._thread_s = 0.0
        self._read_s = 0.0
        self._stopping = threading.Event()
        self._wanted = threading.Event()

    def start(self) -> None:
        """See :class:`Load`."""
        if self._processes:
            return
        search_path = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search_path)}
        command = [sys.executable, "-m", spin.__name__, str(self._intensity), str(os.getpid())]
        try:
            for _ in range(process_count()):
                self._processes.append(
                    subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
                )
        except OSError as error:
            self.stop()
            raise InfrastructureError(f"The load host cannot start its processes: {error.strerror}.") from error
        self._stopping.clear()
        self._wanted.clear()
        self._thread = threading.Thread(target=self._keep_taking_the_gil, name="sidestream-load-host", daemon=True)
        self._thread.start()
        for process in self._processes:
            assert process.stdout is not None
            if not process.stdout.readline():
                self.stop()
                raise InfrastructureError("The load host cannot run: one of its processes ended at once.")
        self.pause()
        self._read_s = self._cpu_s()

    def resume(self) -> None:
        """See :class:`Load`."""
        self._signal(signal.SIGCONT)
        self._meter.start()
        self._wanted.set()

    def pause(self) -> None:
        """See :class:`Load`."""
        self._wanted.clear()
        self._signal(signal.SIGSTOP)  # the end of the parent kills them all the same
        self._meter.stop()

    def stop(self) -> None:
        """See :class:`Load`."""
        self._count()
        self._meter.stop()
        self._stopping.set()
        self._wanted.set()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._processes.clear()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def forget(self) -> None:
        """See :class:`Load`."""
        self._count()
        self._meter.forget()

    def amount(self) -> float:
        """See :class:`Load`."""
        self._count()
        return self._meter.amount()

    def rate(self) -> float | None:
        """See :class:`Load`."""
        self._count()
        return self._meter.rate()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(number)

    def _count(self) -> None:
        if self._processes:
            cpu_s = self._cpu_s()
            self._meter.add(max(0.0, cpu_s - self._read_s))
            self._read_s = cpu_s

    def _cpu_s(self) -> float:
        return self._thread_s + sum(_cpu_s(process.pid) for process in self._processes)

    def _keep_taking_the_gil(self) -> None:
        while True:
            self._wanted.wait()
            if self._stopping.is_set():
                return
            until = time.perf_counter() + self._intensity * _GIL_BURST_S
            while time.perf_counter() < until:
                pass
            self._thread_s = time.thread_time()
            time.sleep(_GIL_BURST_S)


def _cpu_s(process_id: int) -> float:
    """CPU time that a process has used."""
    try:
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0  # somebody has ended it
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
