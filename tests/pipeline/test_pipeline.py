"""The Python API on an engine without a device: prompts in all forms, threads, asyncio, cancelling, failing."""

import asyncio
import gc
import threading
import time

import numpy as np
import pytest

from tests.engine.fake import VOCAB, FakeRunner, continuation
from turbojax.api import Pipeline
from turbojax.configs import MAX_STOP_IDS, GenerationConfig
from turbojax.engine.block_pool import BlockPool
from turbojax.engine.plan import SamplingParams, StepResult
from turbojax.engine.scheduler import Scheduler, SchedulerConfig
from turbojax.errors import (
    ConfigError,
    EmptyPromptError,
    EngineClosedError,
    InvalidPromptError,
    MissingTokenizerError,
    PromptTooLongError,
)
from turbojax.processors import LogitsProcessor
from turbojax.request_builder import sampling_of

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


@pytest.fixture
def pipe():
    with make() as pipe:
        yield pipe
        assert wait_until_idle(pipe), "something leaked"
        assert pipe._scheduler.pool.num_free_pages() == 59


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


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("CD", [0, 2, 3]),
        ([{"role": "user", "content": "CD"}], [0, 2, 3]),
        ([2, 3], [2, 3]),
        (np.array([2, 3]), [2, 3]),
    ],
)
def test_one_prompt_of_every_form_gives_one_response(pipe, prompt, ids):
    response = pipe(prompt, GEN)
    assert response.token_ids == expected(ids, 12)
    assert response.num_input_tokens == len(ids)
    assert response.num_generated_tokens == len(response.token_ids)
    text = [t for t in response.token_ids if t != EOS]
    assert response.text == LetterTokenizer().decode(text)
    assert response.finish_reason == ("stop" if response.token_ids[-1] == EOS else "length")


def test_a_list_gives_a_list_with_a_config_each(pipe):
    prompts = ["CD", [4, 5, 6], [{"role": "user", "content": "E"}]]
    responses = pipe(prompts, [GenerationConfig(max_new_tokens=n, ignore_eos=True) for n in (1, 5, 9)])
    assert [r.num_generated_tokens for r in responses] == [1, 5, 9]
    assert [r.index for r in responses] == [0, 1, 2]
    assert responses[1].token_ids == expected([4, 5, 6], 5, ())


def test_without_a_limit_an_answer_ends_with_the_session(pipe):
    response = pipe([2, 3], GenerationConfig(max_new_tokens=None, min_new_tokens=7, ignore_eos=True))
    assert (response.num_generated_tokens, response.finish_reason) == (98, "length")


def test_without_preprocessing_a_text_goes_in_as_it_is(pipe):
    assert pipe("CD", GEN, do_preprocess=False).token_ids == expected([2, 3], 12)


