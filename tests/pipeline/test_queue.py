"""Many callers at once: priorities, a full queue, time-outs, and callers that go away at any moment."""

import asyncio
import gc
import threading
import time

import pytest

from tests.engine.fake import VOCAB, GatedRunner, continuation
from turbojax.api import Pipeline
from turbojax.configs import GenerationConfig
from turbojax.engine.block_pool import BlockPool
from turbojax.engine.scheduler import Scheduler, SchedulerConfig
from turbojax.errors import EngineClosedError, QueueFullError

LONG = GenerationConfig(max_new_tokens=900)
SHORT = GenerationConfig(max_new_tokens=4)


class PacedRunner(GatedRunner):
    """Takes a moment for each step, too."""

    def dispatch(self, plan):
        time.sleep(0.001)
        return super().dispatch(plan)


def make(num_slots=2, max_queue_len=None):
    runner = PacedRunner(num_slots, 4)
    config = SchedulerConfig(num_slots, 1000, 16, runner.max_prefill_chunks, max_queue_len=max_queue_len)
    pipe = Pipeline(runner, Scheduler(config, BlockPool(600, 4)), None, vocab_size=VOCAB, eos_ids=())
    return pipe, runner.gate


def settle(pipe):
    """Everything is freed, nothing is counted any more."""
    deadline = time.monotonic() + 10
    while (pipe._loop._open or not pipe._scheduler.is_idle) and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.005)
    assert pipe._scheduler.is_idle
    assert not pipe._loop._open
    pipe._scheduler.check_integrity()


def test_priorities_of_a_config_decide_who_is_served_first():
    pipe, gate = make(num_slots=1)
    with pipe:
        gate.clear()
        priorities = [3, 0, -7, 0]
        configs = [GenerationConfig(max_new_tokens=2, priority=p) for p in priorities]
        stream = pipe.stream_infer([[i + 1] for i in range(4)], configs)
        threading.Timer(0.02, gate.set).start()
        ended = [piece.index for piece in stream if piece.finish_reason]
        assert ended == [2, 1, 3, 0]


def test_a_full_queue_is_an_error_for_the_whole_call_and_nothing_of_it_runs():
    pipe, _ = make(num_slots=2, max_queue_len=1)
    with pipe:
        with pytest.raises(QueueFullError, match=r"4 new requests beside 0 .* 2 that run at once and 1 that wait"):
            pipe([[1], [2], [3], [4]], SHORT)
        assert pipe.metrics.num_steps == 0
        assert len(pipe([[1], [2], [3]], SHORT)) == 3
        with pytest.raises(QueueFullError):
            asyncio.run(pipe.agenerate([[1], [2], [3], [4]], SHORT))
        settle(pipe)


def test_a_caller_that_keeps_the_engine_full_is_never_refused():
    """Seeing the end of one request and sending the next is no race with the engine."""
    pipe, _ = make(num_slots=2, max_queue_len=1)

    async def serve(i):
        for k in range(40):
            assert (await pipe.agenerate([i + 1, k % VOCAB], SHORT)).finish_reason == "length"

    async def main():
        await asyncio.gather(*(serve(i) for i in range(3)))

    with pipe:
        asyncio.run(main())
        settle(pipe)


@pytest.mark.parametrize("whole", [True, False])
def test_a_time_out_ends_a_request_with_what_it_has(whole):
    pipe, _ = make()
    config = GenerationConfig(max_new_tokens=900, timeout_s=0.4)
    with pipe:
        pieces = [pipe([1, 2], config)] if whole else list(pipe.stream_infer([1, 2], config))
        last, token_ids = pieces[-1], [t for p in pieces for t in p.token_ids]
        assert last.finish_reason == "timeout"
        assert "its time was over while it ran" in last.error
        assert 0 < last.num_generated_tokens == len(token_ids) < 900
        assert token_ids == continuation([1, 2], 902)[: len(token_ids)]
        settle(pipe)
        assert pipe.metrics.num_timed_out_requests == 1


def test_a_time_out_ends_a_request_that_waits():
    pipe, _ = make(num_slots=1)
    with pipe:
        first = pipe.stream_infer([1], LONG)
        next(first)
        response = pipe([2], GenerationConfig(max_new_tokens=4, timeout_s=0.03))
        assert (response.finish_reason, response.token_ids) == ("timeout", [])
        assert "while it waited" in response.error
        first.close()
        settle(pipe)


@pytest.mark.parametrize("seconds", [0, 0.003, 0.02])
def test_callers_that_go_away_at_any_moment_leave_nothing_behind(seconds):
    pipe, _ = make(num_slots=2)

    async def main():
        streams = [pipe.astream_infer([i + 1, 5], LONG) for i in range(4)]
        firsts = [asyncio.create_task(anext(stream)) for stream in streams]
        calls = [asyncio.create_task(pipe.agenerate([i + 1, 6], LONG)) for i in range(2)]
        await asyncio.sleep(seconds)
        for task in (*firsts, *calls):
            task.cancel()
        await asyncio.gather(*firsts, *calls, return_exceptions=True)
        for stream in streams[:3]:
            await stream.aclose()

    with pipe:
        asyncio.run(main())  # stream 3 is left open: its event loop closes it
        kept = pipe.stream_infer([1, 2], LONG)
        next(kept)
        dropped = pipe.stream_infer([1, 3], LONG)
        next(dropped)
        never_started = pipe.stream_infer([1, 4], LONG)
        del dropped, never_started
        kept.close()
        settle(pipe)
        assert pipe.metrics.num_failed_requests == 0
        assert pipe.metrics.num_steps < 800, "somebody's 900 tokens were generated for nobody"
        assert pipe([2, 3], SHORT).token_ids == continuation([2, 3], 6)


def test_closing_the_pipeline_ends_what_waits_too():
    pipe, gate = make(num_slots=1)
    stream = pipe.stream_infer([[1], [2], [3]], LONG)
    next(stream)
    gate.clear()
    closer = threading.Thread(target=pipe.close)
    closer.start()
    while pipe._loop._end is None:
        time.sleep(0.001)
    gate.set()
    ends = [piece for piece in stream if piece.finish_reason]
    closer.join(10)
    assert [end.finish_reason for end in ends] == ["error"] * 3
    assert not pipe._loop._open
    with pytest.raises(EngineClosedError):
        pipe([1], SHORT)
