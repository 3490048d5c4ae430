"""A load on a device: a thread whose launches the tap ignores keeps a short queue filled.

The queue is short, so that synchronizing the device waits for a few milliseconds of load at most.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol

import torch

from harness.errors import InfrastructureError, first_line
from harness.perturb.load.load import Meter

BATCH_MS = 2.0
"""How long a batch runs; what a case's kernel waits for at most, where the load fills the chip."""
BACKLOG = 2
"""Batches queued on a stream at a time: one running, one behind it."""
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0
_TIMINGS = 5


class Done(Protocol):
    """What tells that a batch is complete."""

    def synchronize(self) -> None: ...


class Work:
    """What a load does: pieces, by turns on each of its streams."""

    unit: ClassVar[str]
    """Of what it achieves a second: ``FLOP/s``, ``B/s``, ..."""
    uses_tested_allocator: ClassVar[bool] = False
    """Whether its memory is to come from the pool that the cases use."""

    def __init__(self, device: torch.device, memory_bytes: float, stream_count: int = 2) -> None:
        """Allocate what it needs.

        Args:
            device: where to run.
            memory_bytes: how much memory of the device it may use.
            stream_count: how many streams it runs on.

        Raises:
            RuntimeError: the device has not so much memory left, for example.
        """
        # Two, so that the end of one batch and the beginning of the next run side by side.
        self.device = device
        self.streams = [torch.cuda.Stream(device) for _ in range(stream_count)]
        self.backlog = BACKLOG * stream_count
        self.amount = 1.0
        """What one piece achieves: floating-point operations, bytes, ..."""
        self._turn = 0

    def enqueue_piece(self, turn: int) -> None:
        """Enqueue a piece on the current stream, which is that of this turn."""
        raise NotImplementedError

    def enqueue(self, pieces: int) -> Done:
        """Enqueue a batch of so many pieces; returns an event behind it."""
        self._turn = (self._turn + 1) % len(self.streams)
        with torch.cuda.stream(self.streams[self._turn]):
            for _ in range(pieces):
                self.enqueue_piece(self._turn)
            return record_event(self.streams[self._turn])

    def time_ms(self, pieces: int) -> float:
        """How long a batch of so many pieces takes, the host's part included; the least of several."""
        for _ in self.streams:
            self.enqueue(pieces).synchronize()
        times = []
        for _ in range(_TIMINGS):
            started = time.perf_counter()
            self.enqueue(pieces).synchronize()
            times.append(time.perf_counter() - started)
        return 1e3 * min(times)


def record_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """An event behind what is on the stream, for which a thread waits asleep: the core and the GIL are the case's."""
    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    return event


def largest_that_fits(memory_bytes: float, item_bytes: int, most: int) -> int:
    """The largest power of two of items, up to ``most``, that so much memory has room for; at least one."""
    count = most
    while count > 1 and count * item_bytes > memory_bytes:
        count //= 2
    return count