def test_a_stream_is_the_whole_in_pieces(pipe):
    pieces = list(pipe.stream_infer(["CD", "EF"], GEN))
    for index, whole in enumerate(pipe(["CD", "EF"], GEN)):
        mine = [p for p in pieces if p.index == index]
        assert "".join(p.text for p in mine) == whole.text
        assert [t for p in mine for t in p.token_ids] == whole.token_ids
        assert [p.finish_reason for p in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == whole.finish_reason


@pytest.mark.parametrize("stop_words", [(), ("ZZ",)])
def test_a_call_hears_of_a_request_once(pipe, stop_words):
    """A thread that only wants the result is not woken for every token."""
    pieces = []
    config = GenerationConfig(max_new_tokens=12, stop_words=stop_words)
    request = request_of(pipe, [2, 3], config, pieces.append, whole=True)
    pipe._loop.submit(request)
    assert pipe([2, 3], config) == pipe([2, 3], config)
    assert pieces == [pipe([2, 3], config)]


def test_stop_words_end_the_text_and_the_request(pipe):
    free = pipe([9, 9], GenerationConfig(max_new_tokens=30, ignore_eos=True))
    word = free.text[4:6]
    cut = free.text.index(word)
    response = pipe([9, 9], GenerationConfig(max_new_tokens=30, ignore_eos=True, stop_words=[word]))
    assert response.text == free.text[:cut]
    assert response.finish_reason == "stop"
    assert response.token_ids == free.token_ids[: cut + 2]


def test_min_new_tokens_holds_stop_words_off(pipe):
    config = {"max_new_tokens": 30, "ignore_eos": True}
    free = pipe([9, 9], GenerationConfig(**config))
    word = free.text[1]
    response = pipe([9, 9], GenerationConfig(**config, stop_words=[word], min_new_tokens=5))
    assert response.num_generated_tokens > 5
    assert response.text.startswith(free.text[:5])


def test_leaving_a_stream_cancels_its_requests(pipe):
    stream = pipe.stream_infer([[1, 2]] * 6, GenerationConfig(max_new_tokens=90, ignore_eos=True))
    next(stream)
    stream.close()
    assert wait_until_idle(pipe)


def test_many_threads(pipe):
    results = {}

    def work(i):
        results[i] = pipe([i % VOCAB, 3], GEN).token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert results == {i: expected([i % VOCAB, 3], 12) for i in range(24)}


def test_asyncio_twin(pipe):
    async def main():
        whole = await asyncio.gather(*(pipe.agenerate([i, 3], GEN) for i in range(6)))
        pieces = [p async for p in pipe.astream_infer([5, 3], GEN)]
        task = asyncio.create_task(pipe.agenerate([1, 1], GenerationConfig(max_new_tokens=90, ignore_eos=True)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return whole, pieces

    whole, pieces = asyncio.run(main())
    assert [r.token_ids for r in whole] == [expected([i, 3], 12) for i in range(6)]
    assert [t for p in pieces for t in p.token_ids] == expected([5, 3], 12)


@pytest.mark.parametrize(
    ("prompt", "error", "match"),
    [
        ("", EmptyPromptError, "the prompt is empty"),
        ([], EmptyPromptError, "the prompt has no tokens"),
        ([[1], []], EmptyPromptError, "prompt 1"),
        ([1] * 200, PromptTooLongError, "200 prompt tokens .*session_len 100"),
        ([[1], [1, VOCAB]], InvalidPromptError, f"prompt 1: token id {VOCAB} is outside"),
        ([-1], InvalidPromptError, "token id -1"),
        (5, InvalidPromptError, "a prompt is int"),
        ([1.5], InvalidPromptError, "prompt 0 is float"),
        (["A", 3], InvalidPromptError, "prompt 1 is int"),
    ],
)
def test_an_invalid_prompt_raises_before_anything_starts(pipe, prompt, error, match):
    before = pipe._loop._stepper._runner.num_dispatched
    with pytest.raises(error, match=match):
        pipe(prompt, GEN)
    assert pipe._loop._stepper._runner.num_dispatched == before


def test_configs_must_match_the_prompts_and_hold_few_stop_ids(pipe):
    with pytest.raises(ConfigError, match=r"2 configs.*3, one for each prompt"):
        pipe([[1], [2], [3]], [GEN, GEN])
    with pytest.raises(ConfigError, match=f"stop_token_ids.*at most {MAX_STOP_IDS}"):
        pipe([1], GenerationConfig(stop_token_ids=tuple(range(10, 10 + MAX_STOP_IDS))))


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"n": 5, "do_sample": True}, r"n is 5; accepted: .* max_batch_size \(4\)"),
        ({"bad_token_ids": [VOCAB]}, r"bad_token_ids is .* below the vocabulary size"),
        ({"logit_bias": {VOCAB: 1.0}}, r"logit_bias is .* below the vocabulary size"),
        ({"logits_processor": "calm"}, r"logits_processor is 'calm'; accepted: .*logits_processors \(none\)"),
        ({"n": 2}, "n is 2; accepted: 1 where decoding is greedy"),
        ({"n": 2, "do_sample": True, "temperature": 0}, "n is 2; accepted: 1 where decoding is greedy"),
        ({"stop_token_ids": [VOCAB]}, rf"stop_token_ids is \({VOCAB},\); accepted: token ids below .* \({VOCAB}\)"),
    ],
)
def test_what_the_engine_cannot_honour_is_refused_before_anything_starts(pipe, config, match):
    before = pipe._loop._stepper._runner.num_dispatched
    with pytest.raises(ConfigError, match=match):
        pipe([[1, 2], [3]], GenerationConfig(**config))
    assert pipe._loop._stepper._runner.num_dispatched == before


