"""The load ``streams``: small kernels on many streams, more than there are hardware queues together with the case's."""

from __future__ import annotations

import torch

from harness.perturb.load.device_load import Done, Work, record_event

_STREAMS = 24
_ELEMENTS = 2**16
_HIGH_PRIORITY = -1
"""Its streams come from the pool of that priority; the cases' come from the other one, of 32 as well."""


class _AllDone:
    """Events behind a batch on all streams."""

    def __init__(self, events: list[torch.cuda.Event]) -> None:
        self._events = events

    def synchronize(self) -> None:
        for event in self._events:
            event.synchronize()


class ManyStreams(Work):
    """A kernel on each of many streams."""

    unit = "launches/s"

    def __init__(self, device: torch.device, memory_bytes: float) -> None:
        super().__init__(device, memory_bytes, stream_count=0)
        self.streams = [torch.cuda.Stream(device, priority=_HIGH_PRIORITY) for _ in range(_STREAMS)]
        self.backlog = 2
        self._values = [torch.zeros(_ELEMENTS, device=device) for _ in self.streams]
        self.amount = float(len(self.streams))

    def enqueue(self, pieces: int) -> Done:
        """See :class:`Work`; a piece is a kernel on each stream."""
        events = []
        for stream, value in zip(self.streams, self._values, strict=True):
            with torch.cuda.stream(stream):
                for _ in range(pieces):
                    value.add_(1.0)
                events.append(record_event(stream))
        return _AllDone(events)
