"""What NVIDIA's driver tells of the GPUs, as metrics; a driver that cannot tell costs a series and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from geomesh_p2p.telemetry import gpus
from geomesh_p2p.telemetry.gpus import GpuCollector


class NVMLError(Exception):
    pass


class Driver:
    """Two GPUs, the second of which does not count its utilization."""

    NVMLError = NVMLError

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        if handle == 1:
            raise NVMLError("not supported")
        return SimpleNamespace(gpu=87)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=(handle + 1) * 2**30)


class NoDriver(Driver):
    def nvmlInit(self) -> None:
        raise NVMLError("no driver")


def lines(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


def test_each_gpu_has_its_series() -> None:
    registry = CollectorRegistry()
    GpuCollector("north", Driver()).register(registry)
    assert lines(registry) == [
        'geomesh_gpu_utilization_ratio{gpu="0",site="north"} 0.87',
        'geomesh_gpu_memory_used_bytes{gpu="0",site="north"} 1.073741824e+09',
        'geomesh_gpu_memory_used_bytes{gpu="1",site="north"} 2.147483648e+09',
    ]


def test_a_driver_that_is_gone_leaves_the_page_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: Any) -> Any:
        raise NVMLError("the driver is being replaced")

    registry, driver = CollectorRegistry(), Driver()
    GpuCollector("north", driver).register(registry)
    monkeypatch.setattr(driver, "nvmlDeviceGetCount", gone, raising=False)
    assert lines(registry) == []


@pytest.mark.parametrize("loads", [lambda name: NoDriver(), None])
def test_without_a_driver_or_its_package_there_is_no_series(loads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(gpus, "import_module", loads or missing)
    registry = CollectorRegistry()
    GpuCollector("north").register(registry)
    assert lines(registry) == []
