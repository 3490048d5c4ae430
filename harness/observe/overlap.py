"""What ran at the same time on a real device, from a trace of PyTorch's profiler.

The trace is the one that ``torch.profiler.profile.export_chrome_trace`` writes: complete events (``"ph": "X"``) of the
categories ``kernel`` and ``gpu_memcpy``, with their stream, start and duration in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

_KINDS = {"kernel": "kernel", "gpu_memcpy": "copy"}


class Span(NamedTuple):
    """When one kernel or copy ran."""

    kind: str
    """``kernel`` or ``copy``."""
    name: str
    """The profiler's, such as ``Memcpy HtoD (Pinned -> Device)``."""
    stream: int
    """The profiler's number of the stream, which is not PyTorch's."""
    start_us: float
    stop_us: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """What ran on the device when, by start."""

    kernels: list[Span]
    copies: list[Span]

    @classmethod
    def of(cls, trace: dict[str, Any]) -> Timeline:
        """That of a chrome trace."""
        spans = spans_of(trace)
        return cls(
            [span for span in spans if span.kind == "kernel"],
            [span for span in spans if span.kind == "copy"],
        )

    def beside_kernels_us(self, copy: Span) -> float:
        """For how long kernels of other streams ran while a copy did."""
        return overlapped_us(copy, self.kernels)


def spans_of(trace: dict[str, Any]) -> list[Span]:
    """The kernels and copies of a chrome trace, by start."""
    found = [
        Span(
            _KINDS[event["cat"]],
            event["name"],
            int(event["args"]["stream"]),
            float(event["ts"]),
            float(event["ts"]) + float(event["dur"]),
        )
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in _KINDS
    ]
    return sorted(found, key=lambda span: span.start_us)


def overlapped_us(span: Span, others: Iterable[Span]) -> float:
    """For how long any of the others, on other streams, ran while ``span`` did."""
    parts = sorted(
        (max(span.start_us, other.start_us), min(span.stop_us, other.stop_us))
        for other in others
        if other.stream != span.stream and other.start_us < span.stop_us and span.start_us < other.stop_us
    )
    total = 0.0
    reached = span.start_us
    for start, stop in parts:
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total
