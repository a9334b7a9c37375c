"""Many random requests on a tiny model through the whole engine: nothing leaks, nobody hangs, memory stays flat.

    python scripts/soak.py                      # 20,000 requests
    python scripts/soak.py --requests 2000 --seconds 90

Callers come and go as they like: prompts that begin alike, priorities, several samples, time-outs, streams that are
left in the middle, tasks that are cancelled, conversations; with a pool that is too small, so that some give way.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from turbojax.api import Pipeline
from turbojax.assembly import assemble_model
from turbojax.configs import EngineConfig, GenerationConfig
from turbojax.engine.response import Response
from turbojax.errors import QueueFullError
from turbojax.models.random_model import random_model

ENGINE = EngineConfig(
    dtype="float32", max_batch_size=4, session_len=160, cache_max_entry_count=16, cache_block_seq_len=16,
    max_prefill_token_num=32, num_decode_steps=1, max_queue_len=44,
)  # fmt: skip
# Callers at any time; with some of them asking for several samples the queue is full now and then.
NUM_CALLERS = 40
NUM_STEMS, MAX_STEM, MAX_TAIL, MAX_NEW = 6, 70, 30, 16
# Every eighth request is one of these, so that its answer has been seen before.
NUM_KNOWN = 40
MAX_GROWTH_MB = 48


@dataclass
class Soak:
    """What happened.

    Attributes:
        counts: how requests ended, and what their callers did.
        rss_mb: resident memory, after each twentieth of the requests.
        num_other_answers: greedy answers that were not what the same prompt had given before.
        seconds: all of it took.
    """

    counts: Counter[str] = field(default_factory=Counter)
    rss_mb: list[float] = field(default_factory=list)
    num_other_answers: int = 0
    seconds: float = 0.0
    answers: dict[int, list[int]] = field(default_factory=dict)

    @property
    def num_done(self) -> int:
        return self.counts["calls"]

    def growth_mb(self) -> float:
        """From the most that was resident in the second quarter of the run to the least in its last one.

        0 of a run that was too short to have quarters.
        """
        quarter = len(self.rss_mb) // 4
        if quarter < 2:
            return 0.0
        return min(self.rss_mb[-quarter:]) - max(self.rss_mb[quarter : 2 * quarter])


def rss_mb() -> float:
    """Resident memory of this process; 0 where the system does not say it."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20 if statm.exists() else 0.0


