"""State of the machine while it is measured: cores always, GPUs where nvidia-ml-py finds any."""

from __future__ import annotations

import time
from typing import Any

import psutil


def states() -> list[dict[str, Any]]:
    """One record for the host and one for each GPU, at this moment."""
    return [_host(), *_gpus()]


def _host() -> dict[str, Any]:
    frequency = psutil.cpu_freq()
    return {
        "device": "host",
        "time_s": time.time(),
        "load_1min": psutil.getloadavg()[0],
        "busy_share": psutil.cpu_percent(interval=None) / 100,
        "mhz": frequency.current if frequency else None,
        "free_bytes": psutil.virtual_memory().available,
    }


def _gpus() -> list[dict[str, Any]]:
    """Clocks (MHz), temperature (°C), power (W), memory (bytes) and reasons of throttling; empty without a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, no device: all mean that there is nothing to read
        return []
    try:
        return [_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> dict[str, Any]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    reads = {
        "name": lambda: nvml.nvmlDeviceGetName(handle),
        "sm_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "memory_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
        "used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
        "throttle_reasons": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
    }
    found: dict[str, Any] = {"device": f"gpu{index}", "time_s": time.time()}
    for name, read in reads.items():
        try:
            found[name] = read()
        except nvml.NVMLError:  # not every device has every sensor
            found[name] = None
    return found
