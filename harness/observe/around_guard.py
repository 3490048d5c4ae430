"""Calls that Python makes around PyTorch's device guard, made visible to the tap.

``torch.Stream``, ``torch.Event`` and ``torch.accelerator`` go through the guard. ``Tensor.record_stream`` goes to the
allocator, and ``torch.cuda.Event``, ``torch.cuda.Stream`` and ``torch.cuda.synchronize`` to CUDA itself
(torch/csrc/cuda/Event.cpp, Stream.cpp). Each of these is replaced by a function that makes the same call by way of the
tap. What C++ code calls around the guard stays invisible: the copy kernels (aten/src/ATen/native/cuda/Copy.cu), NCCL,
the allocators.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

_Saved = tuple[Any, str, Any]


def install(native: Any, device_type: str) -> Callable[[], None]:
    """Replace the calls.

    Args:
        native: the native tap; its ``call_around_guard(kind, device, stream, event, original)`` makes the call.
        device_type: ``cuda``, ``sim``, ...

    Returns:
        A function that restores them.
    """
    saved: list[_Saved] = []

    def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        saved.append((owner, name, owner.__dict__.get(name)))
        setattr(owner, name, functools.wraps(original)(make(original)))

    replace(torch.Tensor, "record_stream", functools.partial(_record_stream, native, device_type))
    if device_type == "cuda":
        event, stream = torch.cuda.Event, torch.cuda.Stream
        replace(event, "record", functools.partial(_event_call, native, "record"))
        replace(event, "wait", functools.partial(_event_call, native, "wait"))
        replace(event, "synchronize", functools.partial(_event_synchronize, native))
        replace(stream, "synchronize", functools.partial(_stream_synchronize, native))
        replace(torch.cuda, "synchronize", functools.partial(_device_synchronize, native))

    def restore() -> None:
        for owner, name, own in reversed(saved):
            if own is None:
                delattr(owner, name)  # it was inherited
            else:
                setattr(owner, name, own)

    return restore


def _record_stream(native: Any, device_type: str, original: Any) -> Any:
    def record_stream(tensor: torch.Tensor, s: Any) -> Any:
        if tensor.device.type != device_type:
            return original(tensor, s)
        address = 0
        with contextlib.suppress(RuntimeError, NotImplementedError):  # no storage of its own: sparse, a wrapper
            address = tensor.untyped_storage().data_ptr()
        call = functools.partial(original, tensor, s)
        return native.call_around_guard("record_stream", s.device_index, s.stream_id, address, call)

    return record_stream


def _event_call(native: Any, kind: str, original: Any) -> Any:
    def event_call(event: Any, stream: Any = None) -> Any:
        stream = torch.cuda.current_stream() if stream is None else stream
        call = functools.partial(original, event, stream)
        return native.call_around_guard(kind, stream.device_index, stream.stream_id, id(event), call)

    return event_call


def _event_synchronize(native: Any, original: Any) -> Any:
    def synchronize(event: Any) -> Any:
        call = functools.partial(original, event)
        return native.call_around_guard("synchronize_event", -1, 0, id(event), call)

    return synchronize


def _stream_synchronize(native: Any, original: Any) -> Any:
    def synchronize(stream: Any) -> Any:
        call = functools.partial(original, stream)
        return native.call_around_guard("synchronize_stream", stream.device_index, stream.stream_id, 0, call)

    return synchronize


def _device_synchronize(native: Any, original: Any) -> Any:
    def synchronize(device: Any = None) -> Any:
        index = torch.cuda._utils._get_device_index(device, optional=True)
        call = functools.partial(original, device)
        return native.call_around_guard("synchronize_device", index, 0, 0, call)

    return synchronize
