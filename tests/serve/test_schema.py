"""The server does what its OpenAPI document says."""

from __future__ import annotations

import pytest
import schemathesis
from schemathesis import GenerationMode

from tests.serve.documented import check_operation
from tests.serve.harness import MODEL_NAME, fake_pipeline, serving_pipe

OPERATIONS = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/embeddings"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
]
# Nothing of a GET can be wrong but the model's name, which is then another one.
CASES = [(*one, mode) for one in OPERATIONS for mode in GenerationMode if one[0] == "POST" or mode.is_positive]


@pytest.fixture(scope="module")
def document():
    with fake_pipeline() as pipe, serving_pipe(pipe) as url:
        document = schemathesis.openapi.from_url(f"{url}/openapi.json")
        document.hook("map_body")(with_small_answers)
        yield document


def with_small_answers(context, body):
    """Examples name the model that there is, and do not make the engine work for long."""
    if isinstance(body, dict):
        if isinstance(body.get("model"), str):
            body["model"] = MODEL_NAME
        for name in {"max_tokens", "max_completion_tokens"} & body.keys():
            if isinstance(body[name], int):
                body[name] = min(body[name], 4)
    return body


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_every_answer_is_as_the_document_says(document, method, path, mode):
    check_operation(document, method, path, mode)


def test_the_document_names_every_route_and_what_it_refuses(document):
    schema = document.raw_schema
    for method, path in OPERATIONS:
        responses = schema["paths"][path][method.lower()]["responses"]
        assert {"400", "404", "4XX"} <= responses.keys()
        assert "422" not in responses, "an error has one form"
    assert schema["components"]["schemas"]["ChatRequest"]["additionalProperties"] is False
