"""The tap: observes and holds the launches of a real accelerator, with no GPU code of its own and no rebuilt PyTorch.

Two observers in one native extension (the C++ files beside this one):

- A decorator around the registered device guard of the device type. The autograd engine, ``torch.Stream``,
  ``torch.Event`` and ``torch.accelerator`` go through that guard, so every event record, wait and host
  synchronization they issue is seen. Libraries go around it and stay invisible, and so does a ``torch.Event`` that was
  made before the tap was installed; of what Python calls around it, ``harness/observe/around_guard.py`` tells.
- A global ``RecordFunction`` callback that sees every dispatched operation, in the engine's threads too. An operation
  is a launch when a kernel is registered for it under the device's own dispatch key and its schema is neither that of
  a view nor of a query; composite operations are seen through. Kernels that are launched without the dispatcher
  (Triton, NCCL) are not seen. What an operation launches through others is part of it, but for what the caller's
  hooks do that pack the tensors it saves (``harness/backends/accesses/saved_tensor_hooks.py``).

A launch has the bytes of device memory that it reads and writes: of its arguments, written as its schema says, and of
what it returns. What a kernel touches beyond these (a cached workspace, say) is not seen. Allocations and frees come
from the caching allocator, which tells a profiler of them (``c10::reportMemoryUsageToProfiler``; CUDA's native
allocator does, ``cudaMallocAsync`` does not): during a repetition each thread that runs an operation of the case,
enters a stream or issues a wait has one, which hands on what it hears. So

- PyTorch's profiler cannot be started in the body of a case ("already enabled on this thread"), and where one is
  running on the thread already, the trace has neither memory nor accesses, and happens-before nothing to judge;
- a block that was handed out before the repetition has an owner that nobody knows, and its free is not in the trace.
  Nor is a free by a thread that does none of these; it is entered when the memory is handed out again;
- the line of a free is that of the thread if it happens to hold the GIL, which the allocator must not wait for, else
  that of the forward operation in backward, else unknown.

Pinned memory of the host is seen from the first copy of the repetition on that uses it: that copy and later ones, and
what the host itself reads and writes of it (operators on CPU tensors, and ``harness/backends/accesses/host_reads.py``).
Its allocator reports nothing, so a block is entered as handed out when a copy first uses it, after the copies of before
that the allocator has waited for, and as freed when, after it was given up, the next launch or access of the host is
seen.

A hold is a spin kernel enqueued on the current stream right before the launch, and an event behind it: while the
event is pending, so is the launch. Where the operation runs hooks that pack its arguments, the hold is enqueued before
what they launch on that stream. On CUDA it can be a gate instead (``gates.h``): the stream waits for a word that the
host writes when the body has been enqueued, or before the host itself waits for the held launch. Before a gate is
opened, everything that is not behind a closed gate has to have run, as the tap knows it from the waits that it has
seen. What goes around both guard and ``around_guard`` can wait for a gate unseen. So a watchdog, a native thread that
needs no GIL, opens a gate that has been closed for too long, and the hold counts as ``expired``, which proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.backends import accesses, extension
from harness.backends.accesses import host_reads, saved_tensor_hooks
from harness.errors import InfrastructureError
from harness.observe import around_guard

_EXTENSION_NAME = "sidestream_tap"
_TITLE = "tap"
_SOURCES = [*sorted(Path(__file__).parent.glob("*.cpp")), *accesses.SOURCES]

_installed: tuple[str, Any] | None = None
_restore_python: list[Callable[[], None]] = []
"""What restores the methods that report to the tap."""
_restore: Callable[[], None] | None = None


def build(announce: Callable[[str], None] | None = None) -> Path:
    """The compiled extension, built if the cache does not have it.

    Args:
        announce: receives progress sentences while it builds.

    Raises:
        UsageError: it cannot be built here; the sentence says what is missing.
    """
    return extension.build(_EXTENSION_NAME, _SOURCES, announce, title=_TITLE)


def install(device_type: str, announce: Callable[[str], None] | None = None) -> Any:
    """Install the tap on a device type, building it first if the cache has no build of it.

    Args:
        device_type: ``cuda`` (ROCm too), ``xpu``, ``sim``.
        announce: receives progress sentences while it builds.

    Returns:
        The native instrument (``harness.observe.instrument.Native``), with ``set_hold_cycles(cycles)``,
        ``can_sleep()``, ``set_sleep_fallback(callable)``, ``use_gates(limit_ms)``, ``use_sleeps()`` and
        ``ignore_this_thread(on)``.

    Raises:
        UsageError: the extension cannot be built.
        InfrastructureError: the tap sits on another device type already, or PyTorch knows no such device.
    """
    global _installed
    if _installed is not None:
        if _installed[0] != device_type:
            raise InfrastructureError(
                f"The tap is installed on {_installed[0]} and cannot observe {device_type} too: one backend a process."
            )
        return _installed[1]
    native = extension.load(_EXTENSION_NAME, _SOURCES, announce, title=_TITLE)
    try:
        native.install(device_type)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise InfrastructureError(f"The tap cannot be installed on {device_type}: {reason}.") from error
    if device_type == "cuda" and not native.can_sleep():
        import torch

        # Not exported by this build of torch: the same kernel by way of Python, which costs the GIL at each hold.
        native.set_sleep_fallback(torch.cuda._sleep)
    _restore_python[:] = [host_reads.report_to(native), saved_tensor_hooks.report_to(native)]
    _installed = (device_type, native)
    return native


def observe_synchronizations(
    device_type: str, last_entry_function: int | None, announce: Callable[[str], None] | None = None
) -> Any:
    """Put a second decorator around the device guard: it sees every synchronization, and can leave one out.

    Independent of :func:`install`, so that it works on the simulated accelerator, which traces itself.

    Args:
        device_type: ``cuda`` (ROCm too), ``xpu``, ``sim``.
        last_entry_function: the address of a C function by which whoever traces the device tells which entry the
            calling thread added last; None where that is the tap.
        announce: receives progress sentences while the extension is built.

    Returns:
        The native tap, with ``begin_synchronizations``, ``prepare_synchronizations`` and ``finish_synchronizations``.

    Raises:
        UsageError: the extension cannot be built.
    """
    global _restore
    native = extension.load(_EXTENSION_NAME, _SOURCES, announce, title=_TITLE)
    if _restore is None:
        native.install_synchronizations(device_type, last_entry_function)
        _restore = around_guard.install(native, device_type)
    return native


def ignore_synchronizations() -> None:
    """Restore what :func:`observe_synchronizations` decorated."""
    global _restore
    if _restore is not None:
        _restore()
        _restore = None
        extension.load(_EXTENSION_NAME, _SOURCES, None, title=_TITLE).remove_synchronizations()


def remove() -> None:
    """Restore the device guard and end the observation; nothing happens where no tap is installed."""
    global _installed
    if _installed is not None:
        while _restore_python:
            _restore_python.pop()()
        _installed[1].remove()
        _installed = None
