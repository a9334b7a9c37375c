"""Completions over HTTP: prompts in every form, echoes, scores, and where each token stands in its text."""

from __future__ import annotations

import pytest

from tests.serve.harness import events_of
from turbojax.configs import GenerationConfig
from turbojax.serve.protocol.completions import Completion

BODY = {"model": "tiny", "prompt": "The sea", "max_tokens": 8, "temperature": 0}


def answer(client, **fields):
    response = client.post("/v1/completions", json=BODY | fields)
    assert response.status_code == 200, response.text
    return Completion.model_validate(response.json())


def chunks(client, **fields):
    response = client.post("/v1/completions", json=BODY | {"stream": True} | fields)
    assert response.status_code == 200, response.text
    return [Completion.model_validate(event, extra="forbid") for event in events_of(response)]


def refusal(client, **fields):
    response = client.post("/v1/completions", json=BODY | fields)
    return response.status_code, response.json()["error"]


def test_a_prompt_goes_to_the_model_as_it_is(tiny, tiny_pipe):
    want = tiny_pipe(tiny_pipe.tokenizer.encode("The sea"), GenerationConfig(max_new_tokens=8))
    got = answer(tiny)
    assert got.choices[0].text == want.text
    assert got.choices[0].finish_reason == "length"
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (7, 8)
    assert got.choices[0].logprobs is None


def test_texts_and_token_ids_one_or_many_are_the_same_prompts(tiny, tiny_pipe):
    texts = ["The sea", "A hill!"]
    ids = [tiny_pipe.tokenizer.encode(text) for text in texts]
    alone = [answer(tiny, prompt=text).choices[0].text for text in texts]
    for prompt, want in ((texts, alone), (ids, alone), (ids[1], alone[1:]), (texts[:1], alone[:1])):
        got = answer(tiny, prompt=prompt)
        assert [choice.text for choice in got.choices] == want
        assert [choice.index for choice in got.choices] == list(range(len(want)))
        assert got.usage.prompt_tokens == 7 * len(want)


def test_choices_stand_in_order_of_prompt_and_sample(tiny):
    body = {"prompt": ["The sea", "A hill!"], "n": 2, "temperature": 1, "seed": 11, "ignore_eos": True}
    got = answer(tiny, **body)
    assert [choice.index for choice in got.choices] == [0, 1, 2, 3]
    alone = [answer(tiny, **body | {"prompt": prompt}) for prompt in body["prompt"]]
    assert [c.text for c in got.choices] == [c.text for one in alone for c in one.choices]
    assert got.usage.prompt_tokens == 14
    assert got.usage.completion_tokens == 32
    pieces = chunks(tiny, **body)
    assert [text_of(pieces, index) for index in range(4)] == [c.text for c in got.choices]


def text_of(pieces, index):
    return "".join(c.text for piece in pieces for c in piece.choices if c.index == index)


def test_sixteen_tokens_are_the_default(fake):
    assert answer(fake, max_tokens=None).usage.completion_tokens == 16


def test_an_echo_comes_first(fake):
    whole, alone = answer(fake, echo=True), answer(fake)
    assert whole.choices[0].text == "The sea" + alone.choices[0].text
    assert text_of(chunks(fake, echo=True), 0) == whole.choices[0].text
    assert answer(fake, echo=True, prompt=[3, 4]).choices[0].text.startswith("DE")


def test_a_prompt_is_scored_without_an_answer(tiny, tiny_pipe):
    """As evaluation harnesses do: the log-probabilities of given tokens."""
    prompt = "The sea is blue"
    ids = tiny_pipe.tokenizer.encode(prompt)
    want = tiny_pipe(ids, GenerationConfig(max_new_tokens=1, prompt_logprobs=1)).prompt_logprobs
    for given in (prompt, ids):
        got = answer(tiny, prompt=given, max_tokens=0, echo=True, logprobs=1)
        assert got.choices[0].text == prompt
        assert got.choices[0].finish_reason == "length"
        assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (len(ids), 0)
        table = got.choices[0].logprobs
        assert table.tokens == list(prompt)
        assert table.text_offset == list(range(len(prompt)))
        assert table.token_logprobs[0] is None
        assert table.top_logprobs[0] is None
        scores = [found[token] for token, found in zip(ids[1:], want[1:], strict=True)]
        assert table.token_logprobs[1:] == pytest.approx(scores)
        # A token is the greedy choice where its name is that of the likeliest.
        best = [max(found, key=found.get) for found in want[1:]]
        assert [next(iter(top.values())) for top in table.top_logprobs[1:]] == pytest.approx(
            [found[token] for token, found in zip(best, want[1:], strict=True)]
        )
    total = tiny_pipe.get_ppl(ids)[0] * (len(ids) - 1)
    assert -sum(table.token_logprobs[1:]) == pytest.approx(total)


