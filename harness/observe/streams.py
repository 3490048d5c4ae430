"""Names of streams: what a case calls them, and how PyTorch identifies them."""

from __future__ import annotations

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
