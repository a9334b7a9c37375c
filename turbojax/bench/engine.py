"""An engine to measure: requests go in as token ids below the pipeline, and every token's arrival is written down."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from turbojax.assembly import EngineParts, assemble_model
from turbojax.bench.errors import BenchError
from turbojax.bench.latency import Trace
from turbojax.bench.load import LoadRequest
from turbojax.configs import EngineConfig, GenerationConfig
from turbojax.engine.guides import Guide
from turbojax.engine.loop import EngineLoop
from turbojax.engine.request import Progress, Request, Sink
from turbojax.models.model import Model
from turbojax.request_builder import sampling_of


class BenchEngine:
    """The engine's own loop, scheduler and runner, without text.

    Attributes:
        parts, config: what it is made of.
        ready_s: seconds that model and engine took to be ready, if somebody wrote it down.
    """

    ready_s: float | None = None

    def __init__(self, parts: EngineParts, config: EngineConfig) -> None:
        self.parts, self.config = parts, config
        self._loop = EngineLoop(parts.scheduler, parts.runner)
        self._request_ids = itertools.count()

    def submit(self, request: LoadRequest, sampling: GenerationConfig, sink: Sink, guide: Guide | None = None) -> None:
        """Hands over a request that nothing but its length ends (or a sink that returns True, or its guide).

        Raises:
            RequestError: it is too long for the engine.
        """
        num_prompt_tokens = len(request.prompt_ids)
        self.parts.scheduler.check(num_prompt_tokens, "a request of the load")
        self._loop.submit(
            Request(
                request_id=next(self._request_ids),
                prompt_ids=request.prompt_ids,
                sampling=sampling_of(sampling),
                stop_token_ids=(),
                max_len=num_prompt_tokens + request.num_new_tokens,
                guide=guide,
                sink=sink,
            )
        )

    @property
    def num_compiled(self) -> int:
        """Steps compiled, or read from disk, so far: none should be while something is measured."""
        return self.parts.scheduler.metrics.num_compilations

    @property
    def has_read_all(self) -> bool:
        """Whether an earlier process had compiled every step so far."""
        metrics = self.parts.scheduler.metrics
        return metrics.num_programs_read == metrics.num_compilations

    def close(self) -> None:
        self._loop.close()


@contextmanager
def open_engine(model: Model, config: EngineConfig) -> Iterator[BenchEngine]:
    """The engine of a model; closed at the end."""
    engine = BenchEngine(assemble_model(model, config), config)
    try:
        yield engine
    finally:
        engine.close()


def run_load(
    engine: BenchEngine,
    load: Sequence[LoadRequest],
    sampling: GenerationConfig,
    *,
    concurrency: int | None = None,
    arrivals_s: np.ndarray | None = None,
    on_finish: Callable[[], object] = lambda: None,
    guide: Callable[[], Guide | None] = lambda: None,
) -> list[Trace]:
    """Runs the requests and returns what was heard of each.

    Args:
        engine: the engine.
        load: the requests.
        sampling: how all of them pick tokens.
        concurrency: a request is handed over as another finishes, so that this many are under way (closed loop).
        arrivals_s: when each is handed over instead, counted from now (open loop).
        on_finish: called as each finishes.
        guide: makes a fresh one for each.

    Raises:
        BenchError: a request failed.
    """
    finished: queue.SimpleQueue[Progress] = queue.SimpleQueue()
    traces: list[Trace] = []
    start, num_waited_for = time.perf_counter(), 0

    def wait_for_one() -> None:
        nonlocal num_waited_for
        last = finished.get()
        if last.error is not None:
            raise BenchError(f"a request failed: {last.error}") from last.error
        num_waited_for += 1
        on_finish()

    for i, request in enumerate(load):
        if arrivals_s is not None:
            time.sleep(max(0.0, start + arrivals_s[i] - time.perf_counter()))
        elif concurrency is not None and i - num_waited_for >= concurrency:
            wait_for_one()
        trace = Trace(time.perf_counter(), len(request.prompt_ids))
        traces.append(trace)
        engine.submit(request, sampling, recorder(trace, finished.put), guide())
    while num_waited_for < len(load):
        wait_for_one()
    return traces


def recorder(trace: Trace, on_end: Callable[[Progress], None]) -> Sink:
    """A sink that writes a request's tokens down and reports its end."""

    def sink(progress: Progress) -> bool:
        if progress.token_ids:
            trace.events.append((time.perf_counter(), len(progress.token_ids)))
        if progress.finish_reason is not None:
            on_end(progress)
        return False

    return sink
