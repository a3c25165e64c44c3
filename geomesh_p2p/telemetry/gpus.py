"""How busy the GPUs of this host are, as NVIDIA's driver tells; nothing where there is no driver, or no nvidia-ml-py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily


class GpuCollector:
    """Asks the driver when it is scraped: one series a GPU of the host and metric. `driver` is pynvml, or None."""

    def __init__(self, site: str, driver: Any = None) -> None:
        self._site, self._driver = site, driver if driver is not None else load_driver()

    def register(self, registry: CollectorRegistry) -> None:
        if self._driver is not None:
            registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        utilization = GaugeMetricFamily(
            "geomesh_gpu_utilization_ratio", "Share of the last moment in which the GPU worked", labels=("site", "gpu")
        )
        used = GaugeMetricFamily("geomesh_gpu_memory_used_bytes", "Memory in use on the GPU", labels=("site", "gpu"))
        nvml = self._driver
        for number in range(self._asked(nvml.nvmlDeviceGetCount) or 0):
            handle, labels = self._asked(nvml.nvmlDeviceGetHandleByIndex, number), (self._site, str(number))
            if (rates := self._asked(nvml.nvmlDeviceGetUtilizationRates, handle)) is not None:
                utilization.add_metric(labels, rates.gpu / 100)
            if (memory := self._asked(nvml.nvmlDeviceGetMemoryInfo, handle)) is not None:
                used.add_metric(labels, float(memory.used))
        yield utilization
        yield used

    def _asked(self, question: Callable[..., Any], *of: Any) -> Any:
        """None if the driver cannot tell: this GPU does not count it, or is lost, or the driver is being replaced."""
        try:
            return question(*of)
        except self._driver.NVMLError:
            return None


def load_driver() -> Any:
    """pynvml, ready to be asked; None if there is no such package or no driver."""
    try:
        nvml = import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml
