"""`bench guided`: what answers that follow a JSON schema cost: tokens a second beside free ones, and time for masks."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from turbojax.assembly import eos_ids
from turbojax.bench.engine import BenchEngine, run_load
from turbojax.bench.errors import BenchError
from turbojax.bench.latency import Summary, Trace
from turbojax.bench.load import synthetic_load
from turbojax.bench.report import Row, make_row
from turbojax.bench.serving import positive
from turbojax.bench.session import Bench, Finding
from turbojax.bench.settings import Settings
from turbojax.configs import EngineConfig
from turbojax.engine.guides import Guide
from turbojax.guided import GuideCompiler
from turbojax.tokenizer import load_tokenizer

# Long enough that no answer comes to its end, so that guided and free ones have the same length.
ENDLESS_SCHEMA = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 24}, "count": {"type": "integer"}},
        "required": ["name", "count"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True)
class Guided:
    """What to measure.

    Attributes:
        batches: sequences at once, one measurement each.
        input_len, output_len: tokens of each prompt, and most of each answer.
        schema: that answers follow; one that lets them end makes guided answers shorter than free ones.
    """

    batches: tuple[int, ...]
    input_len: int
    output_len: int
    schema: Mapping[str, Any] = field(default_factory=lambda: ENDLESS_SCHEMA)

    def __post_init__(self) -> None:
        positive(batch=min(self.batches, default=0), input_len=self.input_len)
        if self.output_len < 2:
            raise BenchError(f"output-len: {self.output_len}, an integer >= 2 is expected")

    def config(self, settings: Settings) -> EngineConfig:
        """An engine for the largest batch.

        Raises:
            BenchError: random weights have no tokenizer.
        """
        if settings.model is None:
            raise BenchError("a guide reads the model's tokenizer, which a shape has not: give model")
        config = settings.config(max_batch_size=max(self.batches))
        return dataclasses.replace(config, session_len=self.input_len + self.output_len + 1)


def read_schema(path: Path) -> dict[str, Any]:
    """A JSON schema from a file.

    Raises:
        BenchError: it is none.
    """
    try:
        schema = json.loads(path.read_bytes())
    except ValueError as error:
        raise BenchError(f"{path} is no JSON: {error}") from error
    if not isinstance(schema, dict):
        raise BenchError(f"{path} holds {type(schema).__name__}; a JSON schema, an object, is expected")
    return schema


class TimedGuide:
    """A guide that notes how long the host took for each mask, and to take tokens in."""

    def __init__(self, inner: Guide, times_s: list[float]) -> None:
        self._inner, self._times_s, self.vocab_size = inner, times_s, inner.vocab_size
        self._advance_s = 0.0

    def advance(self, token_ids: Sequence[int]) -> None:
        start_s = time.perf_counter()
        self._inner.advance(token_ids)
        self._advance_s = time.perf_counter() - start_s

    def mask(self) -> np.ndarray:
        start_s = time.perf_counter()
        mask = self._inner.mask()
        self._times_s.append(self._advance_s + time.perf_counter() - start_s)
        return mask

    @property
    def is_finished(self) -> bool:
        return self._inner.is_finished


def measure_guided(bench: Bench, plan: Guided) -> Iterator[Finding]:
    """For each batch: free answers, guided ones, how much of the rate these keep, and the masks."""
    model, times_s = bench.model, list[float]()
    tokenizer = load_tokenizer(model.path)
    if tokenizer is None:
        raise BenchError(f"{model.path}: the model has no tokenizer, which a guide reads")
    compiler = GuideCompiler(tokenizer, model.spec.vocab_size, eos_ids(model.config, model.generation_config))
    response_format = {"type": "json_schema", "json_schema": {"name": "bench", "schema": dict(plan.schema)}}
    start_s = time.perf_counter()
    compiler.guide(response_format)
    compile_s = time.perf_counter() - start_s

    def guide() -> Guide:
        return TimedGuide(compiler.guide(response_format), times_s)

    with bench.engine(plan.config(bench.settings)) as engine:
        for batch in plan.batches:
            free = rate_of(bench, engine, plan, batch, lambda: None, times_s)
            guided = rate_of(bench, engine, plan, batch, guide, times_s)
            yield Finding(rows_of(bench, batch, free, guided, times_s, compile_s))


def rate_of(
    bench: Bench,
    engine: BenchEngine,
    plan: Guided,
    batch: int,
    guide: Callable[[], Guide | None],
    times_s: list[float],
) -> float:
    """Tokens a second of a batch that starts together, after another one that warms up and whose times do not count."""
    rate, vocab_size = 0.0, bench.model.spec.vocab_size
    for seed in (bench.settings.seed + 1, bench.settings.seed):
        times_s.clear()
        load = synthetic_load(batch, plan.input_len, plan.output_len, vocab_size=vocab_size, seed=seed)
        rate = decode_rate(run_load(engine, load, bench.settings.generation(), guide=guide))
    return rate


def decode_rate(traces: Sequence[Trace]) -> float:
    """Tokens a second from the first one of all until the last."""
    seconds = max(trace.events[-1][0] for trace in traces) - min(trace.events[0][0] for trace in traces)
    num_tokens = sum(trace.num_output_tokens - trace.events[0][1] for trace in traces)
    if not num_tokens:
        raise BenchError("no answer had a second token: the schema lets them end at once")
    return num_tokens / seconds


def rows_of(
    bench: Bench, batch: int, free: float, guided: float, times_s: Sequence[float], compile_s: float
) -> list[Row]:
    """Rates in tokens a second, and the host's time for a token's mask."""
    masks = Summary.of(1e3 * one for one in times_s)
    assert masks is not None, "guided answers have masks"
    case = bench.settings.case
    return [
        make_row(case(f"free b{batch}"), free, "tok/s", None),
        make_row(case(f"guided b{batch}"), guided, "tok/s", None, compile_ms=1e3 * compile_s),
        make_row(case(f"guided over free b{batch}"), guided / free, "ratio", 1.0),
        make_row(
            case(f"mask b{batch}"), masks.p50, "ms", None, masks=len(times_s), mean=masks.mean, p95=masks.p95,
            p99=masks.p99,
        ),
    ]  # fmt: skip
