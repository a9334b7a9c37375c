"""`bench interleave`: what running streams feel of a long prompt that is prefilled beside them in chunks."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from turbojax.assembly import progress_bar
from turbojax.bench.engine import BenchEngine, run_load
from turbojax.bench.errors import BenchError
from turbojax.bench.latency import Summary
from turbojax.bench.load import synthetic_load
from turbojax.bench.report import length_name, make_row
from turbojax.bench.serving import positive
from turbojax.bench.session import Bench, Finding
from turbojax.bench.settings import Settings
from turbojax.configs import EngineConfig
from turbojax.engine.limits import LEAST_SHARE
from turbojax.engine.request import Progress, Sink

CHUNK = 512
SLOTS_STEP = 8  # rows that a GPU's kernels take together: another number of slots would have them padded
# Tokens of a stream in which it may see a prompt come and go beside the steps that compute it.
SLACK_TOKENS = 64

Window = tuple[float, float]


@dataclass(frozen=True)
class Interleave:
    """Streams that decode all the time, and a long prompt from time to time.

    Attributes:
        num_streams: sequences that decode.
        context: tokens of the prompt of each.
        num_prompt_tokens: of the long prompt; it is prefilled `max_prefill_token_num` tokens a step (512 by default).
        num_steps: tokens of each stream between two long prompts, while nothing disturbs it.
        num_repeats: long prompts, after one more that warms up.
    """

    num_streams: int
    context: int
    num_prompt_tokens: int
    num_steps: int
    num_repeats: int

    def __post_init__(self) -> None:
        positive(
            streams=self.num_streams, context=self.context, prompt=self.num_prompt_tokens, steps=self.num_steps,
            repeats=self.num_repeats,
        )  # fmt: skip

    def num_new_tokens(self, config: EngineConfig) -> int:
        """Tokens that a stream generates at most until all is measured; the first one sees the others' prompts, too."""
        chunk = -(-(config.max_prefill_token_num or CHUNK) // 2)  # of which the streams take up to a half
        num_before = -(-self.num_streams * self.context // chunk)
        num_chunks = -(-self.num_prompt_tokens * LEAST_SHARE // chunk)  # the least of one behind a long history
        return num_before + (self.num_repeats + 1) * (self.num_steps + num_chunks + SLACK_TOKENS)

    def config(self, settings: Settings) -> EngineConfig:
        """A token a call: gaps between tokens that come together would say nothing."""
        num_slots = -(-(self.num_streams + 1) // SLOTS_STEP) * SLOTS_STEP
        defaults = {"max_batch_size": num_slots, "max_prefill_token_num": CHUNK, "num_decode_steps": 1}
        config = settings.config(**defaults)
        longest = max(self.num_prompt_tokens, self.context + self.num_new_tokens(config))
        return dataclasses.replace(config, session_len=longest + 2)


class Streams:
    """When the tokens of each stream came. Sinks run in the engine's thread."""

    def __init__(self, num_streams: int) -> None:
        self.times_s: list[list[float]] = [[] for _ in range(num_streams)]
        self._changed, self._is_over, self._num_ended = threading.Condition(), False, 0
        self._error: Exception | None = None

    def sink_of(self, index: int) -> Sink:
        def sink(progress: Progress) -> bool:
            now = time.perf_counter()
            self.times_s[index] += [now] * len(progress.token_ids)
            with self._changed:
                if progress.finish_reason is not None and not self._is_over:
                    self._error = progress.error or BenchError("a stream ended before all was measured")
                self._num_ended += self._is_over or progress.finish_reason is not None
                self._changed.notify_all()
            return self._is_over

        return sink

    def wait_for_tokens(self, num_tokens: int) -> None:
        """Waits until every stream has so many more tokens.

        Raises:
            BenchError: a stream ended.
        """
        goals = [len(times) + num_tokens for times in self.times_s]
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._error is not None
                    or all(len(times) >= goal for times, goal in zip(self.times_s, goals, strict=True))
                )
            )
        self._check()

    def end(self) -> None:
        """Ends all streams at their next token.

        Raises:
            BenchError: a stream had ended already.
        """
        with self._changed:
            self._is_over = True
            self._changed.wait_for(lambda: self._num_ended >= len(self.times_s))
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise BenchError(f"a stream failed: {self._error}") from self._error

    def gaps_ms(self, windows: Sequence[Window]) -> list[float]:
        """Milliseconds before each token that came in one of the windows."""
        pairs = [pair for times in self.times_s for pair in pairwise(times)]
        return [1e3 * (later - earlier) for start, end in windows for earlier, later in pairs if start < later <= end]


def measure_interleave(bench: Bench, plan: Interleave) -> Iterator[Finding]:
    """Gaps between the tokens of streams: while only they run, and while a long prompt is prefilled."""
    config, streams = plan.config(bench.settings), Streams(plan.num_streams)
    vocab_size, seed, sampling = bench.model.spec.vocab_size, bench.settings.seed, bench.settings.generation()
    num_new = plan.num_new_tokens(config)
    with bench.engine(config) as engine:
        check_room(engine, plan, num_new)
        load = synthetic_load(plan.num_streams, plan.context, num_new, vocab_size=vocab_size, seed=seed)
        for i, request in enumerate(load):
            engine.submit(request, sampling, streams.sink_of(i))
        streams.wait_for_tokens(1)
        quiet, busy = list[Window](), list[Window]()
        prompts = synthetic_load(plan.num_repeats + 1, plan.num_prompt_tokens, 1, vocab_size=vocab_size, seed=seed + 1)
        with progress_bar("long prompts", total=len(prompts)) as advance:
            for prompt in prompts:
                start = time.perf_counter()
                streams.wait_for_tokens(plan.num_steps)
                middle = time.perf_counter()
                (trace,) = run_load(engine, [prompt], sampling)
                quiet.append((start, middle))
                busy.append((middle, trace.events[0][0]))
                advance(1)
        streams.end()
    yield finding(bench, plan, config, streams, quiet[1:], busy[1:])


def finding(
    bench: Bench, plan: Interleave, config: EngineConfig, streams: Streams, quiet: list[Window], busy: list[Window]
) -> Finding:
    alone, beside = Summary.of(streams.gaps_ms(quiet)), Summary.of(streams.gaps_ms(busy))
    if alone is None or beside is None:
        raise BenchError("no token came while the long prompt was prefilled: give a longer one, or a smaller chunk")
    ttft_s = sum(end - start for start, end in busy) / len(busy)
    prompt, streams_name = length_name(plan.num_prompt_tokens), f"b{plan.num_streams} {length_name(plan.context)}"
    name = f"interleave {prompt} prompt, chunk {config.max_prefill_token_num}, {streams_name}"
    details = {"itl_alone_ms": asdict(alone), "itl_beside_ms": asdict(beside), "ttft_s": ttft_s}
    ratio = make_row(
        bench.settings.case(f"{name}, p99 beside over alone"), beside.p99 / alone.p99, "ratio", None, **details
    )
    rows = [ratio, make_row(bench.settings.case(f"{name}, ttft"), 1e3 * ttft_s, "ms", None)]
    latencies = {"itl_alone_ms": asdict(alone), "itl_beside_ms": asdict(beside)}
    return Finding(rows, latencies=latencies)


def check_room(engine: BenchEngine, plan: Interleave, num_new: int) -> None:
    """Whether all fits at once: nobody must give way while gaps are timed.

    Raises:
        BenchError: it does not, with the numbers.
    """
    memory, limit = engine.parts.memory, engine.parts.scheduler.max_len
    longest = max(plan.num_prompt_tokens + 1, plan.context + num_new)
    if longest > limit:
        raise BenchError(f"a sequence of {longest:,} tokens is beyond the limit of {limit:,}")
    num_pages = -(-(plan.num_prompt_tokens + 1) // memory.page_len)
    num_pages += plan.num_streams * -(-(plan.context + num_new) // memory.page_len)
    if num_pages >= memory.num_pages:
        raise BenchError(
            f"{plan.num_streams} streams of up to {plan.context + num_new:,} tokens and the prompt need {num_pages:,} "
            f"pages, and the KV pool has {memory.num_pages - 1:,}; lower streams, context or steps, or raise "
            "cache-max-entry-count"
        )
