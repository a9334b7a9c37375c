"""A pipeline on an engine without a device, a letter a token."""

import time

import pytest

from tests.engine.fake import VOCAB, FakeRunner, continuation
from turbojax.api import Pipeline
from turbojax.configs import GenerationConfig
from turbojax.engine.block_pool import BlockPool
from turbojax.engine.scheduler import Scheduler, SchedulerConfig

EOS = 7


class LetterTokenizer:
    """A letter a token: token i is chr(65 + i)."""

    has_chat_template = True

    def encode(self, text, add_special_tokens=True):
        return [ord(c) - 65 for c in text]

    def decode(self, token_ids, skip_special_tokens=True):
        return "".join(chr(65 + i) for i in token_ids)

    def apply_chat_template(self, messages, add_generation_prompt=True):
        return [0] + [i for m in messages for i in self.encode(m["content"])]


class SlowRunner(FakeRunner):
    """Takes a moment for each step, and can be told to fail."""

    fails = False

    def dispatch(self, plan):
        time.sleep(0.001)
        if self.fails:
            raise RuntimeError("device lost")
        return super().dispatch(plan)


LETTERS = LetterTokenizer()


def make(num_slots=4, num_pages=60, tokenizer=LETTERS, eos_ids=(EOS,), session_len=100, processors=None):
    runner = SlowRunner(num_slots, page_len=4)
    config = SchedulerConfig(num_slots, session_len, 16, runner.max_prefill_chunks, 2)
    scheduler = Scheduler(config, BlockPool(num_pages, 4))
    return Pipeline(runner, scheduler, tokenizer, vocab_size=VOCAB, eos_ids=eos_ids, processors=processors)


def wait_until_idle(pipe):
    deadline = time.monotonic() + 10
    while not pipe._scheduler.is_idle and time.monotonic() < deadline:
        time.sleep(0.01)
    return pipe._scheduler.is_idle


def expected(ids, num_new, stop_ids=(EOS,)):
    return continuation(ids, len(ids) + num_new, stop_ids)


def request_of(pipe, prompt, config, deliver, **how):
    (request,) = pipe._builder.requests(prompt, config, deliver, do_preprocess=True, **how).values()
    return request


GEN = GenerationConfig(max_new_tokens=12)


@pytest.fixture
def pipe():
    with make() as pipe:
        yield pipe
        assert wait_until_idle(pipe), "something leaked"
        assert pipe._scheduler.pool.num_free_pages() == 59
