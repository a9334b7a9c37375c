"""Every field of OpenAI's clients is known, and what a request asks for is what the engine is asked."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import TypeAdapter, WrapValidator

from tests.serve.harness import MODEL_NAME, fake_pipeline, service_on
from turbojax.configs import GenerationConfig
from turbojax.engine.request import Progress
from turbojax.engine.response import Answer
from turbojax.errors import (
    ConfigError,
    EngineClosedError,
    EngineFailedError,
    GuideError,
    InvalidFieldError,
    NumericsError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
)
from turbojax.serve.app import create_app
from turbojax.serve.generation import SAME, generation_config, naming
from turbojax.serve.openai_errors import ApiError, parsed, to_api_error
from turbojax.serve.protocol.chat import ChatRequest
from turbojax.serve.protocol.completions import CompletionRequest
from turbojax.serve.protocol.embeddings import EmbeddingRequest
from turbojax.serve.settings import ServeConfig
from turbojax.serve.tally import Tally

FORM = {"type": "json_schema"}
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ChatRequest, chat_create_params.CompletionCreateParamsStreaming),
        (CompletionRequest, completion_create_params.CompletionCreateParamsStreaming),
        (EmbeddingRequest, embedding_create_params.EmbeddingCreateParams),
    ],
)
def test_every_field_of_the_official_client_is_known(ours, theirs):
    missing = set(typing.get_type_hints(theirs)) - ours.model_fields.keys()
    assert not missing, "neither honoured nor refused with a reason"


@pytest.fixture
def service():
    with fake_pipeline() as pipe:
        pipe.sampling_defaults = {}
        yield service_on(pipe)


def chat(**fields):
    return parsed(ChatRequest, {"model": MODEL_NAME, "messages": MESSAGES, **fields})


def test_what_is_left_open_is_openais(service):
    got = generation_config(service, chat(), max_new_tokens=None)
    assert got == GenerationConfig(
        max_new_tokens=None, do_sample=True, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0
    )


def test_what_is_left_open_is_the_models_where_it_recommends_something(service):
    service.pipe.sampling_defaults = {"temperature": 0.6, "top_k": 20}
    got = generation_config(service, chat(top_k=5))
    assert (got.temperature, got.top_k, got.top_p) == (0.6, 5, 1.0)


def test_temperature_zero_is_greedy_and_takes_nothing_from_the_model(service):
    service.pipe.sampling_defaults = {"repetition_penalty": 1.1}
    got = generation_config(service, chat(temperature=0))
    assert got == GenerationConfig(do_sample=False, temperature=0)


def test_every_field_reaches_the_engine(service):
    fields = {
        "n": 2, "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"7": 3.5}, "ignore_eos": True,
        "skip_special_tokens": False, "min_new_tokens": 3, "stop_token_ids": [4], "bad_words": ["no"],
        "bad_token_ids": [5], "include_stop_str_in_output": True, "repetition_ngram_size": 3,
        "repetition_ngram_threshold": 4, "priority": 2, "cache_salt": "mine", "timeout_s": 9.5,
    }  # fmt: skip
    assert fields.keys() == set(SAME)
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2}
    body = chat(**fields, **sampling, seed=2**40 + 3, stop=["end", "."])
    assert generation_config(service, body) == GenerationConfig(
        do_sample=True, random_seed=3, stop_words=("end", "."), **sampling, **fields
    )
    assert generation_config(service, chat(stop="end")).stop_words == ("end",)
    assert generation_config(service, chat(seed=-1)).random_seed == 2**32 - 1
    # Whatever a field means, it is in exactly one of these groups.
    elsewhere = {
        "model", "stream", "stream_options", "stop", "seed", "response_format", "user", "session_id", *sampling,
    }  # fmt: skip
    own = {name for name, field in ChatRequest.model_fields.items() if name in CompletionRequest.model_fields}
    assert own - {"logprobs", "max_tokens"} == set(SAME) | elsewhere
    assert {field.name for field in dataclasses.fields(GenerationConfig)} > set(SAME)


def test_nobody_gets_a_better_priority_than_the_server_gives(service):
    with pytest.raises(ConfigError, match="priority is -1; accepted: an int of 0 at least"):
        generation_config(service, chat(priority=-1))
    service.config = ServeConfig(min_priority=-5)
    assert [generation_config(service, chat(priority=p)).priority for p in (-5, 7)] == [-5, 7]
    with pytest.raises(ApiError, match="priority is -6; accepted: an int of -5 at least") as told, naming("prompt"):
        generation_config(service, chat(priority=-6))
    assert (told.value.status, told.value.param) == (400, "priority")


@pytest.mark.parametrize(
    ("form", "want"),
    [
        ({"type": "text"}, {"type": "text"}),
        ({"type": "json_object"}, {"type": "json_object"}),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True}},
            {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
        ),
        ({"type": "regex_schema", "regex_schema": "a+"}, {"type": "regex_schema", "regex_schema": "a+"}),
        ({"type": "choice", "choice": ["a", "b"]}, {"type": "choice", "choice": ["a", "b"]}),
        ({"type": "grammar", "grammar": 'start: "a"'}, {"type": "grammar", "grammar": 'start: "a"'}),
    ],
)
def test_response_formats_are_the_engines(service, form, want):
    assert generation_config(service, chat(response_format=form)).response_format == want


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": FORM}, "response_format.json_schema"),
        ({"response_format": FORM | {"json_schema": {"name": "a"}}}, "response_format.json_schema.schema"),
        (
            {"response_format": FORM | {"json_schema": {"name": "a", "schema": {}, "description": "d"}}},
            "response_format.json_schema.description",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "x": 1}}]}, "tools[0].function.x"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"seed": 1.5}, "seed"),
        ({"seed": True}, "seed"),
        ({"n": "1"}, "n"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_by_its_path(fields, param):
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert param.split(".")[-1] in caught.value.message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": "hot"}, "temperature is 'hot'; accepted: a valid number"),
        ({"temperature": -1}, "temperature is -1; accepted: greater than or equal to 0"),
        ({"stop": 5}, "stop is 5; accepted: a valid string, or a valid list"),
        ({"stop": ["a"] * 70}, "stop is ['a', 'a', 'a', ...]; accepted: a valid string, or 64 items at most"),
        ({"messages": []}, "messages is []; accepted: 1 items at least"),
        ({"tools": [5]}, "tools[0] is 5; accepted: an object"),
        ({"user": "x" * 513}, f"user is '{'x' * 27}...{'x' * 28}'; accepted: 512 characters at most"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a is 'a'; accepted: a text that matches ^[0-9]{1,9}$"),
        (
            {"response_format": {"type": "x"}},
            "response_format is {'type': 'x'}; accepted: a 'type' of 'text', 'json_object', 'json_schema', "
            "'regex_schema', 'choice', 'grammar'",
        ),
    ],
)
def test_an_error_says_what_came_and_what_is_accepted(fields, message):
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert caught.value.message == message


@pytest.mark.parametrize("body", [None, [], "text", 3])
def test_a_body_that_is_no_object_is_refused(body):
    with pytest.raises(ApiError, match=r"the body is .*; accepted: an object"):
        parsed(ChatRequest, body)


@pytest.mark.parametrize(
    ("error", "status", "code", "retries"),
    [
        (ConfigError("GenerationConfig", "n", 0, "an int >= 1"), 400, None, False),
        (RequestError("no"), 400, None, False),
        (PromptTooLongError("9 tokens, 8 fit"), 400, "context_length_exceeded", False),
        (InvalidFieldError("messages[0]", "no"), 400, None, False),
        (QueueFullError("full"), 429, "queue_full", True),
        (EngineClosedError("closed"), 503, "shutting_down", True),
        (EngineFailedError("lost"), 500, "engine_failed", False),
        (KeyError("secret"), 500, "internal_error", False),
    ],
)
def test_every_error_has_its_status(error, status, code, retries):
    told = to_api_error(error)
    assert (told.status, told.code) == (status, code)
    assert ("Retry-After" in told.headers) == retries
    assert set(told.body["error"]) == {"message", "type", "param", "code"}
    assert "secret" not in told.message, "what nobody expected stays in the log"


def test_errors_of_the_engine_name_the_requests_fields():
    with pytest.raises(ApiError) as caught, naming("prompt"):
        raise ConfigError("GenerationConfig", "random_seed", -1, "an int >= 0")
    assert (caught.value.param, caught.value.message) == ("seed", "seed is -1; accepted: an int >= 0")
    with pytest.raises(ApiError) as caught, naming("prompt"):
        raise PromptTooLongError("9 tokens, 8 fit")
    assert caught.value.param == "prompt"


def test_the_document_says_what_is_accepted():
    schema = TypeAdapter(ChatRequest).json_schema()
    assert schema["additionalProperties"] is False
    assert schema["properties"]["store"]["anyOf"][0]["const"] is False
    assert schema["properties"]["temperature"]["anyOf"][0]["maximum"] == 2


def test_the_page_on_serving_names_every_field_and_route(service):
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    fields = ChatRequest.model_fields | CompletionRequest.model_fields
    refused = {name for name, field in fields.items() if any(isinstance(m, WrapValidator) for m in field.metadata)}
    assert {"store", "suffix", "metadata"} <= refused
    assert [name for name in fields if name not in refused and f"`{name}" not in page] == []
    routes = {path for path in create_app(service).openapi()["paths"] if path.startswith("/v1")}
    assert [path for path in routes if path.split("{")[0].rstrip("/") not in page and "/batches" not in path] == []


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        (EngineClosedError, 503, "shutting_down"),
        (EngineFailedError, 500, "engine_failed"),
        (GuideError, 400, None),
        (NumericsError, 500, "generation_failed"),
    ],
)
def test_an_answer_that_fails_on_its_way_has_a_status_too(kind, status, code):
    answer = Answer([1, 2], 0, 0, wants_prompt_logprobs=False)
    piece = answer.hand_on("error", "why", Progress([], "error", kind("why")))
    with pytest.raises(ApiError, match="why") as caught:
        Tally().add(piece)
    assert (caught.value.status, caught.value.code) == (status, code)
