"""The load ``compute``: keeps the multiprocessors busy with matrix multiplications while repetitions run.

It runs in the process under test, since kernels of two processes do not overlap on one GPU without MPS, on streams of
its own, from a thread of its own whose launches the tap ignores. The queue is short, so that synchronizing the device
waits for a few milliseconds of load at most, and the load is proved: what it achieves beside the cases is reported
with what it achieves alone (utilisation, as NVML counts it, proves nothing, since a sleeping kernel counts as busy).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from types import TracebackType
from typing import Any

import torch

from harness.errors import InfrastructureError, UsageError
from harness.perturb.load import require_real_device

BATCH_MS = 2.0
"""How long a batch of multiplications runs; what a case's kernel waits for at most, where the load fills the chip."""
BACKLOG = 2
"""Batches queued at a time: one running, one behind it."""
ALONE_S = 0.5
"""How long the load is measured alone before it counts as started."""
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0
_SIZES = (4096, 2048, 1024, 512)
"""The first that fits. Larger ones hold every kernel of a case back for their whole length, since a kernel is handed
out only after all blocks of the one before; these fill the chip as well, in many short kernels."""
_TIMINGS = 5


class ComputeLoad:
    """Matrix multiplications on a device, from ``start`` until ``stop``; a context manager as well."""

    def __init__(self, device: torch.device, native: Any = None) -> None:
        """Prepare nothing yet.

        Args:
            device: where to run.
            native: the native instrument (``harness.observe.tap``), told to ignore the load's thread; None without one.

        Raises:
            UsageError: the device is no real one.
        """
        require_real_device(device.type)
        if device.type != "cuda":
            raise UsageError(f"--load compute runs on CUDA and ROCm devices, not on {device.type}.")
        self.device = device
        self._native = native
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._started = threading.Event()
        self._wanted = threading.Event()
        self._wanted.set()
        self._resting = threading.Event()
        self._busy = threading.Event()
        self._error: BaseException | None = None
        self._alone_flops = 0.0
        self._lock = threading.Lock()
        self._completed_flop = 0.0
        self._counting_since = 0.0
        self._counted_until = 0.0
        self.stream_ids: list[int] = []
        """The ids of its streams, so that no case is given one of them (``torch.Stream.stream_id``)."""

    def start(self) -> None:
        """Measure the load alone, then keep it running; returns once it runs.

        Raises:
            InfrastructureError: it cannot run, for want of memory for example.
        """
        if self._thread is not None:
            return
        self._stopping.clear()
        self._started.clear()
        self._error = None
        # A daemon: an interpreter that exits without stop() must not wait for it.
        self._thread = threading.Thread(target=self._run, name="sidestream-load-compute", daemon=True)
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S):
            self._stopping.set()
            self._thread = None
            raise InfrastructureError(f"The compute load did not start within {START_TIMEOUT_S:g} s.")
        try:
            self._raise_error("cannot run")
        except InfrastructureError:
            self._thread.join()
            self._thread = None
            raise

    def stop(self) -> None:
        """Stop; its queue is empty when this returns.

        Raises:
            InfrastructureError: the load failed meanwhile, or does not end.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stopping.set()
        self._wanted.set()
        thread.join(STOP_TIMEOUT_S)
        if thread.is_alive():
            raise InfrastructureError(f"The compute load did not stop within {STOP_TIMEOUT_S:g} s: the device hangs.")
        self._raise_error("broke off")

    def pause(self) -> None:
        """Enqueue nothing more until :meth:`resume`, and wait for what is queued; time spent so is not counted."""
        self._wanted.clear()
        self._resting.wait(STOP_TIMEOUT_S)

    def resume(self) -> None:
        """Go on after :meth:`pause`; returns once the first batch is queued."""
        self._resting.clear()
        self._busy.clear()
        self._wanted.set()
        self._busy.wait(STOP_TIMEOUT_S)

    def report(self) -> dict[str, float]:
        """What it achieved since it started, in floating-point operations a second, and what it achieves alone.

        Returns:
            ``achieved_flops`` and ``alone_flops``.
        """
        with self._lock:
            end = self._counted_until if self._thread is None else time.perf_counter()
            seconds = end - self._counting_since
            achieved = self._completed_flop / seconds if self._counting_since and seconds > 0 else 0.0
        return {"achieved_flops": achieved, "alone_flops": self._alone_flops}

    def _raise_error(self, what: str) -> None:
        if self._error is not None:
            reason = str(self._error).partition("\n")[0]
            raise InfrastructureError(f"The compute load {what}: {reason}") from self._error

    def __enter__(self) -> ComputeLoad:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        if self._native is not None:
            self._native.ignore_this_thread(True)
        try:
            with torch.cuda.device(self.device), torch.no_grad():
                work = _Multiplications(self.device)
                self.stream_ids = [int(stream.stream_id) for stream in work.streams]
                self._alone_flops = self._keep_busy(work, ALONE_S)
                with self._lock:
                    self._completed_flop = 0.0
                    self._counting_since = time.perf_counter()
                self._started.set()
                self._keep_busy(work, None)
        except BaseException as error:  # handed to the thread that starts or stops the load
            self._error = error
        finally:
            self._started.set()

    def _keep_busy(self, work: _Multiplications, seconds: float | None) -> float:
        """Keeps the queue filled for that long, or until ``stop``; returns the floating-point operations a second."""
        started = time.perf_counter()
        completed = 0.0
        queued: deque[torch.cuda.Event] = deque()
        while not self._stopping.is_set() and (seconds is None or time.perf_counter() - started < seconds):
            if not self._wanted.is_set():
                self._rest(work, queued)
                continue
            queued.append(work.enqueue_batch())
            self._busy.set()
            if len(queued) > BACKLOG * len(work.streams):
                queued.popleft().synchronize()
                completed += work.batch_flop
                with self._lock:
                    self._completed_flop += work.batch_flop
        for event in queued:
            event.synchronize()
            completed += work.batch_flop
            with self._lock:
                self._completed_flop += work.batch_flop
        elapsed = time.perf_counter() - started
        with self._lock:
            self._counted_until = time.perf_counter()
        return completed / elapsed

    def _rest(self, work: _Multiplications, queued: deque[torch.cuda.Event]) -> None:
        while queued:
            queued.popleft().synchronize()
            with self._lock:
                self._completed_flop += work.batch_flop
        rested_from = time.perf_counter()
        self._resting.set()
        self._wanted.wait()
        with self._lock:
            # As if the rest had not been: achieved operations are counted against the time in which they were wanted.
            self._counting_since += time.perf_counter() - rested_from


class _Multiplications:
    """Square matrices, large enough to fill the chip, multiplied on two streams by turns."""

    def __init__(self, device: torch.device) -> None:
        # Two, so that the last blocks of one batch and the first of the next run side by side.
        self.streams = [torch.cuda.Stream(device), torch.cuda.Stream(device)]
        self._turn = 0
        dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
        # A generator of its own: the case's random numbers must not depend on the load.
        generator = torch.Generator(device).manual_seed(0)
        for size in _SIZES:
            with contextlib.suppress(torch.cuda.OutOfMemoryError):
                self._left, self._right = (
                    torch.rand((size, size), device=device, generator=generator).to(dtype) for _ in range(2)
                )
                self._results = [torch.empty_like(self._left) for _ in self.streams]
                torch.cuda.current_stream().synchronize()
                self._multiplications = 1
                self.batch_flop = 2.0 * size**3
                batch_ms = self._time_batch_ms()
                if batch_ms <= BATCH_MS or size == _SIZES[-1]:
                    self._multiplications = max(1, round(BATCH_MS / batch_ms))
                    self.batch_flop *= self._multiplications
                    return
        raise InfrastructureError("The compute load does not fit into the memory that is left on the device.")

    def enqueue_batch(self) -> torch.cuda.Event:
        """Enqueues a batch on the stream whose turn it is; returns an event behind it."""
        self._turn = (self._turn + 1) % len(self.streams)
        stream = self.streams[self._turn]
        # Blocking: the thread sleeps while it waits, and leaves the core and the GIL to the case.
        done = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(stream):
            for _ in range(self._multiplications):
                torch.mm(self._left, self._right, out=self._results[self._turn])
            done.record(stream)
        return done

    def _time_batch_ms(self) -> float:
        for stream in self.streams:
            self.enqueue_batch()
            stream.synchronize()
        times = []
        for _ in range(_TIMINGS):
            stream = self.streams[(self._turn + 1) % len(self.streams)]
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            self.enqueue_batch()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end))
        return float(min(times))
