"""Names of streams: what a case calls them, and how PyTorch identifies them."""

from __future__ import annotations

import re
from typing import TypeAlias

StreamKey: TypeAlias = tuple[int, int]
"""(device index, ``torch.Stream.stream_id``)."""


class StreamNames:
    """Both directions of the naming of streams.

    A stream that nobody named is called after its id; the default stream, which has id 0 on every device, is
    ``default`` (``default.1`` on device 1).
    """

    def __init__(self) -> None:
        self._names: dict[StreamKey, str] = {}
        self._keys: dict[str, StreamKey] = {}

    def clear(self) -> None:
        """Forget every name: the next case gives its own."""
        self._names.clear()
        self._keys.clear()

    def assign(self, name: str, key: StreamKey) -> None:
        """Call the stream ``key`` by ``name``."""
        self._names[key] = name
        self._keys[name] = key

    def name(self, key: StreamKey) -> str:
        """The name of a stream; made up from its id (and kept) where it has none."""
        name = self._names.get(key)
        if name is None:
            device, stream = key
            name = ("default" if stream == 0 else f"stream{stream}") + (f".{device}" if device else "")
            self.assign(name, key)
        return name

    def key(self, name: str) -> StreamKey | None:
        """The stream of that name, or None."""
        return self._keys.get(name)

    def of_device(self, device: int) -> list[str]:
        """The names of the streams of one device, sorted."""
        return sorted(name for name, key in self._keys.items() if key[0] == device)

    def names(self) -> list[str]:
        """Every name in use, sorted."""
        return sorted(self._keys)


class StreamsByAppearance(StreamNames):
    """Names for the streams of code that makes its own and names none.

    PyTorch hands streams out of a pool in turn, so such code has others in each repetition. They are the same by the
    order in which they appear among the synchronizations of a repetition, for each device: ``side1``, ``side2``
    (``side1.1`` on device 1).
    """

    _FORM = re.compile(r"(?:default|side(?P<appearance>[1-9]\d*))(?:\.(?P<device>\d+))?")

    def appeared(self, key: StreamKey, appearance: int) -> None:
        """Name a stream that was the ``appearance``-th of its device, from 1; 0 for the default stream."""
        if appearance > 0:
            device, _ = key
            self.assign(f"side{appearance}" + (f".{device}" if device else ""), key)

    def place(self, name: str) -> tuple[int, int]:
        """The device and the appearance that a name stands for; (-1, -1), which no stream has, for another name."""
        match = self._FORM.fullmatch(name)
        return (-1, -1) if match is None else (int(match["device"] or 0), int(match["appearance"] or 0))
