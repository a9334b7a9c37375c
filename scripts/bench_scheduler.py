"""Host time of the engine's decisions, without a device and without jax: planning, the prefix cache, text.

    python scripts/bench_scheduler.py --output benchmarks/results/scheduler.json

Times are of the processor, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import platform
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from cpu_results import write_results
from rich.console import Console
from rich.table import Table

from turbojax.engine.block_pool import BlockPool
from turbojax.engine.limits import SchedulerConfig
from turbojax.engine.plan import SamplingParams, StepPlan, StepResult
from turbojax.engine.prefix_cache import PrefixCache
from turbojax.engine.request import Progress, Request
from turbojax.engine.scheduler import Scheduler
from turbojax.engine.stopping import StopRules
from turbojax.engine.text import TextSink
from turbojax.hub import default_model
from turbojax.tokenizer import load_tokenizer

PAGE_LEN, NUM_SLOTS, NUM_WAITING, VOCAB = 64, 256, 1000, 128_000
LONG = 16_384
# Most microseconds of a case, where it has a target.
TARGETS = {
    "plan a step: 256 decode, 1,000 wait": 300,
    "add and admit 16k tokens, 1M tokens cached: none of them": 3000,
    "add and admit 16k tokens, 1M tokens cached: half of them": 3000,
    "add and admit 16k tokens, 1M tokens cached: all of them": 3000,
    "add and admit 16k tokens, 1M tokens cached and no page free: none of them": 3000,
}
Row = dict[str, Any]


class Host:
    """A scheduler whose steps give a token to each sequence at once."""

    def __init__(self, num_pages: int, max_prefill_tokens: int = 8192) -> None:
        self.rng = np.random.default_rng(0)
        config = SchedulerConfig(NUM_SLOTS, 131_072, max_prefill_tokens, 8)
        pool = BlockPool(num_pages, PAGE_LEN)
        self.scheduler = Scheduler(config, pool, cache=PrefixCache(pool))
        self._num_requests = 0

    def prompt(self, num_tokens: int) -> np.ndarray:
        return self.rng.integers(0, VOCAB, num_tokens, dtype=np.int32)

    def request(self, prompt: np.ndarray, num_new: int) -> Request:
        self._num_requests += 1
        sampling = SamplingParams(seed=self._num_requests)
        return Request(self._num_requests, prompt, sampling, (2,), len(prompt) + num_new)

    def step(self) -> tuple[StepPlan, float, float]:
        """A step, and the microseconds of planning and of committing it."""
        start = time.thread_time()
        plan = self.scheduler.plan()
        planned = time.thread_time()
        slots = (*plan.decode_slots, *(chunk.slot for chunk in plan.prefill_chunks if chunk.is_last))
        result = StepResult(plan.step_id, {slot: [7] for slot in slots})
        before = time.thread_time()
        if not plan.is_empty:
            self.scheduler.commit(plan, result)
        return plan, 1e6 * (planned - start), 1e6 * (time.thread_time() - before)

    def run_all(self) -> None:
        while not self.scheduler.is_idle:
            self.step()


def row(case: str, samples: list[float], **details: Any) -> Row:
    p99 = sorted(samples)[int(0.99 * (len(samples) - 1))]
    found = {"case": case, "unit": "us", "value": median(samples), "p99": p99, "target": TARGETS.get(case)}
    return found | details


# -- planning ---------------------------------------------------------------------------------------------


def steady(num_steps: int) -> Iterator[Row]:
    """All slots decode, and nobody ends."""
    host = Host(num_pages=NUM_SLOTS * (3 + num_steps // PAGE_LEN) + 1)
    for _ in range(NUM_SLOTS + NUM_WAITING):
        host.scheduler.add(host.request(host.prompt(64), 100_000))
    while len(host.step()[0].decode_slots) < NUM_SLOTS:
        pass
    steps = [host.step() for _ in range(num_steps)]
    yield row("plan a step: 256 decode, 1,000 wait", [us for _, us, _ in steps])
    yield row("commit a step: 256 decode, 1,000 wait", [us for _, _, us in steps])


def churning(num_steps: int) -> Iterator[Row]:
    """About two of the sequences end in each step, and others with the same system prompt take their slots."""
    host = Host(num_pages=NUM_SLOTS * 24)
    system = host.prompt(300)

    def refill() -> None:
        while len(host.scheduler.waiting) < NUM_WAITING:
            prompt = np.concatenate([system, host.prompt(int(host.rng.integers(20, 700)))])
            host.scheduler.add(host.request(prompt, int(host.rng.integers(1, 256))))

    steps = []
    for i in range(num_steps + 300):
        refill()
        steps += [host.step()] if i >= 300 else [host.step()][:0]
    num_joins = sum(len(plan.joins) for plan, _, _ in steps) / num_steps
    found = row("plan a step: 256 run, some end and others join in each, 1,000 wait", [us for _, us, _ in steps])
    yield found | {"joins_per_step": num_joins}
    yield row("commit a step: 256 run, some end and others join in each", [us for _, _, us in steps])


def following(num_steps: int) -> Iterator[Row]:
    """Half of the slots decode, one prefills a long prompt, and all who wait begin like it, so they wait for it."""
    host = Host(num_pages=NUM_SLOTS * 40, max_prefill_tokens=512)
    for _ in range(NUM_SLOTS // 2):
        host.scheduler.add(host.request(host.prompt(64), 100_000))
    while len(host.step()[0].decode_slots) < NUM_SLOTS // 2:
        pass
    samples: list[float] = []
    while len(samples) < num_steps:
        stem = host.prompt(LONG)
        requests = [host.request(np.concatenate([stem, host.prompt(20)]), 2) for _ in range(NUM_WAITING)]
        for request in requests:
            host.scheduler.add(request)
        samples += [host.step()[1] for _ in range(LONG // 512 - 1)]
        for request in requests:
            host.scheduler.cancel(request)
        host.step()
    yield row("plan a step: 128 decode, 1,000 wait for the 16k prompt that they begin with", samples)


# -- the prefix cache -------------------------------------------------------------------------------------


def caching(num_repeats: int) -> Iterator[Row]:
    """A newcomer of 16k tokens beside 1M cached ones: from `add` to the step that gives it its slot and pages.

    What newcomers leave behind takes the place of the prompts that were cached first.
    """
    num_cached_pages = (1 << 20) // PAGE_LEN
    for spare_pages, name in ((4 * LONG // PAGE_LEN, ""), (1, " and no page free")):
        host = Host(num_pages=num_cached_pages + spare_pages)
        known = [host.prompt(LONG) for _ in range((1 << 20) // LONG)]
        for prompt in known:
            host.scheduler.add(host.request(prompt, 1))
            host.run_all()
        for share, words in ((0, "none"), (1, "half"), (2, "all")):
            samples = []
            for i in range(num_repeats):
                stem = known[-1 - i % 8][: share * LONG // 2]
                prompt = np.concatenate([stem, host.prompt(LONG - len(stem))])
                request = host.request(prompt, 1)
                start = time.thread_time()
                host.scheduler.add(request)
                plan = host.scheduler.plan()
                samples.append(1e6 * (time.thread_time() - start))
                assert len(plan.joins) == 1, "it was not admitted"
                assert abs(request.num_cached_tokens - share * LONG // 2) <= PAGE_LEN
                host.scheduler.commit(plan, StepResult(plan.step_id, {}))
                host.scheduler.cancel(request)
            yield row(f"add and admit 16k tokens, 1M tokens cached{name}: {words} of them", samples)
            if spare_pages == 1:
                break


# -- text -------------------------------------------------------------------------------------------------


def streaming(num_tokens: int) -> Iterator[Row]:
    """A streamed token as text: the first thousand of a request, and the last."""
    tokenizer = load_tokenizer(default_model())
    assert tokenizer is not None
    text = "The sea is salt, the night is long; \u00fcber 7 Br\u00fccken \u4f60\u597d \U0001f600. " * (num_tokens // 20)
    token_ids = tokenizer.encode(text)[:num_tokens]
    for name, words in (("", ()), (", two stop words", ("Observation:", "\n\nUser"))):
        sink = TextSink(lambda piece: None, tokenizer.decode, StopRules(words=words))
        marks = [time.thread_time()]
        for start in range(0, len(token_ids), 1000):
            for token in token_ids[start : start + 1000]:
                sink(Progress([token]))
            marks.append(time.thread_time())
        each = [1e3 * (end - start) for start, end in itertools.pairwise(marks)]
        yield row(f"stream a token as text{name}", each, first_thousand=each[0], last_thousand=each[-1])


# -- all of it --------------------------------------------------------------------------------------------


def print_table(rows: list[Row]) -> None:
    table = Table("case", "median, us", "p99", "target", "")
    for found in rows:
        target = found["target"]
        verdict = "" if target is None else "met" if found["value"] < target else "MISSED"
        cells = [f"{found['value']:.1f}", f"{found['p99']:.1f}", "" if target is None else f"{target}", verdict]
        table.add_row(found["case"], *cells)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    parts: tuple[Callable[[], Iterator[Row]], ...] = (
        lambda: steady(args.steps),
        lambda: churning(args.steps),
        lambda: following(args.steps),
        lambda: caching(max(20, args.steps // 8)),
        lambda: streaming(20_000),
    )
    rows = []
    for part in parts:
        rows += list(part())
        gc.collect()
    assert "jax" not in sys.modules, "the host side has imported jax"
    print_table(rows)
    if args.output is not None:
        write_results(args.output, {"python": platform.python_version(), "numpy": version("numpy")}, rows)


if __name__ == "__main__":
    main()
