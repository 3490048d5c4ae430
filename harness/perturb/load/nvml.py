"""What the GPU says of itself while the load runs: clock, power, temperature. Information, which proves nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_SLOWED_BY = {
    0x004: "the power limit",
    0x008: "the hardware (slowdown)",
    0x020: "its temperature (software)",
    0x040: "its temperature (hardware)",
    0x080: "the power supply (brake)",
}
"""The reasons that are no choice of the user's, by their bits (NVML API reference, "NvmlClocksEventReasons")."""


def describe(device: torch.device) -> str:
    """Clock, power and temperature now, from NVML (nvidia-ml-py); empty where it is not there or does not answer."""
    return describe_gpu(lambda: f"GPU-{torch.cuda.get_device_properties(device).uuid}")


def describe_gpu(uuid: Callable[[], str]) -> str:
    """The same of the GPU with this UUID, with what slows it down, if anything does."""
    try:
        import pynvml  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return ""
    try:
        pynvml.nvmlInit()
        try:
            return _describe(pynvml, uuid())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return ""


def _describe(nvml: Any, uuid: str) -> str:
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    clock_mhz = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
    power_w = nvml.nvmlDeviceGetPowerUsage(handle) / 1e3
    temperature = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
    said = f"{clock_mhz:,} MHz, {power_w:.0f} W, {temperature} °C"
    slowed_by = _slowed_by(nvml, handle)
    return f"{said}, slowed by {' and '.join(slowed_by)}" if slowed_by else said


def _slowed_by(nvml: Any, handle: Any) -> list[str]:
    # Named anew in NVML 12.3; nvidia-ml-py has the new name from then on.
    ask = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    ask = ask or getattr(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", None)
    try:
        reasons = ask(handle) if ask is not None else 0
    except nvml.NVMLError:
        return []
    return [what for bit, what in _SLOWED_BY.items() if reasons & bit]
