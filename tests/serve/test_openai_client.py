"""The server as its users meet it: through the official client, at once and in pieces, in threads and event loops."""

from __future__ import annotations

import asyncio
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from tests.pipeline.harness import wait_until_idle
from turbojax.configs import GenerationConfig

HI = [{"role": "user", "content": "Hi"}]
ASK = {"model": "tiny", "messages": HI, "max_tokens": 8, "temperature": 0}


class City(BaseModel):
    """A structured answer; without texts, which a model with random weights would not end."""

    size: Literal["small", "large"]
    has_river: bool


@pytest.fixture(scope="module")
def client(tiny_url):
    with openai.OpenAI(base_url=f"{tiny_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def run(tiny_url, work):
    """Runs `work(client)` with an asynchronous client."""

    async def main():
        async with openai.AsyncOpenAI(base_url=f"{tiny_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            return await work(client)

    return asyncio.run(main())


@pytest.fixture(scope="module")
def text(client):
    return client.chat.completions.create(**ASK).choices[0].message.content


def test_models_are_listed(client):
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_an_answer_comes_at_once(client, tiny_pipe, text):
    got = client.chat.completions.create(**ASK)
    want = tiny_pipe(HI, GenerationConfig(max_new_tokens=8))
    assert got.choices[0].message.content == text == want.text
    assert got.choices[0].message.role == "assistant"
    assert got.usage.completion_tokens == want.num_generated_tokens
    assert got.usage.prompt_tokens_details.cached_tokens <= got.usage.prompt_tokens


def test_an_answer_comes_in_pieces(client, text):
    stream = client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
    pieces = list(stream)
    assert "".join(p.choices[0].delta.content or "" for p in pieces[:-1]) == text
    assert pieces[-1].choices == []
    assert pieces[-1].usage.completion_tokens == 8


def test_the_clients_own_reader_of_streams_puts_an_answer_together(client, text):
    with client.chat.completions.stream(**ASK, logprobs=True, top_logprobs=1, stop=text[4:]) as stream:
        kinds = {event.type for event in stream}
        whole = stream.get_final_completion()
    assert whole.choices[0].message.content == text[:4]
    assert whole.choices[0].logprobs.content
    assert {"content.delta", "content.done", "chunk"} <= kinds


def test_an_event_loop_asks_much_at_once(tiny_url, text):
    async def work(client):
        async def streamed():
            stream = await client.chat.completions.create(**ASK, stream=True)
            return "".join([piece.choices[0].delta.content or "" async for piece in stream])

        whole = client.chat.completions.create(**ASK)
        first, *rest = await asyncio.gather(whole, *(streamed() for _ in range(3)))
        return [first.choices[0].message.content, *rest]

    assert run(tiny_url, work) == [text] * 4


def test_samples_and_their_probabilities(client):
    got = client.chat.completions.create(
        **ASK | {"temperature": 1}, n=2, seed=4, logprobs=True, top_logprobs=2, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in got.choices] == [0, 1]
    for choice in got.choices:
        assert len(choice.logprobs.content) == 8
        for row in choice.logprobs.content:
            first, second = row.top_logprobs
            assert first.logprob >= max(second.logprob, row.logprob)
    assert got.choices[0].message.content != got.choices[1].message.content


def test_an_answer_is_an_object_of_a_class(client):
    pytest.importorskip("llguidance")
    # White space may come between any two tokens of JSON, and nothing tells this model to leave it out.
    got = client.chat.completions.parse(**ASK | {"max_tokens": 400}, response_format=City)
    assert got.choices[0].finish_reason == "stop"
    assert got.choices[0].message.parsed == City.model_validate_json(got.choices[0].message.content)


def test_a_format_bounds_an_answer(client):
    pytest.importorskip("llguidance")
    choice = {"response_format": {"type": "choice", "choice": ["yes", "no"]}}
    assert client.chat.completions.create(**ASK, extra_body=choice).choices[0].message.content in ("yes", "no")
    form = {"type": "json_schema", "json_schema": {"name": "size", "schema": {"type": "nonsense"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ASK, response_format=form)
    assert caught.value.param == "response_format"


def test_completions_take_lists_and_echo_them(client):
    ask = {"model": "tiny", "prompt": ["ab", "cd"], "max_tokens": 4, "temperature": 0}
    got = client.completions.create(**ask, echo=True, logprobs=1)
    assert [choice.text[:2] for choice in got.choices] == ["ab", "cd"]
    assert all(len(choice.logprobs.tokens) == 6 for choice in got.choices)
    texts = {0: "ab", 1: "cd"}
    for piece in client.completions.create(**ask, stream=True):
        for choice in piece.choices:
            texts[choice.index] += choice.text
    assert [texts[0], texts[1]] == [choice.text for choice in got.choices]


def test_errors_are_the_clients_own(client):
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(**ASK | {"model": "other"})
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as unknown:
        client.chat.completions.create(**ASK, extra_body={"colour": "red"})
    assert (unknown.value.code, unknown.value.param) == ("unknown_parameter", "colour")
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(**ASK | {"messages": [{"role": "user", "content": "a" * 600}]}, stream=True)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as none:
        client.embeddings.create(model="tiny", input="a")
    assert none.value.code == "no_embeddings"


def test_a_reader_that_stops_ends_its_request(client, tiny_pipe):
    with client.chat.completions.create(**ASK | {"max_tokens": 400}, stream=True) as stream:
        next(iter(stream))
    assert wait_until_idle(tiny_pipe)
    assert tiny_pipe.status.num_running == 0
