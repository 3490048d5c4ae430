"""What ran at the same time, computed from the spans of a trace."""

from __future__ import annotations

from typing import Any

import pytest

from harness.observe.overlap import Span, overlapped_us, spans_of


def span(start_us: float, stop_us: float, stream: int = 7, kind: str = "kernel") -> Span:
    return Span(kind, "", stream, start_us, stop_us)


@pytest.mark.parametrize(
    ("others", "expected_us"),
    [
        ([], 0.0),
        ([span(0, 5)], 0.0),
        ([span(5, 12)], 2.0),
        ([span(12, 15), span(18, 30)], 5.0),
        ([span(0, 100)], 10.0),
        ([span(10, 14), span(12, 15)], 5.0),
        ([span(10, 20), span(12, 13)], 10.0),
        ([span(10, 20, stream=13)], 0.0),
    ],
    ids=["nothing", "before", "its end", "two", "all of it", "overlapping ones count once", "nested", "its own stream"],
)
def test_the_time_in_which_others_ran(others, expected_us):
    assert overlapped_us(span(10, 20, stream=13, kind="copy"), others) == expected_us


def test_kernels_and_copies_are_taken_from_a_chrome_trace():
    def event(cat: str, ts: float, **more: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": f"a {cat}", "ts": ts, "dur": 2.5, "args": {"stream": 7}, **more}

    events = [event("kernel", 30.0), event("gpu_memcpy", 10.0), event("cpu_op", 5.0), event("kernel", 1.0, ph="s")]
    events.append({"ph": "M", "name": "process_name", "args": {}})
    assert spans_of({"traceEvents": events}) == [
        Span("copy", "a gpu_memcpy", 7, 10.0, 12.5),
        Span("kernel", "a kernel", 7, 30.0, 32.5),
    ]
