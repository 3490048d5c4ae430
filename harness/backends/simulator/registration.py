"""Registers the simulated accelerator with PyTorch as the device type ``sim``. Once a process."""

from __future__ import annotations

import atexit
import threading
from pathlib import Path
from types import ModuleType

import torch
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

from harness.backends import extension
from harness.backends.accesses import host_reads, saved_tensor_hooks
from harness.backends.simulator import (
    EXTENSION_NAME,
    SOURCES,
    TITLE,
    Announce,
    device_module,
    meta_kernels,
)
from harness.errors import UsageError

DEVICE_TYPE = "sim"
_UNNAMED = "privateuseone"
"""The name of PyTorch's spare device type while no backend has taken it."""

EXIT_PATIENCE_S = 30.0
"""How long a process that exits waits for the autograd engine's threads."""

_native: ModuleType | None = None


def register(announce: Announce | None = None) -> ModuleType:
    """See :func:`harness.backends.simulator.register`."""
    global _native
    if _native is not None:
        return _native
    name = torch._C._get_privateuse1_backend_name()
    if name != _UNNAMED:
        raise _taken(f"'{name}'")
    native = extension.load(EXTENSION_NAME, SOURCES, announce, title=TITLE)
    if native.is_taken():
        raise _taken("one without a name")
    native.install()
    rename_privateuse1_backend(DEVICE_TYPE)
    meta_kernels.spare_dynamo()
    meta_kernels.describe_cpu_kernels(native.runs_meta_kernel)
    device_module.bind(native)
    host_reads.report_to(native)
    saved_tensor_hooks.report_to(native)
    torch._register_device_module(DEVICE_TYPE, device_module)
    generate_methods_for_privateuse1_backend()
    _Farewell()
    _native = native
    return native


class _Farewell:
    """Waits at exit until the engine's device threads have let go of every backward that has returned.

    A device thread drops its reference to a finished backward after the caller has gone on. In torch 2.13 that takes
    the GIL (``torch.autograd.graph._engine_run_backward`` stashes a Python object for the device threads), and a thread
    that asks for the GIL of an interpreter that is shutting down aborts the process. There is no such stash when the
    engine is called as here, and a device thread has let go of earlier backwards before it takes up the next.

    The call is made by a thread of its own, so that a device thread that hangs does not keep the process from ending,
    and that thread is started early, since from Python 3.12 on none can be started at exit.
    """

    def __init__(self) -> None:
        self._exiting = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sidestream-farewell", daemon=True)
        self._thread.start()
        atexit.register(self._wait)

    def _run(self) -> None:
        self._exiting.wait()
        devices = [torch.device(DEVICE_TYPE, index) for index in range(device_module.device_count())]
        leaves = [torch.empty(1, device=device, requires_grad=True) for device in devices]
        roots = tuple(leaf.view(1) for leaf in leaves)
        seeds = tuple(torch.empty(1, device=device) for device in devices)
        engine = torch.autograd.Variable._execution_engine
        engine.run_backward(roots, seeds, False, False, (), allow_unreachable=True, accumulate_grad=True)

    def _wait(self) -> None:
        if _native is not None:
            _native.stop_lines()  # looking lines up takes the GIL as well
        if _has_device_threads():
            self._exiting.set()
            self._thread.join(timeout=EXIT_PATIENCE_S)


def _has_device_threads() -> bool:
    """Whether the engine has started its device threads: a process that never called backward has none to wait for."""
    names = Path("/proc/self/task").glob("*/comm")
    return any(name.read_text().startswith("pt_autograd") for name in names)


def _taken(backend: str) -> UsageError:
    return UsageError(
        "The simulated accelerator needs PyTorch's PrivateUse1 device type, but this process has given it to another "
        f"backend ({backend}); use --device sim in a process that does not import that backend."
    )