def test_n_samples_of_a_prompt_are_n_responses_with_one_seed_and_an_index_each(pipe):
    sampled = {"do_sample": True, "max_new_tokens": 6}
    configs = [GenerationConfig(n=3, **sampled), GenerationConfig(**sampled)]
    requests = pipe._builder.requests([[1, 2], [3]], configs, print, do_preprocess=True)
    assert list(requests) == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert len({requests[0, i].sampling.seed for i in range(3)}) == 1
    assert [requests[0, i].sampling.sample_index for i in range(3)] == [0, 1, 2]
    responses = pipe([[1, 2], [3]], configs)
    assert [(r.index, r.sample_index) for r in responses] == list(requests)
    assert [r.index for r in pipe([1, 2], configs[0])] == [0, 0, 0], "one prompt with several samples is a list"
    assert pipe([1, 2], configs[1]).token_ids == responses[0].token_ids
    pieces = list(pipe.stream_infer([1, 2], configs[0]))
    assert sorted(p.sample_index for p in pieces if p.finish_reason) == [0, 1, 2]


def test_what_ended_the_text_can_be_left_in_it(pipe):
    free = pipe([9, 9], GenerationConfig(max_new_tokens=30, ignore_eos=True))
    word, stop = free.text[4:6], free.token_ids[8]
    config = {"max_new_tokens": 30, "ignore_eos": True, "include_stop_str_in_output": True}
    response = pipe([9, 9], GenerationConfig(**config, stop_words=[word]))
    assert response.text == free.text[: free.text.index(word) + 2]
    response = pipe([9, 9], GenerationConfig(**config, stop_token_ids=[stop]))
    assert response.text == free.text[: free.token_ids.index(stop) + 1]


def test_a_repetition_ends_the_request(pipe):
    free = pipe([9, 9], GenerationConfig(max_new_tokens=80, ignore_eos=True))
    config = GenerationConfig(max_new_tokens=80, ignore_eos=True, repetition_ngram_size=1, repetition_ngram_threshold=3)
    response = pipe([9, 9], config)
    end = next(i for i, t in enumerate(free.token_ids) if free.token_ids[: i + 1].count(t) == 3)
    assert (response.token_ids, response.finish_reason) == (free.token_ids[: end + 1], "stop")


@pytest.mark.parametrize(
    "field", [{"stop_words": ["A"]}, {"bad_words": ["A"]}, {"response_format": {"type": "json_object"}}]
)
def test_what_speaks_of_text_needs_a_tokenizer(field):
    if "response_format" in field:
        pytest.importorskip("llguidance")
    with make(tokenizer=None) as pipe, pytest.raises(MissingTokenizerError, match=next(iter(field))):
        pipe([1], GenerationConfig(**field))


@pytest.mark.parametrize("params", [(), (1.0, 2.0), ([1.0, 2.0],), (1.0, [1.0, float("nan")]), (1.0, "ab")])
def test_parameters_of_a_processor_must_have_its_shapes(params):
    processors = {"calm": LogitsProcessor(lambda logits, times, in_prompt, a, b: logits, ((), (2,)))}
    with make(processors=processors) as pipe:
        good = GenerationConfig(logits_processor="calm", logits_processor_params=(1.0, [1.0, 2.0]))
        assert request_of(pipe, [1], good, print).sampling.processor == "calm"
        bad = GenerationConfig(logits_processor="calm", logits_processor_params=params)
        with pytest.raises(ConfigError, match=r"logits_processor_params is .*shapes \[\(\), \(2,\)\]"):
            pipe([1], bad)


