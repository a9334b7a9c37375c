"""`bench prefill`, `bench throughput` and `bench latency`: requests through the engine, and what users wait for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from turbojax.assembly import progress_bar
from turbojax.bench.engine import BenchEngine, run_load
from turbojax.bench.errors import BenchError
from turbojax.bench.latency import Trace, latencies_ms
from turbojax.bench.load import Encode, LoadRequest, arrival_times, read_load, synthetic_load
from turbojax.bench.report import make_row
from turbojax.bench.roofline import Work, decode_work, prefill_work
from turbojax.bench.session import Bench, Finding
from turbojax.bench.settings import Settings
from turbojax.configs import EngineConfig
from turbojax.core.weights import Weights


def positive(**numbers: int | None) -> None:
    """Raises BenchError where a number is below 1."""
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise BenchError(f"{name.replace('_', '-')}: {value}, an integer >= 1 is expected")


# -- prefill ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prefill:
    """Prompts of each of these lengths, alone in the engine, each several times."""

    num_tokens: tuple[int, ...]
    num_repeats: int

    def __post_init__(self) -> None:
        positive(tokens=min(self.num_tokens, default=0), repeats=self.num_repeats)

    def config(self, settings: Settings) -> EngineConfig:
        return dataclasses.replace(settings.config(max_batch_size=1), session_len=max(self.num_tokens) + 1)


def measure_prefill(bench: Bench, plan: Prefill) -> Iterator[Finding]:
    """Time to the first token: the median of the repeats, after one more that warms up."""
    vocab_size, sampling, seed = bench.model.spec.vocab_size, bench.settings.generation(), bench.settings.seed
    with bench.engine(plan.config(bench.settings)) as engine:
        for num_tokens in plan.num_tokens:
            prompts = synthetic_load(plan.num_repeats + 1, num_tokens, 1, vocab_size=vocab_size, seed=seed)
            traces = run_load(engine, prompts, sampling, concurrency=1)[1:]
            work, ttft_s = prefill_work(bench.model.weights, num_tokens), median(trace.ttft_s for trace in traces)
            row = make_row(
                bench.settings.case(f"ttft {num_tokens}", names_kv=False), 1e3 * ttft_s, "ms",
                1e3 * work.floor_s(bench.rates), tokens_per_s=num_tokens / ttft_s, seconds=ttft_s,
                num_bytes=work.num_bytes, num_flops=work.num_flops, kv=bench.settings.kv,
            )  # fmt: skip
            yield Finding([row])


# -- throughput and latency -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Serving:
    """A load and how it comes.

    Attributes:
        kind: of the case: "throughput" (output tokens/s) or "latency" (mean time of a request, end to end).
        num_requests, input_len, output_len: of a synthetic load.
        file: of requests instead.
        concurrency: requests under way at any time; None with a rate.
        rate: requests a second, which come as a Poisson process does; None with a concurrency.
    """

    kind: str
    num_requests: int
    input_len: int
    output_len: int
    file: Path | None = None
    concurrency: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        positive(
            requests=self.num_requests, input_len=self.input_len, output_len=self.output_len,
            concurrency=self.concurrency,
        )  # fmt: skip
        if (self.concurrency is None) == (self.rate is None):
            raise BenchError("give either concurrency (a closed loop) or rate (requests come when they come)")
        if self.rate is not None:
            arrival_times(1, self.rate)  # checks it

    def load(self, bench: Bench) -> list[LoadRequest]:
        """The requests.

        Raises:
            BenchError: the file has none, or a broken line.
        """
        vocab_size, seed = bench.model.spec.vocab_size, bench.settings.seed
        if self.file is not None:
            return read_load(self.file, vocab_size=vocab_size, encode=encoder_of(bench), seed=seed)
        return synthetic_load(self.num_requests, self.input_len, self.output_len, vocab_size=vocab_size, seed=seed)

    @property
    def name(self) -> str:
        lengths = f"{self.input_len}/{self.output_len}" if self.file is None else self.file.stem
        return f"{self.kind} {lengths}" + ("" if self.rate is None else f" rate {self.rate:g}")


def encoder_of(bench: Bench) -> Encode | None:
    """Text -> token ids; None where the model has no tokenizer."""
    from turbojax.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(bench.model.path) if bench.settings.shape is None else None
    return None if tokenizer is None else tokenizer.encode


def measure_serving(bench: Bench, plan: Serving) -> Iterator[Finding]:
    """Runs the load once, after a short request that warms up."""
    load = plan.load(bench)
    session_len = max(len(request.prompt_ids) + max(2, request.num_new_tokens) for request in load)
    defaults = {} if plan.concurrency is None else {"max_batch_size": plan.concurrency}
    config = dataclasses.replace(bench.settings.config(**defaults), session_len=session_len)
    arrivals_s = None if plan.rate is None else arrival_times(len(load), plan.rate, bench.settings.seed)
    with bench.engine(config) as engine:
        traces = run_all(bench, engine, load, plan.concurrency, arrivals_s)
    seconds = max(trace.events[-1][0] for trace in traces) - min(trace.arrival_s for trace in traces)
    latencies = latencies_ms(traces)
    floor_s = None
    if plan.concurrency is not None:
        num_at_once = min(plan.concurrency, config.max_batch_size or plan.concurrency, len(load))
        floor_s = load_work(bench.model.weights, load, num_at_once).floor_s(bench.rates)
    num_input, num_output = sum(t.num_input_tokens for t in traces), sum(t.num_output_tokens for t in traces)
    details: dict[str, Any] = latencies | {
        "requests": len(load), "concurrency": plan.concurrency, "rate": plan.rate, "duration_s": seconds,
        "requests_per_s": len(load) / seconds, "input_tokens_per_s": num_input / seconds,
        "output_tokens_per_s": num_output / seconds,
    }  # fmt: skip
    case = bench.settings.case(plan.name)
    if plan.kind == "latency":
        floor = None if floor_s is None else 1e3 * floor_s / len(load)
        row = make_row(case, latencies["e2e_ms"]["mean"], "ms", floor, **details)
    else:
        row = make_row(
            case, num_output / seconds, "tok/s", None if floor_s is None else num_output / floor_s, **details
        )
    yield Finding([row], latencies=latencies)


def run_all(
    bench: Bench,
    engine: BenchEngine,
    load: Sequence[LoadRequest],
    concurrency: int | None,
    arrivals_s: np.ndarray | None,
) -> list[Trace]:
    """The load, with a bar."""
    sampling, first = bench.settings.generation(), len(load[0].prompt_ids)
    warm_up = synthetic_load(1, first, 2, vocab_size=bench.model.spec.vocab_size, seed=bench.settings.seed + 1)
    run_load(engine, warm_up, sampling)
    with progress_bar("requests", total=len(load)) as advance:
        return run_load(
            engine, load, sampling, concurrency=concurrency, arrivals_s=arrivals_s, on_finish=lambda: advance(1)
        )


def load_work(weights: Weights, load: Sequence[LoadRequest], num_at_once: int) -> Work:
    """The least work for a load of which so many requests run at once.

    Every prompt once, and full batches of decode steps for all tokens after each request's first, at the mean length
    that those tokens see.
    """
    work = Work(())
    lengths, counts = np.unique([len(request.prompt_ids) for request in load], return_counts=True)
    for length, count in zip(lengths.tolist(), counts.tolist(), strict=True):
        work += prefill_work(weights, length) * count
    num_decoded = np.array([request.num_new_tokens - 1 for request in load], np.float64)
    if not num_decoded.any():
        return work
    # Token i after the first sees the prompt, the first token, and those between: the mean over i.
    seen = np.array([len(request.prompt_ids) for request in load]) + (num_decoded + 1) / 2
    mean_len = float((seen * num_decoded).sum() / num_decoded.sum())
    num_steps = float(num_decoded.sum()) / num_at_once
    return work + decode_work(weights, [mean_len] * num_at_once) * num_steps
