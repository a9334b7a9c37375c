"""How busy the tensor cores are, where the driver says so: NVML's GPM counters, on Hopper and newer."""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

# The driver's counters mean little over a shorter time.
MIN_INTERVAL_S = 0.1

log = logging.getLogger(__name__)


def open_tensor_cores() -> TensorCores | None:
    """A collector over the GPUs of this process that have the counters; None where there are none."""
    try:
        nvml = importlib.import_module("pynvml")  # of nvidia-ml-py
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        devices = [(name, device) for name, device in visible_devices(nvml) if has_counters(nvml, device)]
    except nvml.NVMLError as error:
        log.debug("no counters of tensor cores: %s", error)
        return None
    return TensorCores(nvml, devices) if devices else None


def visible_devices(nvml: Any) -> Iterator[tuple[str, Any]]:
    """The GPUs that CUDA shows to this process, by NVML's index or the name that the variable gives."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = map(str, range(nvml.nvmlDeviceGetCount())) if chosen is None else filter(None, chosen.split(","))
    for name in map(str.strip, names):
        if name.isdecimal():
            yield name, nvml.nvmlDeviceGetHandleByIndex(int(name))
        else:
            yield name, nvml.nvmlDeviceGetHandleByUUID(name)


def has_counters(nvml: Any, device: Any) -> bool:
    return bool(nvml.nvmlGpmQueryDeviceSupport(device).isSupportedDevice)


class TensorCores(Collector):
    """Shares of time between two readings of the metrics, by GPU; a GPU that cannot say is left out."""

    def __init__(self, nvml: Any, devices: list[tuple[str, Any]]) -> None:
        self._nvml, self._lock = nvml, threading.Lock()
        self._gauges = [GpuGauge(nvml, name, device) for name, device in devices]

    def collect(self) -> Iterator[Metric]:
        text = "Share of time in which tensor cores were busy, since the last reading."
        family = GaugeMetricFamily("gpu_tensor_core_utilization", text, labels=["gpu"])
        with self._lock:
            for gauge in self._gauges:
                try:
                    share = gauge.read()
                except self._nvml.NVMLError as error:
                    log.debug("no counters of the tensor cores of GPU %s: %s", gauge.name, error)
                    continue
                if share is not None:
                    family.add_metric([gauge.name], share)
        return iter([family] if family.samples else [])


class GpuGauge:
    """One GPU's tensor cores between two samples of its counters."""

    def __init__(self, nvml: Any, name: str, device: Any) -> None:
        self._nvml, self.name, self._device = nvml, name, device
        self._before, self._spare = nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()
        nvml.nvmlGpmSampleGet(device, self._before)
        self._read_s, self._share = time.monotonic(), None  # type: float, float | None

    def read(self) -> float | None:
        """The share since the last reading, 0 .. 1; that of the last reading where it is too short a time ago.

        Raises:
            NVMLError: the driver does not say.
        """
        nvml, now_s = self._nvml, time.monotonic()
        if now_s - self._read_s < MIN_INTERVAL_S:
            return self._share
        self._share = None
        nvml.nvmlGpmSampleGet(self._device, self._spare)
        asked = nvml.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, 1
        asked.sample1, asked.sample2 = self._before, self._spare
        asked.metrics[0].metricId = nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL
        self._before, self._spare, self._read_s = self._spare, self._before, now_s
        nvml.nvmlGpmMetricsGet(asked)
        if asked.metrics[0].nvmlReturn == nvml.NVML_SUCCESS:
            self._share = asked.metrics[0].value / 100
        return self._share
