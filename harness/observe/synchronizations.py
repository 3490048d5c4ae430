"""The synchronizations of a repetition: who issued which, and one of them left out.

A synchronization is what orders streams or the host: an event recorded or waited for, a host synchronization, a
``record_stream``. Those that PyTorch issues through its device-generic layer are seen in the device guard
(``harness/observe/tap/synchronizations.h``); what Python code calls around it, from Python (``around_guard.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.errors import UsageError
from harness.observe.streams import StreamNames, StreamsByAppearance
from harness.observe.trace import Origins, SourceLine

USER = "user"
"""The issuer of what the caller's own Python code asks for."""

KINDS = ("record", "wait", "synchronize_stream", "synchronize_event", "synchronize_device", "record_stream")

_FORM = re.compile(r"(?P<kind>\w+)@(?P<stream>[\w.-]+):(?P<index>\d+)/(?P<issuer>\S+)")


@dataclass(frozen=True, slots=True, order=True)
class SynchronizationId:
    """Which synchronization of a body: the same in every repetition of it.

    Counted for each issuer and stream, since a global count would differ from run to run: the engine has a thread a
    device.
    """

    kind: str
    stream: str
    """The stream that records or waits, that is synchronized, or that memory is recorded on; ``device0`` for a whole
    device."""
    index: int
    """From 0, among those of this kind that this issuer issues on this stream."""
    issuer: str
    """``user``, or the C++ function of PyTorch, such as ``InputBuffer::add``."""

    def __str__(self) -> str:
        return f"{self.kind}@{self.stream}:{self.index}/{self.issuer}"

    @classmethod
    def parse(cls, text: str) -> SynchronizationId:
        """The inverse of ``str``.

        Raises:
            UsageError: the text names no synchronization.
        """
        match = _FORM.fullmatch(text)
        if match is None or match["kind"] not in KINDS:
            raise UsageError(
                f"{text!r} names no synchronization: write kind@stream:index/issuer, such as wait@ambient:0/user, with "
                f"a kind of {', '.join(KINDS)}."
            )
        return cls(match["kind"], match["stream"], int(match["index"]), match["issuer"])


@dataclass(frozen=True, slots=True)
class Synchronization:
    """One synchronization that was issued, or would have been."""

    id: SynchronizationId
    node: str | None
    """The autograd node that was running."""
    line: SourceLine | None
    """The innermost line of the caller's code on the thread that issued it; none in the engine's threads."""
    recorded: int | None
    """Of a wait or an event synchronization: the position, among the synchronizations, of the recording that it is
    for; None if the event was not recorded in this repetition."""
    entries: tuple[int, ...]
    """Its place in the trace; several for a device, none if it is not there (left out, or without meaning)."""
    left_out: bool
    thread: int = 0
    """The thread of the host that issued it, numbered as those of launches are."""
    backward: int | None = None
    """The backward that it is part of, numbered as those of launches are."""

    def describe(self) -> str:
        """In words: ``wait@ambient:0/user (case.py:12)``."""
        details = ", ".join(filter(None, [self.node and f"in {self.node}", self.line and str(self.line)]))
        return f"{self.id}" + (f" ({details})" if details else "")


@dataclass(frozen=True, slots=True)
class Fault:
    """One synchronization that goes wrong in a repetition."""

    target: SynchronizationId
    misdirect: bool = False
    """Whether the wait is made, but for another event than was asked for, as a broken runtime would; else it is left
    out."""

    def in_words(self) -> str:
        """``left out wait@ambient:0/user``."""
        return f"{'misdirected' if self.misdirect else 'left out'} {self.target}"

    def native_target(self, names: StreamNames) -> tuple[str, int, int, str, int, bool]:
        """What the native side calls it."""
        target = self.target
        device = re.fullmatch(r"device(\d+)", target.stream)
        if target.kind == "synchronize_device" and device:
            return target.kind, int(device[1]), 0, target.issuer, target.index, False
        if isinstance(names, StreamsByAppearance):
            return (target.kind, *names.place(target.stream), target.issuer, target.index, True)
        # A stream that does not exist yet has no synchronization to leave out.
        return (target.kind, *(names.key(target.stream) or (-1, -1)), target.issuer, target.index, False)


def name_by_appearance(raw: list[tuple[Any, ...]], names: StreamsByAppearance) -> None:
    """Name the streams of a repetition after the order in which they appeared; ``raw`` as for :func:`translate`."""
    for kind, device, stream, *_, appearance in raw:
        if kind != "synchronize_device" and device >= 0:
            names.appeared((device, stream), appearance)


def translate(
    raw: list[tuple[Any, ...]], names: StreamNames, origins: Origins, places: Mapping[int, tuple[int, ...]]
) -> list[Synchronization]:
    """The native list in the harness' words.

    Args:
        raw: what ``finish_synchronizations`` gave.
        names: names of streams.
        origins: the numbers of threads and backwards.
        places: where each entry of the device's raw trace is in the translated one, by what the device calls it.
    """
    made = []
    for kind, device, stream, issuer, index, node, file, line, *origin, recorded, entry, left_out, _ in raw:
        where = f"device{device}" if kind == "synchronize_device" else names.name((device, stream))
        made.append(
            Synchronization(
                SynchronizationId(kind, where, index, issuer),
                node,
                SourceLine(file, line) if file else None,
                recorded if recorded >= 0 else None,
                places[entry] if entry >= 0 else (),
                left_out,
                *origins.numbers(*origin),
            )
        )
    return made