def test_logprobs_stand_beside_every_token_in_pieces_too(tiny):
    body = {"echo": True, "logprobs": 3, "max_tokens": 6, "n": 2, "temperature": 1, "seed": 1, "ignore_eos": True}
    whole, pieces = answer(tiny, **body), chunks(tiny, **body)
    for choice in whole.choices:
        table = choice.logprobs
        assert len(table.tokens) == len(table.token_logprobs) == len(table.top_logprobs) == len(table.text_offset) == 13
        assert all(len(top) == 3 for top in table.top_logprobs[1:])
        assert table.text_offset == sorted(table.text_offset)
        for name, start in zip(table.tokens, table.text_offset, strict=True):
            if not name.startswith("bytes:"):  # U+FFFD: of bytes before it that were no character
                assert choice.text[start:].lstrip("\ufffd").startswith(name)
        streamed = [c.logprobs for piece in pieces for c in piece.choices if c.index == choice.index]
        for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [row for part in streamed for row in getattr(part, field)] == getattr(table, field)


def test_a_token_that_is_no_whole_character_is_named_by_its_bytes(tiny, tiny_pipe):
    got = answer(tiny, prompt="aé€b", max_tokens=0, echo=True, logprobs=0).choices[0].logprobs
    assert got.tokens == ["a", r"bytes:\xc3", r"bytes:\xa9", r"bytes:\xe2", r"bytes:\x82", r"bytes:\xac", "b"]
    assert got.text_offset == [0, 1, 1, 2, 2, 2, 3], "where the character begins"
    assert got.top_logprobs[1:] == [{}] * 6


def test_special_tokens_take_no_room_in_the_text(tiny):
    table = answer(tiny, max_tokens=4, logprobs=0, ignore_eos=True, logit_bias={"258": 100}, echo=True).choices[0]
    assert table.logprobs.tokens == [*"The sea", *["<|im_start|>"] * 4]
    assert table.text == "The sea"
    assert table.logprobs.text_offset == [0, 1, 2, 3, 4, 5, 6, 7, 7, 7, 7]
    shown = answer(tiny, max_tokens=2, ignore_eos=True, logit_bias={"258": 100}, skip_special_tokens=False)
    assert shown.choices[0].text == "<|im_start|>" * 2


def test_a_request_says_what_is_wrong_with_it(fake):
    cases = {
        "prompt": ({"prompt": ""}, 400),
        "prompt[1]": ({"prompt": ["a", 3]}, 400),
        "prompt[0]": ({"prompt": []}, 400),
        "max_tokens": ({"max_tokens": 0}, 400),
        "suffix": ({"suffix": "end"}, 400),
        "best_of": ({"best_of": 2}, 400),
        "logprobs": ({"logprobs": 21}, 400),
        "stream_options": ({"stream_options": {"include_usage": True}}, 400),
        "messages": ({"messages": []}, 400),
    }
    for param, (fields, want) in cases.items():
        status, error = refusal(fake, **fields)
        assert (status, (error["param"] or "").split("[")[0]) == (want, param.split("[")[0]), error
    assert refusal(fake, prompt=[99])[1]["param"] == "prompt"
    status, error = refusal(fake, prompt=[1] * 500)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert refusal(fake, suffix="end")[1]["code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", r'{"model": "tiny", "prompt": "a\ud800"}', "prompt"),
        ("/v1/completions", r'{"model": "ti\ud800ny", "prompt": "a"}', "model"),
        ("/v1/completions", r'{"model": "tiny", "prompt": ["a", "\udc00"]}', "prompt[1]"),
        ("/v1/completions", r'{"model": "tiny", "prompt": "a", "stop": "\ud800"}', "stop"),
        ("/v1/completions", r'{"model": "tiny", "prompt": "a", "temperature": NaN}', "temperature"),
        ("/tokenize", r'{"prompt": "a\ud800"}', "prompt"),
        ("/v1/completions", r'{"model": "tiny", "prompt": ', None),
    ],
)
def test_what_json_can_say_and_nobody_can_read_is_refused(tiny, path, body, param):
    """Half a surrogate pair is none of UTF-8's characters, and NaN no number."""
    response = tiny.post(path, content=body.encode(), headers={"Content-Type": "application/json"})
    assert response.status_code in (400, 404), response.text
    assert response.json()["error"]["param"] == param
