"""`bench decode`: steady decode steps over a grid of batch and context, and what the engine adds to their kernels."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from dataclasses import dataclass

from pallas_kernels import backend
from turbojax.bench.device_loop import time_loop
from turbojax.bench.engine import BenchEngine
from turbojax.bench.errors import BenchError
from turbojax.bench.report import Row, length_name, make_row
from turbojax.bench.roofline import Work, decode_work
from turbojax.bench.session import Bench, Finding
from turbojax.bench.settings import Settings
from turbojax.bench.steady import num_new_tokens, time_decode
from turbojax.configs import EngineConfig, GenerationConfig


@dataclass(frozen=True)
class Grid:
    """What to time.

    Attributes:
        cells: (batch, context) pairs, in order.
        num_steps: of each window.
        loop: also the same steps in a bare loop on the device.
        profile: also the kernels of such a step.
        against_greedy: also greedy steps, beside sampled ones.
    """

    cells: tuple[tuple[int, int], ...]
    num_steps: int
    loop: bool = False
    profile: bool = False
    against_greedy: bool = False

    def config(self, settings: Settings) -> EngineConfig:
        """An engine that holds every cell.

        Raises:
            BenchError: no engine does.
        """
        if not self.cells or min(min(cell) for cell in self.cells) < 1 or self.num_steps < 1:
            raise BenchError("batch, context and steps: integers >= 1 are expected")
        if self.against_greedy and not settings.sampling:
            raise BenchError("against-greedy compares sampled steps: give top-p, top-k, min-p or temperature too")
        if self.profile and not backend.on_gpu():
            raise BenchError("profile sums GPU kernels, and needs an NVIDIA GPU")
        if (self.loop or self.profile) and settings.num_shards > 1:
            raise BenchError(f"loop and profile run on one device, and tp is {settings.num_shards}")
        largest = max(batch for batch, _ in self.cells)
        config = settings.config(max_batch_size=largest)
        if config.max_batch_size is not None and config.max_batch_size < largest:
            raise BenchError(f"max-batch-size {config.max_batch_size} is below batch {largest}")
        needs = [c + num_new_tokens(b, c, self.num_steps, config) for b, c in self.cells]
        return dataclasses.replace(config, session_len=max(needs))


@dataclass(frozen=True)
class Timed:
    """A cell and the seconds of its step; `name` tells it apart from others of its kind: "b64 4k"."""

    batch: int
    context: int
    name: str
    work: Work
    step_s: float


def measure(bench: Bench, grid: Grid) -> Iterator[Finding]:
    """Times every cell in one engine, then what is compared with it."""
    timed: list[Timed] = []
    yield from time_grid(bench, grid, timed)
    gc.collect()  # the engine's objects refer to one another, and to its pool: the memory is needed again
    for cell in timed if grid.loop or grid.profile else ():
        yield compare(bench, cell, grid)


def time_grid(bench: Bench, grid: Grid, timed: list[Timed]) -> Iterator[Finding]:
    """Times every cell in one engine; adds them to `timed`."""
    sampling = bench.settings.generation()
    with bench.engine(grid.config(bench.settings)) as engine:
        if engine.ready_s is not None and engine.num_compiled:
            yield Finding([start_row(bench, engine, engine.ready_s)])
        for batch, context in grid.cells:
            cell = time_cell(bench, engine, batch, context, sampling, grid.num_steps)
            timed.append(cell)
            yield Finding([decode_row(bench, cell)])
            if grid.against_greedy:
                greedy = time_cell(bench, engine, batch, context, GenerationConfig(), grid.num_steps)
                yield Finding([decode_row(bench, greedy, sampled=False), sampling_row(bench, cell, greedy)])


def start_row(bench: Bench, engine: BenchEngine, ready_s: float) -> Row:
    """Seconds until an engine that compiles ahead was ready; warm where an earlier one left every program on disk."""
    name = f"{'warm' if engine.has_read_all else 'cold'} start to ready"
    return make_row(bench.settings.case(name, sampled=False), ready_s, "s", None)


def time_cell(
    bench: Bench, engine: BenchEngine, batch: int, context: int, sampling: GenerationConfig, num_steps: int
) -> Timed:
    """One cell in the engine."""
    found = time_decode(engine, batch, context, sampling, num_steps=num_steps, seed=bench.settings.seed)
    work = decode_work(bench.model.weights, found.lengths)
    return Timed(batch, context, f"b{batch} {length_name(context)}", work, found.seconds / found.num_steps)


def decode_row(bench: Bench, cell: Timed, kind: str = "decode", *, sampled: bool = True) -> Row:
    """Tokens/s, against those of steps at the floor."""
    floor_s = cell.work.floor_s(bench.rates)
    return make_row(
        bench.settings.case(f"{kind} {cell.name}", sampled=sampled), cell.batch / cell.step_s, "tok/s",
        cell.batch / floor_s, step_ms=1e3 * cell.step_s, floor_ms=1e3 * floor_s, seconds=cell.step_s,
        num_bytes=cell.work.num_bytes, num_flops=cell.work.num_flops,
    )  # fmt: skip


def sampling_row(bench: Bench, sampled: Timed, greedy: Timed) -> Row:
    """How much of the greedy rate sampling keeps."""
    name = bench.settings.case(f"sampled over greedy {sampled.name}")
    return make_row(name, greedy.step_s / sampled.step_s, "ratio", 1.0)


def compare(bench: Bench, cell: Timed, grid: Grid) -> Finding:
    """The engine's step beside the same step in a bare loop, and beside its kernels alone."""
    found = time_loop(
        bench.model.weights, cell.batch, cell.context, bench.settings.generation(),
        num_steps=grid.num_steps, page_len=bench.settings.config().cache_block_seq_len, profile=grid.profile,
    )  # fmt: skip
    work = decode_work(bench.model.weights, [found.length] * cell.batch)
    alone = Timed(cell.batch, cell.context, cell.name, work, found.step_s)
    rows = []
    if grid.loop:
        rows.append(decode_row(bench, alone, "loop"))
        name = bench.settings.case(f"engine over loop {cell.name}")
        rows.append(make_row(name, alone.step_s / cell.step_s, "ratio", 1.0))
    if found.kernels is not None:
        name = bench.settings.case(f"kernels over step {cell.name}")
        kernels_s = found.kernels.total_s
        rows.append(make_row(name, kernels_s / cell.step_s, "ratio", 1.0, kernels_ms=1e3 * kernels_s))
    return Finding(rows, found.kernels)
