"""What a repetition costs, everything included: enqueueing, running, observing, judging, writing the result."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from harness.campaign.case import Case
from harness.campaign.lab import Lab
from harness.campaign.options import Options
from harness.campaign.result import CaseResult
from harness.campaign.session import Session
from harness.campaign.store import ResultWriter
from harness.campaign.watchdog import Watchdog
from harness.perturb.hold import DEFAULT_KIND


def smallest_case(lab: Lab) -> None:
    """An implicit seed inside one side stream: a product, its backward, one observation."""
    leaf, product = lab.product(2.0, 3.0)
    with lab.preparing():
        loss = product.sum()
    with lab.stream("ambient"):
        loss.backward()
        lab.observe(leaf.grad, 3.0)


def seed_case(lab: Lab) -> None:
    """A seed filled on one stream, backward called on another that waits for it."""
    leaf, product = lab.product(2.0, 3.0)
    seed = lab.poisoned(product)
    with lab.stream("fill") as fill:
        seed.fill_(5.0)
    with lab.stream("ambient") as ambient:
        ambient.wait_stream(fill)
        product.backward(seed)
        lab.observe(leaf.grad, 15.0)


CASES: dict[str, Callable[[Lab], None]] = {"smallest": smallest_case, "seed": seed_case}


def measure(
    device: str, repetitions: int, announce: Callable[[str], None] | None = None, *, hold: str = DEFAULT_KIND
) -> dict[str, dict[str, float]]:
    """Cost of a repetition of each bench case, in microseconds, from the start of one to the start of the next.

    Args:
        device: ``sim`` or ``cuda``.
        repetitions: how many to measure of each case.
        announce: receives progress sentences of a build.
        hold: how launches are held on a real device.

    Raises:
        UsageError: the device cannot be had.
    """
    session = Session(Options(device=device, hold=hold), announce)
    watchdog = Watchdog(60.0, None)
    costs = {}
    with tempfile.TemporaryDirectory() as folder:
        writer = ResultWriter(Path(folder), "bench", {})
        for name, body in CASES.items():
            lab = session.lab()
            result = CaseResult(name)
            starts: list[float] = []

            def numbers(_: int, starts: list[float] = starts) -> Iterator[int]:
                for number in range(repetitions + 1):
                    starts.append(time.perf_counter())
                    yield number

            case = Case(name, lambda body=body, lab=lab: body(lab), session, lab, None)  # type: ignore[misc]
            case.run(numbers, result, writer, watchdog, lambda case, repetition: "", lambda: None)
            microseconds = sorted(1e6 * (end - start) for start, end in itertools.pairwise(starts))
            costs[name] = {
                "repetitions": repetitions,
                "launches": result.launches,
                "median_us": round(statistics.median(microseconds), 1),
                "p95_us": round(microseconds[int(0.95 * (len(microseconds) - 1))], 1),
                "mean_us": round(statistics.fmean(microseconds), 1),
                "races": result.verdicts.get("race", 0),
            }
        writer.close()
    watchdog.rest()
    session.close()
    return costs
