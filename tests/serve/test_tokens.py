"""Tokenizing over HTTP, and what the server says of embeddings."""

from __future__ import annotations

import httpx
import pytest

from tests.serve.harness import fake_pipeline, serving_pipe


def test_texts_become_tokens_and_come_back(tiny, tiny_pipe):
    text = "Straße ☃"
    got = tiny.post("/tokenize", json={"model": "tiny", "prompt": text, "return_token_strs": True}).json()
    assert got["tokens"] == tiny_pipe.tokenizer.encode(text)
    assert got["count"] == len(text.encode())
    assert got["max_model_len"] == tiny_pipe.session_len
    assert got["token_strs"][:6] == ["S", "t", "r", "a", r"bytes:\xc3", r"bytes:\x9f"]
    assert tiny.post("/detokenize", json={"tokens": got["tokens"]}).json() == {"prompt": text}


def test_a_conversation_is_what_the_chat_reads(tiny):
    messages = [{"role": "user", "content": "Hi"}]
    got = tiny.post("/tokenize", json={"messages": messages}).json()
    text = tiny.post("/detokenize", json={"tokens": got["tokens"]}).json()["prompt"]
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    chat = {"model": "tiny", "messages": messages, "max_tokens": 1}
    usage = tiny.post("/v1/chat/completions", json=chat).json()["usage"]
    assert usage["prompt_tokens"] == got["count"]
    short = tiny.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()
    assert short["tokens"] == got["tokens"][: short["count"]]
    plain = tiny.post("/detokenize", json={"tokens": got["tokens"], "skip_special_tokens": True}).json()
    assert plain == {"prompt": "user\nHi\nassistant\n"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/tokenize", {"prompt": "a", "temperature": 1}, "temperature"),
        ("/tokenize", {"messages": [{"role": "nobody", "content": "a"}]}, "messages[0].role"),
        ("/detokenize", {"tokens": [99999]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ],
)
def test_what_is_wrong_is_named(tiny, path, body, param):
    response = tiny.post(path, json=body)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param


def test_a_model_without_a_tokenizer_says_so():
    with (
        fake_pipeline(tokenizer=None) as pipe,
        serving_pipe(pipe) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        for path, body in {
            "/tokenize": {"prompt": "a"},
            "/detokenize": {"tokens": [1]},
            "/v1/completions": {"model": "tiny", "prompt": "a"},
            "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "a"}]},
        }.items():
            response = client.post(path, json=body)
            assert response.status_code == 400, path
            assert "no tokenizer" in response.json()["error"]["message"]
        body = {"model": "tiny", "prompt": [1, 2], "max_tokens": 3, "logprobs": 0, "echo": True}
        choice = client.post("/v1/completions", json=body).json()["choices"][0]
        assert choice["text"] == ""
        assert choice["logprobs"]["tokens"][:2] == ["token_id:1", "token_id:2"]


def test_there_are_no_embeddings_and_the_server_says_why(tiny):
    response = tiny.post("/v1/embeddings", json={"model": "tiny", "input": ["a", "b"]})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "no_embeddings"
    assert tiny.post("/v1/embeddings", json={"model": "other", "input": "a"}).status_code == 404
    assert tiny.post("/v1/embeddings", json={"model": "tiny", "input": "a", "size": 3}).status_code == 400