class Callers:
    """Random callers of a pipeline."""

    def __init__(self, pipe: Pipeline, seed: int) -> None:
        self.pipe, self.soak, self.rng = pipe, Soak(), np.random.default_rng(seed)
        self.stems = [self.tokens(MAX_STEM) for _ in range(NUM_STEMS)]
        self.known = [self.prompt() for _ in range(NUM_KNOWN)]

    def tokens(self, num_tokens: int) -> list[int]:
        return self.rng.integers(0, 512, num_tokens).tolist()

    def prompt(self) -> list[int]:
        stem = self.stems[self.rng.integers(NUM_STEMS)][: self.rng.integers(MAX_STEM + 1)]
        return stem + self.tokens(int(self.rng.integers(1, MAX_TAIL)))

    def config(self) -> GenerationConfig:
        rng = self.rng
        is_sampled = rng.random() < 0.4
        return GenerationConfig(
            max_new_tokens=int(rng.integers(1, MAX_NEW + 1)),
            do_sample=bool(is_sampled),
            n=int(rng.choice([1, 1, 3])) if is_sampled else 1,
            random_seed=int(rng.integers(1 << 32)),
            stop_token_ids=tuple(rng.integers(0, 512, 3).tolist()) if rng.random() < 0.3 else (),
            priority=int(rng.integers(-2, 3)),
            timeout_s=float(rng.uniform(0.001, 0.2)) if rng.random() < 0.1 else None,
        )

    async def run(self, num_calls: int, seconds: float) -> Soak:
        """Keeps `NUM_CALLERS` calls under way until so many were made, or so much time is over."""
        await asyncio.gather(*(self.call() for _ in range(NUM_CALLERS)))  # all steps are compiled now
        left, until, start = iter(range(num_calls)), time.monotonic() + seconds, time.monotonic()

        async def caller() -> None:
            for _ in left:
                if time.monotonic() > until:
                    return
                await self.call()
                self.soak.counts["calls"] += 1
                if self.soak.num_done % max(1, num_calls // 20) == 0:
                    gc.collect()
                    self.soak.rss_mb.append(rss_mb())

        await asyncio.gather(*(caller() for _ in range(NUM_CALLERS)))
        self.soak.seconds = time.monotonic() - start
        return self.soak

    async def call(self) -> None:
        actions = (self.ask, self.ask_again, self.leave_a_stream, self.cancel_a_task, self.talk)
        action = actions[self.rng.choice(len(actions), p=[0.55, 0.125, 0.15, 0.125, 0.05])]
        while True:
            try:
                return await action()
            except QueueFullError:
                self.soak.counts["refused"] += 1
                await asyncio.sleep(float(self.rng.uniform(0.01, 0.1)))

    def count(self, responses: Response | list[Response]) -> None:
        for response in responses if isinstance(responses, list) else [responses]:
            assert response.finish_reason in ("stop", "length", "timeout"), response.error
            assert len(response.token_ids) == response.num_generated_tokens
            self.soak.counts[response.finish_reason] += 1

    async def ask(self) -> None:
        self.count(await self.pipe.agenerate(self.prompt(), self.config()))

    async def ask_again(self) -> None:
        """The greedy answer of a prompt that was asked before, whatever was cached, evicted or beside it then."""
        i = int(self.rng.integers(NUM_KNOWN))
        response = await self.pipe.agenerate(self.known[i], GenerationConfig(max_new_tokens=MAX_NEW))
        assert isinstance(response, Response)
        self.count(response)
        self.soak.num_other_answers += self.soak.answers.setdefault(i, response.token_ids) != response.token_ids

    async def leave_a_stream(self) -> None:
        stream, num_pieces = self.pipe.astream_infer(self.prompt(), self.config()), int(self.rng.integers(0, 8))
        async for _ in stream:
            num_pieces -= 1
            if num_pieces <= 0:
                break
        await stream.aclose()
        self.soak.counts["left"] += 1

    async def cancel_a_task(self) -> None:
        task = asyncio.ensure_future(self.pipe.agenerate(self.prompt(), self.config()))
        await asyncio.sleep(float(self.rng.exponential(0.02)))
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(result, BaseException):
            if isinstance(result, QueueFullError):
                raise result
            assert isinstance(result, asyncio.CancelledError), result
        self.soak.counts["cancelled tasks"] += 1

    async def talk(self) -> None:
        """Two turns of a conversation, in a thread as its caller would have it."""
        prompt, more = self.prompt()[:40], self.tokens(5)
        config = GenerationConfig(max_new_tokens=int(self.rng.integers(1, MAX_NEW)))

        def turns() -> list[Response]:
            session = self.pipe.session(config)
            found = [session(one, stream_response=False) for one in (prompt, more)]
            return [response for response in found if isinstance(response, Response)]

        self.count(await asyncio.to_thread(turns))


def open_pipe() -> Pipeline:
    model = random_model("tiny", "bf16", "float32")
    parts = assemble_model(model, ENGINE)
    return Pipeline(parts.runner, parts.scheduler, None, vocab_size=model.spec.vocab_size, eos_ids=())


def soak(num_calls: int, seconds: float, seed: int, say: Callable[[str], object] = print) -> Soak:
    """Runs, and checks that nothing is left behind.

    Raises:
        AssertionError: something is.
    """
    with open_pipe() as pipe:
        found = asyncio.run(Callers(pipe, seed).run(num_calls, seconds))
        scheduler, deadline = pipe._scheduler, time.monotonic() + 30
        while not (scheduler.is_idle and not pipe._loop._open):
            assert time.monotonic() < deadline, f"{len(scheduler.running)} run, {len(scheduler.waiting)} wait for ever"
            time.sleep(0.01)
        scheduler.check_integrity()
        assert scheduler.pool.num_available_pages() == scheduler.pool.num_usable_pages, "pages are lost"
        metrics = pipe.metrics.snapshot()
    say(json.dumps({"counts": dict(found.counts), "metrics": metrics}, indent=1))
    say(f"{found.num_done} calls in {found.seconds:.0f} s; memory, MB: {', '.join(f'{mb:.0f}' for mb in found.rss_mb)}")
    say(f"{found.num_other_answers} answers of known prompts were others than before (near ties)")
    assert metrics["num_failed_requests"] == metrics["num_failed_steps"] == 0
    assert metrics["num_preemptions"] > 0 or found.num_done < 500, "the pool was never full"
    assert found.num_other_answers <= found.num_done / 500, "more other answers than near ties can explain"
    assert found.growth_mb() < MAX_GROWTH_MB, f"memory grew by {found.growth_mb():.0f} MB"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=3600, help="stop asking after so long")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    soak(args.requests, args.seconds, args.seed)


if __name__ == "__main__":
    main()
