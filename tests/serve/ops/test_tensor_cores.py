"""Counters of tensor cores, with a stand-in for NVML: its calls and structures, as nvidia-ml-py has them."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from turbojax.serve import tensor_cores
from turbojax.serve.tensor_cores import open_tensor_cores


class NVMLError(Exception):
    pass


class FakeNvml(ModuleType):
    """GPUs whose tensor cores were busy for so many per cent up to each sample; None has no counters.

    A GPU of -1 fails when it is asked, one of -2 gives no value.
    """

    NVML_GPM_METRICS_GET_VERSION, NVML_GPM_METRIC_ANY_TENSOR_UTIL, NVML_SUCCESS = 1, 5, 0

    def __init__(self, gpus: list[float | None]) -> None:
        super().__init__("pynvml")
        self.NVMLError, self.gpus, self.is_open, self.num_samples = NVMLError, gpus, False, 0

    def nvmlInit(self):
        self.is_open = True

    def nvmlDeviceGetCount(self):
        assert self.is_open
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        if index >= len(self.gpus):
            raise NVMLError("invalid argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, name):
        return int(name.removeprefix("GPU-"))

    def nvmlGpmQueryDeviceSupport(self, device):
        return SimpleNamespace(isSupportedDevice=int(self.gpus[device] is not None))

    def nvmlGpmSampleAlloc(self):
        return SimpleNamespace(device=None, order=None)

    def nvmlGpmSampleGet(self, device, sample):
        self.num_samples += 1
        sample.device, sample.order = device, self.num_samples

    def c_nvmlGpmMetricsGet_t(self):
        return SimpleNamespace(metrics=[SimpleNamespace(metricId=0, nvmlReturn=None, value=None)])

    def nvmlGpmMetricsGet(self, asked):
        assert (asked.version, asked.numMetrics, asked.metrics[0].metricId) == (1, 1, 5)
        assert asked.sample1.device == asked.sample2.device
        assert asked.sample1.order < asked.sample2.order, "the earlier one comes first"
        value = self.gpus[asked.sample1.device]
        if value == -1:
            raise NVMLError("gpu is lost")
        asked.metrics[0].nvmlReturn, asked.metrics[0].value = (1 if value == -2 else 0), value


def fake_nvml(monkeypatch: pytest.MonkeyPatch, gpus: list[float | None] | None = None) -> FakeNvml:
    """One GPU that is busy for a quarter of the time, if nothing else is said."""
    nvml = FakeNvml([25.0] if gpus is None else gpus)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(tensor_cores, "MIN_INTERVAL_S", 0.0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return nvml


def shares(collector) -> dict[str, float]:
    return {sample.labels["gpu"]: sample.value for family in collector.collect() for sample in family.samples}


def test_each_reading_says_what_was_since_the_one_before(monkeypatch):
    nvml = fake_nvml(monkeypatch, [25.0, 100.0])
    collector = open_tensor_cores()
    assert shares(collector) == {"0": 0.25, "1": 1.0}
    nvml.gpus[0] = 0.0
    assert shares(collector) == {"0": 0.0, "1": 1.0}


def test_readings_that_follow_at_once_repeat_the_last_one(monkeypatch):
    nvml = fake_nvml(monkeypatch)
    collector = open_tensor_cores()
    assert shares(collector) == {"0": 0.25}
    monkeypatch.setattr(tensor_cores, "MIN_INTERVAL_S", 1000.0)
    nvml.gpus[0] = 75.0
    assert shares(collector) == {"0": 0.25}


@pytest.mark.parametrize("silent", [-1, -2])
def test_a_gpu_that_cannot_say_is_left_out_rather_than_zero(monkeypatch, silent):
    nvml = fake_nvml(monkeypatch, [50.0, silent])
    collector = open_tensor_cores()
    assert shares(collector) == {"0": 0.5}
    nvml.gpus[0] = silent
    assert list(collector.collect()) == []


@pytest.mark.parametrize("gpus", [[], [None]])
def test_without_counters_there_is_no_metric(monkeypatch, gpus):
    fake_nvml(monkeypatch, gpus)
    assert open_tensor_cores() is None


def test_without_the_package_or_the_driver_there_is_none(monkeypatch):
    nvml = fake_nvml(monkeypatch)
    monkeypatch.setattr(nvml, "nvmlInit", lambda: (_ for _ in ()).throw(NVMLError("no driver")))
    assert open_tensor_cores() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_tensor_cores() is None


@pytest.mark.parametrize(("chosen", "names"), [("1", ["1"]), ("GPU-2, 0", ["GPU-2", "0"]), ("", None), ("7", None)])
def test_the_gpus_are_those_that_the_process_sees(monkeypatch, chosen, names):
    fake_nvml(monkeypatch, [10.0, 20.0, 30.0])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    collector = open_tensor_cores()
    assert names == (None if collector is None else list(shares(collector)))


def test_a_registry_takes_it(monkeypatch):
    fake_nvml(monkeypatch)
    registry = CollectorRegistry()
    registry.register(open_tensor_cores())
    assert registry.get_sample_value("gpu_tensor_core_utilization", {"gpu": "0"}) == 0.25
