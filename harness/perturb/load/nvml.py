"""What the GPU says of itself while the load runs: clock, power, temperature. Information, which proves nothing."""

from __future__ import annotations

from typing import Any

import torch


def describe(device: torch.device) -> str:
    """Clock, power and temperature now, from NVML (nvidia-ml-py); empty where it is not there or does not answer."""
    try:
        import pynvml  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return ""
    try:
        pynvml.nvmlInit()
        try:
            return _describe(pynvml, f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return ""


def _describe(nvml: Any, uuid: str) -> str:
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
    clock_mhz = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
    power_w = nvml.nvmlDeviceGetPowerUsage(handle) / 1e3
    temperature = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
    return f"{clock_mhz:,} MHz, {power_w:.0f} W, {temperature} °C"
