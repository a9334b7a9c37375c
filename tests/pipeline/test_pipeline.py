"""The Python API on an engine without a device: prompts in all forms, threads, asyncio, cancelling, failing."""

import asyncio
import gc
import threading

import numpy as np
import pytest

from tests.engine.fake import VOCAB
from tests.pipeline.harness import (
    EOS,
    GEN,
    LetterTokenizer,
    expected,
    make,
    pipe,
    request_of,
    wait_until_idle,
)
from turbojax.configs import GenerationConfig
from turbojax.engine.plan import StepResult
from turbojax.errors import (
    EmptyPromptError,
    EngineClosedError,
    InvalidPromptError,
    MissingTokenizerError,
    PromptTooLongError,
)

__all__ = ["pipe"]


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
