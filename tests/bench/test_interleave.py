"""Gaps between the tokens of streams beside a long prompt, on an engine without a device."""

import contextlib
import time
from types import SimpleNamespace

import pytest

from tests.engine.fake import VOCAB, FakeRunner
from turbojax.bench.engine import BenchEngine
from turbojax.bench.errors import BenchError
from turbojax.bench.interleave import Interleave, Streams, measure_interleave
from turbojax.bench.settings import Settings
from turbojax.engine.block_pool import BlockPool
from turbojax.engine.limits import SchedulerConfig
from turbojax.engine.scheduler import Scheduler


class Bench:
    """Opens an engine on a runner without a device."""

    settings = Settings(shape="tiny", engine={"max_prefill_token_num": 64})
    model = SimpleNamespace(spec=SimpleNamespace(vocab_size=VOCAB))

    def __init__(self, num_pages):
        self.num_pages, self.num_tokens_of_steps = num_pages, []

    @contextlib.contextmanager
    def engine(self, config):
        runner = FakeRunner(config.max_batch_size, 4)
        limits = SchedulerConfig(config.max_batch_size, config.session_len, config.max_prefill_token_num, 4)
        scheduler, dispatch = Scheduler(limits, BlockPool(self.num_pages, 4)), runner.dispatch

        def watched(plan):
            num_tokens = sum(len(chunk.token_ids) for chunk in plan.prefill_chunks)
            time.sleep(0.002)  # a step takes longer than a thread needs to wake up
            self.num_tokens_of_steps.append((len(plan.decode_slots), num_tokens))
            return dispatch(plan)

        runner.dispatch = watched
        memory = SimpleNamespace(page_len=4, num_pages=self.num_pages)
        engine = BenchEngine(SimpleNamespace(scheduler=scheduler, runner=runner, memory=memory), config)
        try:
            yield engine
        finally:
            engine.close()


def test_streams_decode_beside_every_chunk_of_the_long_prompts():
    bench = Bench(num_pages=2000)
    (finding,) = measure_interleave(bench, Interleave(3, 8, 640, num_steps=5, num_repeats=2))
    ratio, ttft = finding.rows
    assert ratio["case"] == "tiny interleave 640 prompt, chunk 64, b3 8, p99 beside over alone kv16"
    assert ratio["value"] == ratio["itl_beside_ms"]["p99"] / ratio["itl_alone_ms"]["p99"]
    assert ttft["value"] == 1e3 * ratio["ttft_s"] > 0
    beside = [num_tokens for num_decoding, num_tokens in bench.num_tokens_of_steps if num_decoding == 3 and num_tokens]
    assert beside == [64] * 30, "each of three long prompts goes in ten chunks, and all streams decode beside each"


def test_gaps_are_counted_where_their_later_token_comes():
    streams = Streams(2)
    streams.times_s = [[0.0, 1.0, 3.0, 6.0], [0.5, 2.5, 7.0]]
    assert streams.gaps_ms([(0.0, 2.5)]) == [1000, 2000]
    assert streams.gaps_ms([(2.5, 6.0), (6.0, 7.0)]) == [2000, 3000, 4500]


def test_what_does_not_fit_is_refused_with_the_numbers():
    with pytest.raises(BenchError, match=r"3 streams of .* and the prompt need .* pages, and the KV pool has 199"):
        list(measure_interleave(Bench(num_pages=200), Interleave(3, 8, 640, num_steps=5, num_repeats=2)))
