"""Chat completions over HTTP: what comes of a conversation, whole and in pieces."""

from __future__ import annotations

import json
import math

import httpx
import pytest

from tests.serve.harness import CHAT_TEMPLATE, events_of, fake_pipeline, serving_pipe
from turbojax.configs import GenerationConfig
from turbojax.serve.protocol.chat import ChatChunk, ChatCompletion
from turbojax.serve.tally import Tally

MESSAGES = [{"role": "user", "content": "Hi"}]
BODY = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
PROMPT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def answer(client, **fields):
    response = client.post("/v1/chat/completions", json=BODY | fields)
    assert response.status_code == 200, response.text
    return ChatCompletion.model_validate(response.json())


def chunks(client, **fields):
    response = client.post("/v1/chat/completions", json=BODY | {"stream": True} | fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return [ChatChunk.model_validate(event, extra="forbid") for event in events_of(response)]


def refusal(client, **fields):
    response = client.post("/v1/chat/completions", json=BODY | fields)
    return response.status_code, response.json()["error"]


def text_of(pieces, index=0):
    return "".join(c.delta.content or "" for p in pieces for c in p.choices if c.index == index)


def test_the_answer_is_what_the_engine_says_to_the_templates_prompt(tiny, tiny_pipe):
    want = tiny_pipe(tiny_pipe.tokenizer.encode(PROMPT), GenerationConfig(max_new_tokens=12))
    got = answer(tiny)
    assert got.choices[0].message.content == want.text
    assert got.choices[0].finish_reason == want.finish_reason
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (want.num_input_tokens, want.num_generated_tokens)
    assert got.usage.total_tokens == want.num_input_tokens + want.num_generated_tokens
    assert got.id.startswith("chatcmpl-")
    assert got.model == "tiny"
    assert "<|im_start|>" in CHAT_TEMPLATE


def test_a_streamed_answer_is_the_whole_answer(tiny):
    whole, pieces = answer(tiny, seed=3, temperature=1), chunks(tiny, seed=3, temperature=1)
    assert text_of(pieces) == whole.choices[0].message.content
    assert pieces[0].choices[0].delta.role == "assistant"
    assert [p.choices[0].finish_reason for p in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert len({p.id for p in pieces}) == 1
    assert all(p.usage is None for p in pieces)


def test_the_usage_of_a_stream_comes_last_where_it_is_asked_for(fake):
    pieces = chunks(fake, stream_options={"include_usage": True})
    assert pieces[-1].choices == []
    assert pieces[-1].usage == answer(fake).usage.model_copy(
        update={"prompt_tokens_details": pieces[-1].usage.prompt_tokens_details}
    )
    status, error = refusal(fake, stream_options={"include_usage": True})
    assert (status, error["param"]) == (400, "stream_options")


def test_the_usage_says_what_the_cache_had(tiny):
    long = [{"role": "user", "content": "a prompt that nobody else asks, of some pages of 16 tokens"}]
    first, second = answer(tiny, messages=long).usage, answer(tiny, messages=long).usage
    shared = len("<|im_start|>user\n")  # a token and five letters, which other prompts have too
    assert first.prompt_tokens_details.cached_tokens <= shared
    assert second.prompt_tokens_details.cached_tokens == second.prompt_tokens - 1, "all but the last"
    salted = answer(tiny, messages=long, cache_salt="mine").usage
    assert salted.prompt_tokens_details.cached_tokens == 0


def test_choices_are_samples_of_one_prompt(tiny):
    whole = answer(tiny, n=2, temperature=1, seed=5, ignore_eos=True)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert texts[0] != texts[1]
    assert whole.usage.completion_tokens == 24
    assert whole.usage.prompt_tokens == answer(tiny).usage.prompt_tokens, "the prompt counts once"
    pieces = chunks(tiny, n=2, temperature=1, seed=5, ignore_eos=True)
    assert [text_of(pieces, index) for index in (0, 1)] == texts


def test_a_stop_text_ends_the_answer_before_it(tiny):
    text = answer(tiny).choices[0].message.content
    word = text[4:6]
    cut = answer(tiny, stop=word).choices[0]
    assert cut.message.content == text[: text.index(word)]
    assert cut.finish_reason == "stop"
    shown = answer(tiny, stop=[word], include_stop_str_in_output=True).choices[0]
    assert shown.message.content == text[: text.index(word)] + word


def test_logprobs_are_the_engines(tiny, tiny_pipe):
    want = tiny_pipe(tiny_pipe.tokenizer.encode(PROMPT), GenerationConfig(max_new_tokens=12, logprobs=2))
    whole = answer(tiny, logprobs=True, top_logprobs=2).choices[0].logprobs
    assert [row.logprob for row in whole.content] == pytest.approx(
        [found[token] for token, found in zip(want.token_ids, want.logprobs, strict=True)]
    )
    for row, found in zip(whole.content, want.logprobs, strict=True):
        assert [top.logprob for top in row.top_logprobs] == pytest.approx(list(found.values())[:2])
    assert (
        b"".join(bytes(row.bytes) for row in whole.content).decode(errors="replace")
        == answer(tiny).choices[0].message.content
    )
    streamed = chunks(tiny, logprobs=True, top_logprobs=2)
    choices = [piece.choices[0] for piece in streamed]
    assert [row for choice in choices if choice.logprobs for row in choice.logprobs.content] == whole.content
    assert streamed[-1].choices[0].delta.model_dump(exclude_none=True) == {}, "the end stands alone"
    assert answer(tiny, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []


def test_a_probability_of_zero_is_a_number_that_json_has(tiny):
    only = answer(tiny, logprobs=True, top_logprobs=20, max_tokens=1, logit_bias={"40": 100})
    rows = only.choices[0].logprobs.content
    assert all(math.isfinite(top.logprob) for row in rows for top in row.top_logprobs)
    assert rows[0].token == "I", "the bias decides"


def test_a_request_says_what_is_wrong_with_it(fake):
    cases = {
        "model": ({"model": "other"}, 404),
        "temperature": ({"temperature": 3}, 400),
        "max_tokens": ({"max_tokens": "many"}, 400),
        "max_completion_tokens": ({"max_completion_tokens": 13}, 400),
        "top_logprobs": ({"top_logprobs": 2}, 400),
        "min_new_tokens": ({"min_new_tokens": 13}, 400),
        "n": ({"n": 2}, 400),
        "messages": ({"messages": []}, 400),
        "messages[0].content[0].type": (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            400,
        ),
        "stop[1]": ({"stop": ["a", ""]}, 400),
        "tool_choice": ({"tool_choice": "auto"}, 400),
        "parallel_tool_calls": ({"parallel_tool_calls": False}, 400),
        "stream_options.include_usge": ({"stream": True, "stream_options": {"include_usge": True}}, 400),
        "logit_bias": ({"logit_bias": {"99": 1}}, 400),
    }
    for param, (fields, want) in cases.items():
        for stream in (False, True):
            status, error = refusal(fake, **{"stream": stream} | fields)
            assert (status, error["param"]) == (want, param), error
            assert error["type"] == "invalid_request_error"


def test_a_prompt_that_is_too_long_says_both_lengths(fake, fake_pipe):
    status, error = refusal(fake, messages=[{"role": "user", "content": "a" * 500}])
    assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
    assert "506" in error["message"]
    assert str(fake_pipe.session_len) in error["message"]


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("store", True, False),
        ("service_tier", "flex", "auto"),
        ("modalities", ["text", "audio"], ["text"]),
        ("prompt_cache_retention", "24h", "in_memory"),
        ("metadata", {"a": "b"}, None),
        ("functions", [], None),
        ("function_call", "auto", None),
        ("prediction", {"type": "content", "content": "x"}, None),
        ("prompt_cache_key", "k", None),
        ("safety_identifier", "k", None),
        ("verbosity", "low", None),
        ("web_search_options", {}, None),
        ("audio", {"voice": "x", "format": "wav"}, None),
        ("moderation", {}, None),
        ("session_id", 4, -1),
        ("reasoning_effort", "low", None),
        ("enable_thinking", True, None),
        ("tools", [{"type": "function", "function": {"name": "f"}}], []),
        ("chat_template_kwargs", {"x": 1}, {}),
    ],
)
def test_what_is_not_offered_is_refused_by_name(fake, field, value, accepted):
    status, error = refusal(fake, **{field: value})
    assert status == 400
    assert error["param"].startswith(field)
    assert len(error["message"]) > len(field) + 20, "says why"
    answer(fake, **{field: accepted})


def test_a_field_that_nobody_knows_is_refused_by_name(fake):
    status, error = refusal(fake, temprature=1)
    assert (status, error["param"], error["code"]) == (400, "temprature", "unknown_parameter")
    assert "temprature" in error["message"]


def test_the_log_has_the_user_that_the_client_names_and_nothing_of_what_was_said(fake, caplog):
    caplog.set_level("INFO", "turbojax")
    answer(fake, user="somebody", messages=[{"role": "user", "content": "secret"}])
    (fields,) = [record.fields for record in caplog.records if record.getMessage() == "generation"]
    assert fields["user"] == "somebody"
    assert "secret" not in caplog.text


def test_an_engine_that_is_closed_ends_a_stream_with_an_error():
    with fake_pipeline() as pipe, serving_pipe(pipe) as url, httpx.Client(base_url=url, timeout=60) as client:
        body = BODY | {"stream": True, "max_tokens": 390}
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            pipe.close()
            *_, last = lines
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
        late = client.post("/v1/chat/completions", json=body)
        assert late.status_code == 503
        assert late.headers["Retry-After"]


def test_what_nobody_expected_ends_a_stream_and_stands_in_the_log_alone(fake, monkeypatch, caplog):
    add, pieces = Tally.add, []

    def fails(self, piece):
        pieces.append(piece)
        if len(pieces) == 2:
            raise KeyError("secret")
        add(self, piece)

    monkeypatch.setattr(Tally, "add", fails)
    response = fake.post("/v1/chat/completions", json=BODY | {"stream": True, "max_tokens": 390})
    error = json.loads(response.text.split("data: ")[-1])["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert "secret" not in response.text
    assert "secret" in caplog.text