def test_a_config_becomes_what_the_device_is_told():
    config = GenerationConfig(
        repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={"3": 2.0},
        bad_token_ids=[4, 4],
        do_sample=True, temperature=0.6, top_p=0.9, top_k=7, min_p=0.1, random_seed=9,
    )  # fmt: skip
    assert sampling_of(config) == SamplingParams(
        temperature=0.6, top_k=7, top_p=0.9, min_p=0.1, seed=9, repetition_penalty=1.2, presence_penalty=0.5,
        frequency_penalty=-0.5, logit_bias=((3, 2.0),), bad_token_ids=(4,),
    )  # fmt: skip
    greedy = sampling_of(GenerationConfig(repetition_penalty=1.2))
    assert (greedy.temperature, greedy.repetition_penalty) == (0.0, 1.2), "penalties change greedy answers too"
    assert sampling_of(GenerationConfig(temperature=0.7, top_k=3)) == SamplingParams()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("extent", ["all", "generation"])
def test_a_response_has_the_rows_that_were_asked_for(pipe, extent, stream):
    """The fake device writes into each row where it stands. The prompt of 21 tokens takes two chunks."""
    prompt = list(range(10, 31))
    config = GenerationConfig(
        max_new_tokens=5, ignore_eos=True, logprobs=2, prompt_logprobs=1, output_logits=extent,
        output_last_hidden_state="generation",
    )  # fmt: skip
    pieces = list(pipe.stream_infer(prompt, config)) if stream else [pipe(prompt, config)]
    tokens = [t for p in pieces for t in p.token_ids]
    assert tokens == expected(prompt, 5, ())
    logits = np.concatenate([p.logits for p in pieces])
    first = 0 if extent == "all" else 20
    assert logits.shape == (25 - first, VOCAB)
    assert logits[:, 0].tolist() == list(range(first, 25))
    assert np.concatenate([p.last_hidden_state for p in pieces])[:, 0].tolist() == list(range(20, 25))
    logprobs = [found for p in pieces for found in p.logprobs]
    assert logprobs == [{0: -p, 1: -p - 1} | {t: -p} for t, p in zip(tokens, range(20, 25), strict=True)]
    processed = [found for p in pieces for found in p.processed_logprobs]
    assert processed == [{0: -p, 1: -p} | {t: -p - 0.5} for t, p in zip(tokens, range(20, 25), strict=True)]
    prompt_logprobs = [found for p in pieces for found in p.prompt_logprobs or ()]
    assert prompt_logprobs == [None, *({0: -p} | {t: -p} for t, p in zip(prompt[1:], range(20), strict=True))]


def test_rows_behind_a_stop_word_are_cut_like_its_tokens(pipe):
    free = pipe([9, 9], GenerationConfig(max_new_tokens=30, ignore_eos=True))
    config = GenerationConfig(
        max_new_tokens=30, ignore_eos=True, stop_words=[free.text[4:6]], logprobs=0, output_logits="generation"
    )
    response = pipe([9, 9], config)
    assert len(response.token_ids) == len(response.logprobs) == len(response.logits) < 30


@pytest.mark.parametrize(
    ("fields", "reads_cache"),
    [
        ({"logprobs": 1, "output_logits": "generation"}, True),
        ({"prompt_logprobs": 0}, False),
        ({"output_last_hidden_state": "all"}, False),
    ],
)
def test_a_prompt_of_whose_rows_something_is_wanted_is_computed_whole(pipe, fields, reads_cache):
    assert request_of(pipe, [9, 9], GenerationConfig(**fields), print).reads_cache == reads_cache


