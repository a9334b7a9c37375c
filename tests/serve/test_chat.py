"""Chat completions over HTTP."""

from __future__ import annotations

import httpx
import pytest

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12}


@pytest.mark.parametrize("url", ["fake_url", "tiny_url"])
def test_a_streamed_answer_is_the_whole_answer(url, request):
    import json

    with httpx.Client(base_url=request.getfixturevalue(url), timeout=60) as client:
        whole = client.post("/v1/chat/completions", json=BODY).raise_for_status().json()
        text = whole["choices"][0]["message"]["content"]
        assert text
        streamed = client.post("/v1/chat/completions", json=BODY | {"stream": True}).raise_for_status().text
    lines = [line.removeprefix("data: ") for line in streamed.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines[:-1]]
    assert "".join(d.get("content", "") for d in deltas) == text
    assert deltas[0]["role"] == "assistant"


def test_the_model_is_listed(fake_url):
    with httpx.Client(base_url=fake_url) as client:
        models = client.get("/v1/models").json()["data"]
        assert [m["id"] for m in models] == ["tiny"]
        assert client.get("/v1/models/tiny").json() == models[0]
        assert client.get("/v1/models/other").status_code == 404


def test_an_unknown_field_is_named(fake_url):
    with httpx.Client(base_url=fake_url) as client:
        response = client.post("/v1/chat/completions", json=BODY | {"temprature": 1})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "temprature"
