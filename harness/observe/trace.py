"""The trace of one repetition: what was enqueued where, in submission order.

One format for every backend. Streams are named as the case names them (``fill``, ``ambient``); the default
stream of device 0 is ``default``, of device 1 ``default.1``; a stream that the case did not name is
``stream<id>`` (``stream<id>.<device>`` on another device than 0). Events are numbered by recording: every
``record`` makes a new number, so a wait names the recording it binds to, as in CUDA. Blocks of memory are numbered by
first appearance in the trace, so that two runs of one program give equal traces whatever the addresses. An allocator
that hands out whole blocks starts each at 0; of one that splits and joins what it hands out, a block is all that ever
overlapped.
"""

from __future__ import annotations

import os
from typing import NamedTuple, TypeAlias

from harness.perturb.plan import LaunchId


class SourceLine(NamedTuple):
    """A line of the caller's Python code."""

    file: str
    line: int

    def __str__(self) -> str:
        """``file:line``, relative to the working directory where that is shorter."""
        relative = os.path.relpath(self.file)
        return f"{self.file if relative.startswith('..') else relative}:{self.line}"


class Access(NamedTuple):
    """One access to the bytes [start, stop) of a block of memory."""

    block: int
    start: int
    stop: int
    write: bool


class Launch(NamedTuple):
    """An operation enqueued on a stream."""

    id: LaunchId
    operation: str
    """The dispatcher's name, such as ``aten::mul.Tensor``."""
    node: str | None
    """The autograd node that was running (``MulBackward0``), or None outside backward."""
    line: SourceLine | None
    """Where the caller's code enqueued it; for a backward launch, the line of the forward operation it belongs
    to where that is known, else the line that called backward. None where lines were not recorded."""
    accesses: tuple[Access, ...]
    thread: int = 0
    """The thread of the host that enqueued it; see :class:`Origins`."""
    backward: int | None = None
    """The backward that it is part of; None outside any. In a backward but outside its nodes are the callbacks at its
    end."""
    with_host: bool = False
    """Whether it copies from or to memory of the host, pinned or not."""


class Record(NamedTuple):
    """An event recorded on a stream."""

    stream: str
    event: int


class Wait(NamedTuple):
    """A stream made to wait for a recording."""

    stream: str
    event: int


class HostSync(NamedTuple):
    """The host waited: for a stream, for a recording, or (both None) for every stream of every device."""

    stream: str | None
    event: int | None


class HostAccess(NamedTuple):
    """The host itself read or wrote pinned memory, at once: an operator on CPU tensors, ``tolist()``, ``numpy()``.

    ``numpy()`` counts as a read at the moment when it is asked for; what becomes of the array afterwards is not seen.
    """

    operation: str
    """The dispatcher's name (``aten::_local_scalar_dense``), or the method's (``Tensor.numpy``)."""
    node: str | None
    """The autograd node that was running, or None outside backward."""
    line: SourceLine | None
    """The line of the caller's code, as for a launch."""
    accesses: tuple[Access, ...]


class Allocate(NamedTuple):
    """The bytes [start, stop) of a block handed out by a caching allocator, to their owning stream or to the host.

    ``after`` are the recordings that the allocator saw completed before it handed them out again
    (those that ``record_stream`` made it wait for).
    """

    block: int
    start: int
    stop: int
    stream: str | None
    """None for pinned memory, which belongs to the host."""
    after: tuple[int, ...]


class Free(NamedTuple):
    """The bytes [start, stop) of a block given back. ``deferred`` are the recordings that their reuse must wait for:
    those of ``record_stream``; of pinned memory, those of the copies that the allocator knows of."""

    block: int
    start: int
    stop: int
    stream: str | None
    """The owning stream: the one that the bytes were allocated on. None for pinned memory."""
    deferred: tuple[int, ...]
    line: SourceLine | None


class RecordStream(NamedTuple):
    """``record_stream`` of the bytes [start, stop) of a block of device memory on a stream, by the engine or the user.

    It counts until the next free of these bytes and orders nothing by itself: the recordings that it led to are among
    that free's ``deferred``. On the stream that owns the bytes it has no effect.
    """

    block: int
    start: int
    stop: int
    stream: str


class Origins:
    """Numbers the threads and the backwards of a repetition by first appearance, so that two runs have the same."""

    def __init__(self) -> None:
        self._threads: dict[int, int] = {}
        self._backwards: dict[int, int] = {}

    def numbers(self, thread: int, backward: int) -> tuple[int, int | None]:
        """The numbers of PyTorch's ``thread`` and of the engine's ``backward``, which is -1 for none."""
        number = self._threads.setdefault(thread, len(self._threads))
        return number, self._backwards.setdefault(backward, len(self._backwards)) if backward >= 0 else None


Entry: TypeAlias = Launch | Record | Wait | HostSync | HostAccess | Allocate | Free | RecordStream
Trace: TypeAlias = list[Entry]
