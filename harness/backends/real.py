"""A real accelerator: CUDA, or ROCm, which is CUDA to PyTorch; others as far as the device-generic API goes.

The device under test is the first visible one (``harness.backends.visible_devices`` puts it there), so that cases may
count its devices from 0.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import torch

from harness.errors import InfrastructureError, UsageError

_PROBE_CYCLES = 1_000_000
_CALIBRATION_MS = 5.0
_CALIBRATIONS = 7
_WARM_UPS = 3
_KERNEL_DRIVER = Path("/proc/driver/nvidia/version")


class RealBackend:
    """The accelerator under test, on real hardware."""

    def __init__(self, device: torch.device) -> None:
        """Initialise the runtime of the device.

        Raises:
            UsageError: this PyTorch has no such device.
            InfrastructureError: the driver does not come up.
        """
        self.device = torch.device(device.type, 0)
        if self.device_count == 0:
            raise UsageError(f"There is no {device.type} device here that torch {torch.__version__} can use.")
        try:
            if device.type == "cuda":
                torch.cuda.init()
            torch.empty(1, device=self.device)
        except RuntimeError as error:
            raise InfrastructureError(f"The {device.type} runtime does not start: {_first_line(error)}.") from error

    @property
    def device_count(self) -> int:
        """How many devices of the kind this process sees."""
        current = torch.accelerator.current_accelerator()
        if current is None or current.type != self.device.type:
            return 0
        return int(torch.accelerator.device_count())

    def describe(self) -> dict[str, str]:
        """What to print about it: the device, the driver, the runtime."""
        if self.device.type != "cuda":
            return {"device": f"{self.device_count} x {self.device.type}"}
        names = [torch.cuda.get_device_name(index) for index in range(self.device_count)]
        counts = [(name, names.count(name)) for name in dict.fromkeys(names)]
        described = {"device": " + ".join(name if times == 1 else f"{times} x {name}" for name, times in counts)}
        if torch.version.hip is not None:
            return {**described, "runtime": f"ROCm {torch.version.hip}"}
        driver = _driver_version()
        if driver is not None:
            described["driver"] = f"driver {driver}"
        return {**described, "runtime": f"CUDA {torch.version.cuda}"}

    def synchronize(self) -> None:
        """Wait for all work on every device."""
        for index in range(self.device_count):
            torch.accelerator.synchronize(index)

    def calibrate_sleep_cycles_per_ms(self) -> float:
        """How many cycles of ``torch.cuda._sleep`` last a millisecond on this card, at the clocks it runs at now.

        Call it outside backward, while nothing else runs: a fixed number of cycles is not a duration, and a calibration
        inside what is measured measures something else.

        Returns:
            Cycles per millisecond, by the shortest of several timings: others who use the GPU only make them longer.

        Raises:
            UsageError: the device has no ``_sleep``.
            InfrastructureError: the timings make no sense.
        """
        if self.device.type != "cuda" or not hasattr(torch.cuda, "_sleep"):
            raise UsageError(
                f"A launch on {self.device.type} cannot be held: a hold needs torch.cuda._sleep to keep a stream busy, "
                "and there is no such function for this device."
            )
        for _ in range(_WARM_UPS):
            probe_ms = self._time_sleep_ms(_PROBE_CYCLES)
        cycles = round(_PROBE_CYCLES * _CALIBRATION_MS / max(probe_ms, 1e-3))
        for _ in range(_WARM_UPS):
            self._time_sleep_ms(cycles)
        rate = cycles / max(min(self._time_sleep_ms(cycles) for _ in range(_CALIBRATIONS)), 1e-6)
        if not 1e3 < rate < 1e8:  # 1 MHz to 100 GHz
            raise InfrastructureError(
                f"The sleep kernel was timed at {rate:g} cycles a millisecond; no clock has that."
            )
        return rate

    def _time_sleep_ms(self, cycles: int) -> float:
        with torch.cuda.device(self.device):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            torch.cuda._sleep(cycles)
            end.record()
            end.synchronize()
        return float(start.elapsed_time(end))

    def is_sticky_error(self, exception: BaseException) -> bool:
        """Whether the device is unusable for the rest of the process: after a sticky error every call fails.

        Args:
            exception: what was raised; it is the device that decides, since asynchronous errors surface anywhere.
        """
        for _ in range(2):
            # The first call may only deliver an error that was pending.
            with contextlib.suppress(RuntimeError):
                self.synchronize()
                return False
        return True


def _driver_version() -> str | None:
    try:
        match = re.search(r"Kernel Module\D*(\d+(?:\.\d+)+)", _KERNEL_DRIVER.read_text())
    except OSError:
        return None
    return match[1] if match is not None else None


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].rstrip(".")
