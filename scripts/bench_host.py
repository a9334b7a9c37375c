"""Host time of an engine step with no device: planning, host arrays, dispatch, reading tokens back, text.

    python scripts/bench_host.py

A device step must be longer than this, or the device waits: about 13 ms at 256 sequences of an 8B model on an H200,
2 ms at one. Times are of the processor, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from typing import Any

import numpy as np

from turbojax.batches import Batches
from turbojax.buckets import Buckets
from turbojax.engine.block_pool import BlockPool
from turbojax.engine.limits import SchedulerConfig
from turbojax.engine.plan import SamplingParams
from turbojax.engine.request import Request
from turbojax.engine.scheduler import Scheduler
from turbojax.engine.text import TextSink
from turbojax.hub import default_model
from turbojax.runner import JaxRunner
from turbojax.tokenizer import load_tokenizer

PAGE_LEN, PROMPT_LEN = 64, 64
NO_DEVICE = np.int32(1000)


class Tokens(np.ndarray):
    """An array that has come to the host already."""

    def copy_to_host_async(self) -> None:
        pass


class NoDevice:
    """Stands for the executables: a step, or what samples behind it, gives tokens at once."""

    def __init__(self, num_slots: int, pages_per_slot: int, buckets: Buckets) -> None:
        self.weights, self.buckets = None, buckets
        self.batches = Batches(num_slots, 1, pages_per_slot, 16)

    def join(self, state: Any, joins: Any) -> Any:
        return state

    def step(self, shape: Any) -> Any:
        if not shape.is_fused:
            return lambda weights, state, *inputs: state
        tokens = np.full((shape.num_decode_steps, shape.num_decode_slots), NO_DEVICE).view(Tokens)
        return lambda weights, state, batch: (state, tokens)

    def pick(self, shape: Any) -> Any:
        tokens = np.full(shape.num_rows, NO_DEVICE).view(Tokens)
        return lambda weights, state, batch: (state, tokens)


class NoState:
    """Stands for the engine's state where only its pool's size is asked for."""

    num_pages = 1 << 20
    pool = property(lambda self: self)


def run(num_slots: int, text: str, num_steps: int) -> dict[str, float]:
    """Microseconds of each part of a decode step of `num_slots` running requests."""
    tokenizer = None if text == "none" else load_tokenizer(default_model())
    max_len = PROMPT_LEN + num_steps + 50
    pages_per_slot = -(-131072 // PAGE_LEN)
    buckets = Buckets.of(max_batch_size=num_slots, max_prefill_tokens=8192, num_decode_steps=1, min_prefill_tokens=128)
    runner = JaxRunner(NoDevice(num_slots, pages_per_slot, buckets), NoState)  # type: ignore[arg-type]
    config = SchedulerConfig(num_slots, 131072, 8192, runner.max_prefill_chunks)
    scheduler = Scheduler(config, BlockPool(num_slots * (max_len // PAGE_LEN + 2), PAGE_LEN))
    decode = None if tokenizer is None else tokenizer.decode
    for i in range(num_slots):
        sink = TextSink(lambda piece: None, decode, whole=text == "whole")
        prompt = np.arange(PROMPT_LEN, dtype=np.int32)
        scheduler.add(Request(i, prompt, SamplingParams(), (2,), max_len, sink=sink))
    spent: dict[str, float] = defaultdict(float)
    before, num_counted = None, 0
    while not scheduler.is_idle:
        counts = len(scheduler.running) == num_slots and not scheduler.waiting
        marks = [time.thread_time()]
        plan = scheduler.plan()
        marks.append(time.thread_time())
        handle = None if plan.is_empty else runner.dispatch(plan)
        marks.append(time.thread_time())
        result = None if before is None else runner.fetch(before[1])
        marks.append(time.thread_time())
        if result is not None:
            scheduler.commit(before[0], result)
        marks.append(time.thread_time())
        if counts and len(plan.decode_slots) == num_slots:
            num_counted += 1
            for name, start, end in zip(("plan", "arrays", "read", "commit"), marks, marks[1:], strict=False):
                spent[name] += end - start
        before = None if handle is None else (plan, handle)
    return {name: 1e6 * seconds / num_counted for name, seconds in spent.items()}


def dispatch_us(num_calls: int = 300) -> tuple[float, float]:
    """Microseconds to call a program with the inputs of a decode step, which it hands back: compiled, and jitted."""
    import jax

    from turbojax.core.state import init_state
    from turbojax.engine.plan import StepPlan
    from turbojax.models.random_model import random_model

    weights = random_model("tiny", "bf16", "float32").weights
    state = init_state(weights.spec, num_slots=256, num_pages=4, page_len=PAGE_LEN, max_len=256, num_stop_ids=16)
    buckets = Buckets.of(max_batch_size=256, max_prefill_tokens=128, num_decode_steps=1)
    batch = Batches.of(state).decode(StepPlan(step_id=-1), buckets.shape_of(256, 0, 0, 1))
    jitted = jax.jit(lambda weights, state, batch: (state, batch.slots), donate_argnames="state")
    found = []
    for program in (jitted.lower(weights, state, batch).compile(), jitted):
        took = []
        for _ in range(num_calls):
            start = time.perf_counter()
            state, tokens = program(weights, state, batch)
            took.append(time.perf_counter() - start)
            tokens.block_until_ready()
        found.append(1e6 * sorted(took)[num_calls // 2])
    return found[0], found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--dispatch", action="store_true", help="also time the dispatch of a compiled program")
    args = parser.parse_args()
    print(f"{'sequences':>9} {'text':>8} {'plan':>7} {'arrays':>7} {'read':>7} {'commit':>7} {'all, us':>8}")
    for num_slots in (1, 16, 64, 256):
        for text in ("none", "whole", "stream"):
            found = run(num_slots, text, args.steps)
            parts = " ".join(f"{found[name]:7.0f}" for name in ("plan", "arrays", "read", "commit"))
            print(f"{num_slots:>9} {text:>8} {parts} {sum(found.values()):8.0f}", flush=True)
    if args.dispatch:
        compiled, jitted = dispatch_us()
        print(f"dispatch of a decode step: compiled {compiled:.0f} us, jitted {jitted:.0f} us")


if __name__ == "__main__":
    main()