class DeviceLoad:
    """One dimension of load on a device (:class:`harness.perturb.load.load.Load`)."""

    least_share = 0.5

    def __init__(
        self,
        dimension: str,
        make: type[Work],
        device: torch.device,
        *,
        intensity: float = 1.0,
        memory_bytes: float = 2.0**30,
        native: Any = None,
    ) -> None:
        """Prepare nothing yet.

        Args:
            dimension: its name.
            make: what it does.
            device: where to run.
            intensity: the share of the time in which it is busy.
            memory_bytes: how much memory of the device it may use.
            native: the native instrument (``harness.observe.tap``), told to ignore the load's thread; None without one.
        """
        self.dimension = dimension
        self.unit = make.unit
        self.stream_ids: list[int] = []
        self._meter = Meter()
        self._make = make
        self._device = device
        self._intensity = intensity
        self._memory_bytes = memory_bytes
        self._native = native
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._started = threading.Event()
        self._wanted = threading.Event()
        self._resting = threading.Event()
        self._busy = threading.Event()
        self._error: BaseException | None = None

    def start(self) -> None:
        """See :class:`Load`."""
        if self._thread is not None:
            return
        for event in (self._stopping, self._started, self._wanted, self._resting, self._busy):
            event.clear()
        self._error = None
        # A daemon: an interpreter that exits without stop() must not wait for it.
        self._thread = threading.Thread(target=self._run, name=f"sidestream-load-{self.dimension}", daemon=True)
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S):
            self._stopping.set()
            self._thread = None
            raise InfrastructureError(f"The load {self.dimension} did not start within {START_TIMEOUT_S:g} s.")
        try:
            self._raise_error("cannot run")
        except InfrastructureError:
            self._thread.join()
            self._thread = None
            raise

    def stop(self) -> None:
        """See :class:`Load`."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stopping.set()
        self._wanted.set()
        thread.join(STOP_TIMEOUT_S)
        if thread.is_alive():
            raise InfrastructureError(
                f"The load {self.dimension} did not stop within {STOP_TIMEOUT_S:g} s: the device hangs."
            )
        self._raise_error("broke off")

    def pause(self) -> None:
        """See :class:`Load`."""
        self._wanted.clear()
        self._resting.wait(STOP_TIMEOUT_S)

    def resume(self) -> None:
        """See :class:`Load`."""
        self._busy.clear()
        self._wanted.set()
        self._busy.wait(STOP_TIMEOUT_S)

    def forget(self) -> None:
        """See :class:`Load`."""
        self._meter.forget()

    def amount(self) -> float:
        """See :class:`Load`."""
        return self._meter.amount()

    def rate(self) -> float | None:
        """See :class:`Load`."""
        return self._meter.rate()

    def _raise_error(self, what: str) -> None:
        if self._error is not None:
            raise InfrastructureError(f"The load {self.dimension} {what}: {first_line(self._error)}") from self._error

    def _run(self) -> None:
        if self._native is not None:
            self._native.ignore_this_thread(True)
        try:
            with torch.cuda.device(self._device), torch.no_grad(), _memory_of(self._make):
                work = self._make(self._device, self._memory_bytes)
                self.stream_ids = [int(stream.stream_id) for stream in work.streams]
                torch.cuda.current_stream().synchronize()  # where its memory was filled
                pieces = max(1, round(BATCH_MS / max(work.time_ms(1), 1e-3)))
                self._started.set()
                self._keep_busy(work, pieces)
        except BaseException as error:  # handed to the thread that starts or stops the load
            self._error = error
        finally:
            self._meter.stop()
            for event in (self._started, self._resting, self._busy):
                event.set()

    def _keep_busy(self, work: Work, pieces: int) -> None:
        amount = work.amount * pieces
        queued: deque[Done] = deque()

        def complete(most: int) -> None:
            while len(queued) > most:
                queued.popleft().synchronize()
                self._meter.add(amount)

        while True:
            if self._stopping.is_set() or not self._wanted.is_set():
                complete(0)
                self._meter.stop()
                if self._stopping.is_set():
                    return
                self._resting.set()
                self._wanted.wait()
                # Here, before it is busy: its first rest may begin only after whoever started it has resumed it.
                self._resting.clear()
                self._meter.start()
                continue
            began = time.perf_counter()
            queued.append(work.enqueue(pieces))
            self._busy.set()
            if self._intensity == 1.0:
                complete(work.backlog)
            else:
                complete(0)
                self._stopping.wait((time.perf_counter() - began) * (1 / self._intensity - 1))


_POOLS: list[Any] = []
"""Every pool of this process, kept: where one was destroyed while another thread allocated from its own (two loads that
stop), the process ended, on torch 2.11."""


@contextlib.contextmanager
def _memory_of(work: type[Work]) -> Iterator[None]:
    """What the work allocates comes from a pool of its own, unless it is there to disturb the cases'."""
    if work.uses_tested_allocator:
        yield
        return
    pool = torch.cuda.MemPool()
    _POOLS.append(pool)
    with torch.cuda.use_mem_pool(pool):
        yield
