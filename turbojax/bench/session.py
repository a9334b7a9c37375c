"""A benchmark from start to end: rates, model, engine, findings as they come, results written after each."""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
from rich.console import Console

from pallas_kernels import backend
from turbojax import __version__
from turbojax.assembly import open_model, progress_bar
from turbojax.bench.engine import BenchEngine, open_engine
from turbojax.bench.kernels import KernelTimes
from turbojax.bench.plot import plot_roofline
from turbojax.bench.report import ResultFile, Row, print_kernels, print_latencies, print_rows
from turbojax.bench.roofline import Rates, measure_rates
from turbojax.bench.settings import DEFAULT_WEIGHTS, Settings
from turbojax.configs import EngineConfig
from turbojax.figure import require_matplotlib
from turbojax.models.model import Model
from turbojax.models.random_model import random_model
from turbojax.sharding import placements

TOP_KERNELS = 12
Say = Callable[[str], None]


@dataclass(frozen=True)
class Bench:
    """What is measured: a model, made or loaded in `model_s` seconds, on a device of these rates.

    `say` hears one line about each phase.
    """

    settings: Settings
    model: Model
    model_s: float
    rates: Rates
    say: Say

    @contextmanager
    def engine(self, config: EngineConfig) -> Iterator[BenchEngine]:
        """An engine for a load."""
        start = time.perf_counter()
        with open_engine(self.model, config) as engine:
            engine.ready_s = self.model_s + time.perf_counter() - start
            self.say(f"{engine.parts.memory}; weights and engine ready after {engine.ready_s:.1f} s")
            num_compiled = engine.num_compiled
            yield engine
            if engine.num_compiled > num_compiled:
                self.say(f"{engine.num_compiled - num_compiled} steps were compiled while the engine ran")


@dataclass(frozen=True)
class Finding:
    """Rows, and what explains them."""

    rows: list[Row]
    kernels: KernelTimes | None = None
    latencies: dict[str, dict[str, float]] = field(default_factory=dict)

    def show(self, console: Console) -> None:
        print_rows(self.rows, console)
        if self.latencies:
            print_latencies(self.latencies, console)
        if self.kernels is not None:
            print_kernels(self.kernels.top(TOP_KERNELS), self.kernels.total_s, console)


def run(
    settings: Settings, measure: Callable[[Bench], Iterator[Finding]], *, command: str, console: Console, say: Say
) -> None:
    """Runs a benchmark, shows each finding and adds it to the results before the next one is measured.

    Args:
        settings: what was asked for.
        measure: the benchmark.
        command: that asked, for the results.
        console: takes the tables.
        say: hears one line about each phase.

    Raises:
        TurbojaxError, CheckpointError: the model, the load or a file cannot be used.
    """
    results = None if settings.json is None else ResultFile(settings.json, backend.device_kind())
    if settings.plot is not None:
        require_matplotlib()
    bench = open_bench(settings, say)
    rows: list[Row] = []
    for finding in measure(bench):
        rows += finding.rows
        finding.show(console)
        if results is not None:
            results.update(finding.rows, header(command, bench.rates))
    if settings.plot is not None:
        plot_roofline(settings.plot, rows, bench.rates, backend.device_kind())


def header(command: str, rates: Rates) -> dict[str, Any]:
    """What results say about the run beside their rows."""
    return {
        "versions": {"turbojax": __version__, "jax": jax.__version__, "python": platform.python_version()},
        "date": datetime.date.today().isoformat(),
        "command": command,
        "bytes_per_s": rates.bytes_per_s,
        "flops_per_s": rates.flops_per_s,
    }


def open_bench(settings: Settings, say: Say) -> Bench:
    """Measures the device's rates and makes the model.

    Raises:
        TurbojaxError, CheckpointError: there is no such model.
    """
    [placement] = placements(settings.num_shards, 1)
    rates = device_rates(settings)
    say(f"reads {rates.bytes_per_s / 1e12:.3g} TB/s, dots {rates.flops_per_s / 1e12:.3g} TFLOP/s")
    config, start = settings.config(), time.perf_counter()
    if settings.shape is not None:
        model = random_model(
            settings.shape, settings.weights or DEFAULT_WEIGHTS, config.dtype, config.kv_bits,
            kv_hadamard=bool(config.kv_hadamard), placement=placement,
        )  # fmt: skip
    else:
        from turbojax.hub import resolve_model

        path = resolve_model(settings.model)
        with progress_bar(f"loading {path.name}", total=1) as advance:
            model = open_model(path, config, advance, placement)
    jax.block_until_ready(model.weights)
    model_s = time.perf_counter() - start
    say(f"{settings.shape or settings.model}: weights after {model_s:.1f} s")
    return Bench(settings, model, model_s, rates, say)


def device_rates(settings: Settings) -> Rates:
    """The rates that were given; those that were not are measured."""
    if settings.bytes_per_s is not None and settings.flops_per_s is not None:
        return Rates(settings.bytes_per_s, settings.flops_per_s)
    measured = measure_rates()
    return Rates(settings.bytes_per_s or measured.bytes_per_s, settings.flops_per_s or measured.flops_per_s)
