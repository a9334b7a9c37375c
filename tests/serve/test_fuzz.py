"""Whatever comes in a body: an answer, or a refusal as OpenAI writes it; never a failure, and the engine stays idle."""

from __future__ import annotations

import copy
import json

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.pipeline.harness import wait_until_idle
from tests.serve.harness import MODEL_NAME, serving_pipe
from tests.serve.scripted import THINKING_TEMPLATE, scripted_pipeline
from turbojax.serve.settings import ServeConfig

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SAMPLING = {
    "model": MODEL_NAME, "stream": False, "stream_options": None, "n": 2, "temperature": 0.5, "top_p": 0.5, "top_k": 3,
    "min_p": 0.1, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1.1, "logit_bias": {"65": 1},
    "stop": ["x"], "stop_token_ids": [1], "seed": 1, "response_format": {"type": "json_object"}, "user": "u",
    "ignore_eos": False, "skip_special_tokens": True, "min_new_tokens": 1, "bad_words": ["y"], "bad_token_ids": [2],
    "include_stop_str_in_output": True, "repetition_ngram_size": 3, "repetition_ngram_threshold": 3, "priority": 1,
    "cache_salt": "s", "timeout_s": 5.0, "session_id": -1, "max_tokens": 4,
}  # fmt: skip
MESSAGES = [
    {"role": "system", "content": "Be brief"},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "ada"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "1"},
]
# By route: a body with everything that it can have. Fuzzed requests have some of it, some of that changed.
BODIES = {
    "/v1/chat/completions": {
        **SAMPLING, "messages": MESSAGES, "tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True,
        "logprobs": True, "top_logprobs": 2, "max_completion_tokens": 4, "reasoning_effort": "none",
        "chat_template_kwargs": {"enable_thinking": False}, "enable_thinking": True, "add_generation_prompt": False,
        "continue_final_message": True, "functions": None,
        "metadata": None, "modalities": ["text"], "store": False,
    },
    "/v1/completions": {
        **SAMPLING, "prompt": ["Hi", "Ho"], "echo": True, "logprobs": 1, "best_of": 1, "suffix": "",
    },
    "/tokenize": {"model": MODEL_NAME, "prompt": "Hi", "add_special_tokens": True, "return_token_strs": True},
    "/tokenize?": {
        "model": MODEL_NAME, "messages": MESSAGES, "tools": [TOOL], "return_token_strs": True,
        "add_generation_prompt": True, "chat_template_kwargs": {},
    },
    "/detokenize": {"model": MODEL_NAME, "tokens": [65, 66], "skip_special_tokens": True},
    "/v1/embeddings": {"model": MODEL_NAME, "input": ["Hi"], "encoding_format": "float", "dimensions": 4, "user": "u"},
    "/v1/batches": {
        "input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h",
        "metadata": {"a": "b"},
    },
}  # fmt: skip
NEEDED = {"model", "messages", "prompt", "tokens", "input", "input_file_id", "endpoint", "completion_window"}

edges = st.sampled_from([
    None, True, 0, -1, 1, 2, 2**31 - 1, 2**31, 2**53, 2**63, -(2**63), 10**400, 0.0, -0.0, 1e-300, 1e308, -1e308,
    float("nan"), float("inf"), "", " ", "0", "\x00", "\ud83d", "é" * 600, "auto", "required", "none", [], {},
    [[]], [{}], [None], [""], ["a"] * 65, [0] * 100, {"": None}, {"type": "json_schema"}, {"type": "text"},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/$defs/none"}}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"properties": {"a": {"$ref": "#"}}}}},
    {"type": "regex_schema", "regex_schema": "("}, {"type": "regex_schema", "regex_schema": "(a{1000}){1000}"},
    {"type": "grammar", "grammar": "start: start"}, {"type": "choice", "choice": ["a", "b"]},
    {"type": "function", "function": {"name": "f"}}, {"type": "function"}, {"include_usage": True}, [TOOL, TOOL],
    {"-1": 1}, {"999999999": 1}, {"65": 1e9}, [[65], [66]], [65, 66], [[65], "a"], ["a", 65], {"a": []},
])  # fmt: skip
keys = st.sampled_from(
    ["role", "content", "type", "text", "tool_calls", "function", "name", "arguments", "id", "model"]
)
json_values = st.recursive(
    edges | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys | st.text(max_size=3), inner, max_size=4),
    max_leaves=8,
)


@st.composite
def requests(draw):
    """A route and a body that is right but for one, two or three of its fields, at any depth."""
    route = draw(st.sampled_from(["/v1/chat/completions", "/v1/completions", *sorted(BODIES)]))
    whole = BODIES[route]
    chosen = draw(st.sets(st.sampled_from(sorted(whole)), max_size=4)) | (NEEDED & whole.keys())
    body = json.loads(json.dumps({key: whole[key] for key in whole if key in chosen}))
    if body.get("response_format") and "tools" in body:
        del body["tools"]
    if route.endswith("completions"):
        body["stream"] = draw(st.booleans())
    for _ in range(draw(st.integers(0, 3))):
        mutate(draw, body)
    return route, body


