"""How many repetitions a second there were, over the time of a run, and when races were seen."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from harness.campaign.store import RepetitionRecord
from harness.judge.verdict import Verdict

MOST_SPANS = 60
"""The run is cut into no more spans of equal length than these."""
_FAILED = (Verdict.RACE.value, Verdict.TIMEOUT.value)


@dataclass(slots=True)
class Span:
    """A stretch of time."""

    repetitions: int = 0
    races: int = 0
    """Of safe cases, timeouts included."""


@dataclass(slots=True)
class Rates:
    """Repetitions by when they ended, cut more coarsely the longer the run is."""

    length_s: float = 0.25
    """Of a span."""
    _spans: dict[int, Span] = field(default_factory=dict)

    def add(self, record: RepetitionRecord) -> None:
        """Count one repetition; one of unknown time is left out."""
        if record.ended_s is None or not math.isfinite(record.ended_s):
            return
        at = int(record.ended_s // self.length_s)
        span = self._spans.get(at)
        if span is None:
            span = self._spans[at] = Span()
            while max(self._spans) - min(self._spans) >= MOST_SPANS:
                self._coarsen()
            span = self._spans[int(record.ended_s // self.length_s)]
        span.repetitions += 1
        span.races += record.verdict in _FAILED and not record.control

    def _coarsen(self) -> None:
        self.length_s *= 2
        coarse: dict[int, Span] = {}
        for at, span in self._spans.items():
            into = coarse.setdefault(at // 2, Span())
            into.repetitions += span.repetitions
            into.races += span.races
        self._spans = coarse

    def spans(self) -> list[Span]:
        """The spans from the first to the last, empty ones included."""
        if not self._spans:
            return []
        return [self._spans.get(at, Span()) for at in range(min(self._spans), max(self._spans) + 1)]

    @classmethod
    def of(cls, records: Iterable[RepetitionRecord]) -> Rates:
        """Those of some repetitions."""
        rates = cls()
        for record in records:
            rates.add(record)
        return rates
