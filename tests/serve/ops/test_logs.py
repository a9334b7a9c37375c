"""Every request leaves a line that can be found by its id, and no line tells what was asked or answered."""

from __future__ import annotations

import io
import json
import logging
import re
from contextlib import contextmanager

import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from tests.serve.ops.harness import COMPLETION, error_of, gated_server, serving_routes, wait_for
from turbojax.serve import limits, logs
from turbojax.serve.gate import Gate
from turbojax.serve.logs import JsonLines, TextLines, chosen_id, logging_to
from turbojax.serve.metrics import HttpMetrics
from turbojax.serve.settings import ServeConfig

FRESH = re.compile(r"[0-9a-f]{32}")


@contextmanager
def logged(**config):
    """What is logged meanwhile, as objects."""
    stream = io.StringIO()
    with logging_to(stream, ServeConfig(log_json=True, **config)):
        lines: list[dict] = []
        yield lambda: lines.__iadd__(map(json.loads, stream.getvalue().splitlines()[len(lines) :]))


@pytest.mark.parametrize("given", ["a", "req-1.2:3_Z", "x" * 128])
def test_a_plain_id_of_the_client_is_kept(given):
    assert chosen_id(given) == given


@pytest.mark.parametrize("given", [None, "", "x" * 129, "a b", "a\nb", "<script>", 'a"b', "\u00e9", "a=b"])
def test_another_one_is_replaced(given):
    assert FRESH.fullmatch(chosen_id(given))
    assert chosen_id(given) != chosen_id(given)


def test_the_id_of_a_request_comes_back_and_stands_in_each_of_its_lines():
    with gated_server() as (client, _, _), logged() as lines:
        answer = client.post("/v1/completions", json=COMPLETION, headers={"X-Request-Id": "mine-1"})
        assert answer.headers["X-Request-Id"] == "mine-1"
        wait_for(lambda: any(line["message"] == "http" for line in lines()))
        http, generation = (next(line for line in lines() if line["message"] == m) for m in ("http", "generation"))
        assert http["request_id"] == generation["request_id"] == "mine-1"
        assert (http["method"], http["path"], http["status"]) == ("POST", "/v1/completions", 200)
        assert generation["id"] == answer.json()["id"]
        expected = {"outcome": "done", "finish_reasons": "length", "num_prompt_tokens": 3, "num_generated_tokens": 8}
        assert generation.items() >= expected.items()
        assert 0 < generation["time_to_first_token_s"] <= generation["duration_s"]
        assert "cut" not in http
        assert FRESH.fullmatch(client.get("/v1/models").headers["X-Request-Id"])


def test_what_is_refused_has_an_id_and_a_line_too():
    with gated_server(api_keys=("sk-test-key",)) as (client, _, _), logged() as lines:
        answer = client.get("/v1/models", headers={"X-Request-Id": "mine-2", "Authorization": "Bearer sk-other-key"})
        assert (answer.status_code, answer.headers["X-Request-Id"]) == (401, "mine-2")
        wait_for(lines)
        (line,) = lines()
        assert (line["request_id"], line["status"]) == ("mine-2", 401)
        assert "key" not in json.dumps(line)


def test_the_line_of_an_answer_that_was_cut_says_so():
    with gated_server() as (client, service, _), logged() as lines:
        with client.stream("POST", "/v1/completions", json=COMPLETION | {"max_tokens": 250, "stream": True}):
            pass
        wait_for(lambda: service.gate.num_visits == 0)
        wait_for(lambda: len(lines()) >= 2)
        generation, http = lines()
        assert (generation["message"], generation["outcome"]) == ("generation", "cancelled")
        assert (http["message"], http["status"], http["cut"]) == ("http", 200, "client_disconnected")


def test_nothing_of_a_prompt_or_an_answer_is_logged():
    secret = "MNOPQRSTU"
    with gated_server() as (client, _, _), logged(log_level="debug") as lines:
        texts = client.post("/v1/completions", json=COMPLETION | {"prompt": secret}).json()["choices"][0]["text"]
        client.post("/v1/completions", json=COMPLETION | {"prompt": secret, "temperature": -1})
        wait_for(lambda: sum(line["message"] == "http" for line in lines()) == 2)
        assert not [line for line in lines() if secret in json.dumps(line) or texts in json.dumps(line)]


def test_probes_are_not_worth_a_line():
    with gated_server() as (client, _, _), logged() as lines:
        client.get("/health/live")
        client.get("/metrics")
        client.get("/v1/models")
        wait_for(lines)
        assert [line["path"] for line in lines()] == ["/v1/models"]


def failing() -> FastAPI:
    app = FastAPI()

    @app.get("/fail")
    async def fail() -> None:
        raise ValueError("the secret is 42")

    limits.install(app, ServeConfig(), Gate(10))
    logs.install(app, HttpMetrics(CollectorRegistry(), Gate(10)))
    return app


def test_an_error_that_nobody_expected_is_logged_once_and_told_to_nobody():
    with serving_routes(failing()) as client, logged() as lines:
        answer = client.get("/fail", headers={"X-Request-Id": "mine-3"})
        assert error_of(answer) == (500, "internal_error")
        assert "42" not in answer.text
        assert answer.headers["X-Request-Id"] == "mine-3"
        wait_for(lambda: len(lines()) >= 2)
        error, http = lines()
        assert (error["level"], error["request_id"]) == ("error", "mine-3")
        assert "ValueError: the secret is 42" in error["exception"]
        assert (http["message"], http["status"]) == ("http", 500)


# -- lines ------------------------------------------------------------------------------------------------


def record(message: str, **fields) -> logging.LogRecord:
    made = logging.LogRecord("turbojax.test", logging.INFO, __file__, 1, message, (), None)
    made.created, made.fields = 1_790_000_000.25, fields
    return made


def test_a_line_of_text_can_be_read_and_taken_apart():
    line = TextLines().format(record("http", path="/v1/models", status=200, client=None, note='a "b" c', empty=""))
    assert line == ('2026-09-21T14:13:20.250Z INFO http path=/v1/models status=200 note="a \\"b\\" c" empty=""')


def test_a_line_of_json_has_the_same():
    line = json.loads(JsonLines().format(record("http", path="/v1/models", status=200, client=None)))
    assert line == {
        "time": "2026-09-21T14:13:20.250Z", "level": "info", "logger": "turbojax.test", "message": "http",
        "path": "/v1/models", "status": 200,
    }  # fmt: skip


@pytest.mark.parametrize("formatter", [TextLines(), JsonLines()])
def test_what_a_client_sends_cannot_begin_a_line_of_its_own(formatter):
    forged = "x\n2026-01-01T00:00:00Z INFO forged\r\u2028\x1b[31m"
    line = formatter.format(record(f"path {forged}", path=forged))
    assert len(line.splitlines()) == 1
    assert "\x1b" not in line


def test_the_level_is_what_the_config_says_and_what_it_was_afterwards():
    ours, before = logging.getLogger("turbojax"), logging.getLogger("turbojax").level
    with logged(log_level="warning") as lines:
        ours.info("not this")
        ours.warning("this")
        assert [line["message"] for line in lines()] == ["this"]
    assert ours.level == before