def mutate(draw, body):
    """Changes a place of a body: goes down a few levels and puts something else there, or takes it away."""
    at, key = body, draw(st.sampled_from([*sorted(body.keys() - {"model"}), "unknown"]))
    while at.get(key) and isinstance(at[key], list | dict) and draw(st.booleans()):
        at = at[key]
        if isinstance(at, list):
            index = draw(st.integers(0, len(at) - 1))
            if not isinstance(at[index], dict) or draw(st.booleans()):
                at[index] = copy.deepcopy(draw(json_values))
                return
            at = at[index]
        if not at:
            return
        key = draw(st.sampled_from(sorted(at)))
    if draw(st.integers(0, 4)) == 0:
        at.pop(key, None)
    else:
        at[key] = copy.deepcopy(draw(json_values))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(client, pipeline) of a server whose model says one short thing."""
    config = ServeConfig(server_port=0, log_level="error", batch_dir=str(tmp_path_factory.mktemp("fuzz") / "batches"))
    with scripted_pipeline(THINKING_TEMPLATE, session_len=200) as scripted:
        scripted.say('{"a": 1}')
        with serving_pipe(scripted.pipe, config) as url, httpx.Client(base_url=url, timeout=60) as client:
            yield client, scripted.pipe


def check(response, body):
    shown = f"{response.status_code} {response.text[:300]} for {body!r:.500}"
    assert response.status_code < 500, shown
    if response.status_code != 200:
        is_error(response.json(), shown)
    elif response.headers["content-type"].startswith("text/event-stream"):
        *events, end = response.text.removesuffix("\n\n").split("\n\n")
        if end != "data: [DONE]":
            is_error(json.loads(end.removeprefix("data: ")), shown)
        for event in events:
            strict_json(event.removeprefix("data: "))
    else:
        strict_json(response.text)


def is_error(answer, shown):
    assert answer.keys() == {"error"}, shown
    error = answer["error"]
    assert error.keys() == {"message", "type", "param", "code"}, shown
    assert isinstance(error["message"], str), shown
    assert error["message"], shown
    assert len(error["message"]) < 5000, "an error does not send the request back"
    assert isinstance(error["type"], str), shown
    assert error["type"] != "server_error", shown
    assert isinstance(error["param"], str | None), shown
    assert isinstance(error["code"], str | None), shown


def strict_json(text):
    def refuse(word):
        raise ValueError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


@settings(max_examples=250, deadline=None)
@given(requests())
def test_bodies_that_are_right_but_for_some_fields(server, request_):
    client, pipe = server
    route, body = request_
    response = client.post(route, content=json.dumps(body), headers={"Content-Type": "application/json"})
    check(response, body)
    assert wait_until_idle(pipe), "something leaked"


@settings(deadline=None)
@given(st.sampled_from(sorted(BODIES)), json_values)
def test_json_of_any_shape(server, route, value):
    client, _ = server
    response = client.post(route, content=json.dumps(value), headers={"Content-Type": "application/json"})
    assert response.status_code in (400, 404), response.text
    check(response, value)


@settings(deadline=None)
@given(st.sampled_from(sorted(BODIES)), st.binary(max_size=40), st.sampled_from(["application/json", "text/plain", ""]))
@example("/v1/chat/completions", b"", "application/json")
@example("/v1/completions", b"\xff\xfe{\x00}\x00", "application/json")
@example("/v1/chat/completions", b"\xef\xbb\xbf{}", "application/json")
@example("/tokenize", b"[" * 100_000, "application/json")
@example("/v1/completions", b'{"a":' * 50_000, "application/json")
@example("/detokenize", b'{"tokens": [' + b"1" * 5000 + b"]}", "application/json")
@example("/v1/completions", b'{"prompt": "\\ud83d", "model": "tiny"}', "application/json")
@example("/v1/completions", b'{"prompt": "a", "prompt": "b", "model": "tiny", "max_tokens": 1}', "application/json")
def test_bytes_of_any_kind(server, route, data, content_type):
    client, _ = server
    check(client.post(route, content=data, headers={"Content-Type": content_type}), data)


def schema(**parts):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": parts}}


SCHEMA = "response_format.json_schema.schema"
COSTLY = [  # each of these used up seconds to minutes of the engine's time, or all of it
    (schema(type="object", properties={f"p{i}": {} for i in range(2000)}), SCHEMA),
    (schema(type="integer", multipleOf=123456789), SCHEMA),
    (schema(allOf=[{"multipleOf": 9973}, {"multipleOf": 9967}]), SCHEMA),
    (schema(enum=list(range(10_000))), SCHEMA),
    (schema(type="string", pattern="(a{1000}){1000}b|(c{1000}){1000}"), None),
    ({"type": "regex_schema", "regex_schema": "(a{1000}){1000}"}, None),
    ({"type": "regex_schema", "regex_schema": "a?" * 10_000}, "response_format.regex_schema"),
    ({"type": "grammar", "grammar": 'start: ("a"{1000}){1000}'}, "response_format"),
]


@pytest.mark.parametrize(("form", "param"), COSTLY)
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_forms_that_would_take_too_long_are_refused(server, route, form, param):
    client, _ = server
    body = {key: value for key, value in BODIES[route].items() if key in NEEDED} | {"response_format": form}
    response = client.post(route, json=body | {"max_tokens": 4})
    check(response, body)
    if param is not None:
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param


def test_a_request_has_a_bounded_number_of_answers(server):
    client, _ = server
    body = {"model": MODEL_NAME, "prompt": ["a"] * 300, "n": 4, "temperature": 1}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "n"


@pytest.mark.parametrize("route", BODIES)
def test_whole_bodies_are_known(server, route):
    """What the fuzzed bodies begin with is what the routes know: no field of it is refused as unknown."""
    client, _ = server
    for key, value in BODIES[route].items():
        needed = {name: needed for name, needed in BODIES[route].items() if name in NEEDED}
        response = client.post(route, json={**needed, key: value})
        assert "nknown" not in response.text, (key, response.text)
        check(response, key)
