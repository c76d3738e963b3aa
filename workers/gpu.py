"""What the GPUs say, through NVML where its Python binding (extra `worker`) is installed.

Without the binding, a driver or a GPU, the figures are unknown. Only the devices that
CUDA_VISIBLE_DEVICES leaves to this worker count: utilisation is their mean, memory their sum,
temperature that of the hottest.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

_log = logging.getLogger(__name__)


class Gpus(Protocol):
    """Where GPU figures come from: NVML, or nowhere."""

    def figures(self) -> Mapping[str, float]:
        """GPU figures by their names in a load report; what is unknown is left out.

        May block for milliseconds.
        """


class NoGpus:
    """A worker without (readable) GPUs."""

    def figures(self) -> Mapping[str, float]:
        """Return nothing: all is unknown."""
        return {}


class NvmlGpus:
    """The devices as NVML shows them."""

    def __init__(self, nvml: Any, devices: Sequence[Any]) -> None:
        self._nvml = nvml
        self._devices = devices
        self._failing = False

    def figures(self) -> Mapping[str, float]:
        """Read all devices; one that cannot be read makes a figure unknown."""
        nvml = self._nvml
        try:
            use = [nvml.nvmlDeviceGetUtilizationRates(d).gpu / 100 for d in self._devices]
            memory = [nvml.nvmlDeviceGetMemoryInfo(d) for d in self._devices]
            sensor = nvml.NVML_TEMPERATURE_GPU
            heat = [nvml.nvmlDeviceGetTemperature(d, sensor) for d in self._devices]
        except nvml.NVMLError as exc:
            if not self._failing:
                _log.warning("GPU figures are unknown: %s", exc)
            self._failing = True
            return {}
        self._failing = False
        return {
            "gpu_utilization_ratio": sum(use) / len(use),
            "gpu_memory_used_bytes": sum(m.used for m in memory),
            "gpu_memory_total_bytes": sum(m.total for m in memory),
            "gpu_temperature_c": max(heat),
        }


def find_gpus(
    environment: Mapping[str, str], load: Callable[[str], Any] = importlib.import_module
) -> Gpus:
    """Return the GPUs of a process with this environment. `load` imports a module by name."""
    try:
        nvml = load("pynvml")
    except ImportError:
        _log.info("GPU figures are unknown: pynvml is not installed (extra `worker`)")
        return NoGpus()
    try:
        nvml.nvmlInit()
        devices = _devices(nvml, environment.get("CUDA_VISIBLE_DEVICES"))
    except nvml.NVMLError as exc:
        _log.info("GPU figures are unknown: %s", exc)
        return NoGpus()
    return NvmlGpus(nvml, devices) if devices else NoGpus()


def _devices(nvml: Any, visible: str | None) -> list[Any]:
    if visible is None:
        return [nvml.nvmlDeviceGetHandleByIndex(n) for n in range(nvml.nvmlDeviceGetCount())]
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return [
        nvml.nvmlDeviceGetHandleByIndex(int(name))
        if name.isdecimal()
        else nvml.nvmlDeviceGetHandleByUUID(name)
        for name in names
        if name != "-1"
    ]