def test_nothing_that_was_not_asked_for_comes_back(pipe):
    response = pipe([9, 9], GEN)
    assert (response.logprobs, response.processed_logprobs, response.prompt_logprobs) == (None, None, None)
    assert (response.logits, response.last_hidden_state) == (None, None)


def test_get_ppl_is_the_mean_loss_of_all_tokens_but_the_first(pipe):
    assert pipe.get_ppl([1, 2, 3, 4]) == [np.mean([0, 1, 2])]
    assert pipe.get_ppl([[1, 2], list(range(40))]) == [0.0, np.mean(range(39))]
    for wrong in ([1], [[1, 2], [3]], "text", [{"role": "user", "content": "A"}] * 2):
        with pytest.raises(InvalidPromptError, match="two token ids at least"):
            pipe.get_ppl(wrong)


def test_without_a_tokenizer_only_token_ids_are_served():
    with make(tokenizer=None) as pipe:
        assert pipe([2, 3], GEN).token_ids == expected([2, 3], 12)
        with pytest.raises(MissingTokenizerError, match="give a list of token ids"):
            pipe("text", GEN)


def test_a_failing_device_ends_requests_with_its_error():
    with make() as pipe:
        stream = pipe.stream_infer([[1, 2], [3, 4]], GenerationConfig(max_new_tokens=90, ignore_eos=True))
        next(stream)
        pipe._loop._stepper._runner.fails = True
        last = [p for p in stream if p.finish_reason]
        assert [p.finish_reason for p in last] == ["error", "error"]
        assert all("device lost" in p.error for p in last)
        pipe._loop._stepper._runner.fails = False
        assert pipe([2, 3], GEN).token_ids == expected([2, 3], 12), "the engine goes on"


def test_a_listener_that_is_gone_ends_its_request_alone(pipe):
    def gone(piece):
        raise RuntimeError("Event loop is closed")

    long = GenerationConfig(max_new_tokens=90, ignore_eos=True)
    request = request_of(pipe, [1, 2], long, gone)
    pipe._loop.submit(request)
    assert pipe([2, 3], GEN).token_ids == expected([2, 3], 12), "the engine goes on"
    assert wait_until_idle(pipe)
    assert len(request.generated_ids) < 90


def test_a_step_that_yields_too_few_tokens_fails_its_requests_instead_of_hanging_them(pipe):
    fetch = pipe._loop._stepper._runner.fetch
    pipe._loop._stepper._runner.fetch = lambda handle: StepResult(fetch(handle).step_id, {})
    responses = pipe([[1, 2], [3, 4]], GEN)
    assert [r.finish_reason for r in responses] == ["error", "error"]
    assert "fewer tokens than planned" in responses[0].error
    pipe._loop._stepper._runner.fetch = fetch
    assert pipe([2, 3], GEN).token_ids == expected([2, 3], 12), "the engine goes on"


def test_a_pipeline_that_is_dropped_stops_its_thread():
    pipe = make()
    thread = pipe._loop._thread
    assert pipe([2, 3], GEN).finish_reason
    del pipe
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_a_decoder_that_fails_ends_its_request_alone():
    class Broken(LetterTokenizer):
        def decode(self, token_ids, skip_special_tokens=True):
            raise KeyError("no such token")

    with make(tokenizer=Broken()) as pipe:
        response = pipe([2, 3], GEN)
        assert response.finish_reason == "error"
        assert "no such token" in response.error
        assert wait_until_idle(pipe)


def test_closing_ends_what_runs_and_refuses_what_comes():
    pipe = make(num_slots=1)
    stream = pipe.stream_infer([[1, 2], [3, 4]], GenerationConfig(max_new_tokens=90, ignore_eos=True))
    next(stream)
    pipe.close()
    pipe.close()
    rest = list(stream)
    assert {p.index for p in rest if p.finish_reason == "error"} == {0, 1}
    with pytest.raises(EngineClosedError):
        pipe([1], GEN)
