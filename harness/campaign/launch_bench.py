"""What the simulator costs by itself: a launch, a training step against the same on the CPU, memory over many launches.

Times are the process's or the thread's own CPU time, so that other processes on the machine do not count, and of
several batches: the least is what the code needs, the median what it usually takes.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

from harness.backends import simulator

LAUNCHES_A_BATCH = 1000
LAUNCHES_A_REPETITION = 1000
STEPS_A_BATCH = 20
BATCHES = 20
BATCH_SIZE = 32
WIDTH = 64


def measure(launches: int, announce: Callable[[str], None] | None = None) -> dict[str, dict[str, float]]:
    """The costs of the simulator, which becomes this process's accelerator.

    Args:
        launches: over how many the memory is watched.
        announce: receives progress sentences of a build.

    Returns:
        ``launch``: of ``mul`` of two tensors of 4 elements, in microseconds. ``training_step``: a 2-layer perceptron
        whose forward runs on one stream and loss, backward and optimizer on another, in microseconds, and how many
        times that of the same on the CPU. ``memory``: resident memory in MiB before and after that many launches in
        repetitions of :data:`LAUNCHES_A_REPETITION`.

    Raises:
        UsageError: the simulator cannot be had.
    """
    native = simulator.register(announce)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {
            "launch": _launch(),
            "training_step": _training_step(),
            "memory": _memory(native, launches),
        }
    finally:
        torch.set_num_threads(threads)


def _launch() -> dict[str, float]:
    left, right = torch.ones(4, device="sim"), torch.ones(4, device="sim")
    microseconds = _batches(lambda: torch.mul(left, right), LAUNCHES_A_BATCH, time.thread_time)
    return {
        "launches": BATCHES * LAUNCHES_A_BATCH,
        "median_us": round(statistics.median(microseconds), 2),
        "minimum_us": round(min(microseconds), 2),
    }


def _training_step() -> dict[str, float]:
    simulated, expected = (min(_batches(_step(device), STEPS_A_BATCH, time.process_time)) for device in ("sim", "cpu"))
    return {
        "steps": BATCHES * STEPS_A_BATCH,
        "minimum_us": round(simulated, 1),
        "cpu_minimum_us": round(expected, 1),
        "ratio": round(simulated / expected, 2),
    }


def _step(device: str) -> Callable[[], None]:
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1)).to(device)
    inputs = torch.randn(BATCH_SIZE, WIDTH, generator=generator).to(device)
    targets = torch.randn(BATCH_SIZE, 1, generator=generator).to(device)
    loss_function = torch.nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def finish(outputs: torch.Tensor) -> None:
        loss_function(outputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    if device == "cpu":
        return lambda: finish(model(inputs))
    forward, rest = torch.Stream(device=device), torch.Stream(device=device)

    def step() -> None:
        forward.wait_stream(rest)
        with forward:
            outputs = model(inputs)
        rest.wait_stream(forward)
        with rest:
            finish(outputs)

    return step


def _batches(call: Callable[[], object], calls: int, clock: Callable[[], float]) -> list[float]:
    """Microseconds a call in each batch, after a batch that warms up."""
    microseconds = []
    for _ in range(BATCHES + 1):
        start = clock()
        for _ in range(calls):
            call()
        microseconds.append(1e6 * (clock() - start) / calls)
    return microseconds[1:]


def _memory(native: ModuleType, launches: int) -> dict[str, float]:
    first, second = torch.Stream(device="sim"), torch.Stream(device="sim")
    left, right = torch.ones(4, device="sim"), torch.ones(4, device="sim")
    repetitions = -(-launches // LAUNCHES_A_REPETITION)

    def run(count: int) -> None:
        for repetition in range(count):
            # A held launch queues what follows on its stream, until the host synchronizes or the repetition ends.
            native.begin_repetition([(0, first.stream_id, repetition % LAUNCHES_A_REPETITION)], False, True)
            for stream in (first, second):
                with stream:
                    for _ in range(LAUNCHES_A_REPETITION // 2):
                        torch.mul(left, right)
            native.finish_repetition()

    run(max(10, repetitions // 20))
    before = _resident_mib()
    run(repetitions)
    return {
        "launches": repetitions * LAUNCHES_A_REPETITION,
        "resident_before_mib": round(before, 2),
        "resident_after_mib": round(_resident_mib(), 2),
    }


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
