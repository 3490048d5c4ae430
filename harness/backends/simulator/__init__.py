"""The simulated accelerator: a PyTorch device type, ``sim``, whose streams are queues run by a scheduler of our own.

PyTorch's autograd engine drives it as it drives CUDA, through ``c10::impl::DeviceGuardImplInterface``. Kernels are
PyTorch's own CPU kernels, run on the same memory when the scheduler reaches them. The C++ sources say what each part
models.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from harness.backends import accesses, extension
from harness.perturb.schedule import Schedule

EXTENSION_NAME = "sidestream_simulator"
TITLE = "simulated accelerator"
SOURCES: list[Path] = [*sorted(Path(__file__).parent.glob("*.cpp")), *accesses.SOURCES]

Announce = Callable[[str], None]


def build(announce: Announce | None = None) -> Path:
    """The compiled extension, built if the cache does not have it.

    Args:
        announce: receives progress sentences while it builds.

    Raises:
        UsageError: it cannot be built here; the sentence says what is missing.
    """
    return extension.build(EXTENSION_NAME, SOURCES, announce, title=TITLE)


def register(announce: Announce | None = None) -> ModuleType:
    """Makes ``sim`` this process's accelerator, with the device module ``torch.sim``. A second call changes nothing.

    Returns:
        The native module: ``begin_repetition``, ``set_preparing``, ``finish_repetition``, ``set_ignored_prefixes``,
        ``set_schedule``, ``schedule_report``.

    Raises:
        UsageError: it cannot be built here, or this process has another PrivateUse1 backend already.
    """
    # Not at the top: building needs neither torch's device registry nor a process that has it to itself.
    from harness.backends.simulator import registration

    return registration.register(announce)


def set_schedule(schedule: Schedule) -> None:
    """Schedules the simulated accelerator, which is registered, in this way from here on; for whole scripts.

    What is pending completes first. A repetition of a case is given its schedule when it begins
    (:meth:`harness.observe.instrument.Instrument.begin`).

    Raises:
        RuntimeError: a repetition is running, or what was pending failed, or the program did not fit the order of host
            threads that the last schedule replayed.
    """
    register().set_schedule(*schedule.native_arguments())
