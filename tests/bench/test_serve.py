"""`bench serve`: against our own server, and against servers that misbehave."""

import asyncio
import json
import re
import time

import pytest
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, StreamingResponse
from typer.testing import CliRunner

from tests.pipeline.harness import wait_until_idle
from tests.serve import harness
from turbojax.bench.client import Endpoint, HttpRequest, HttpTrace, message_of
from turbojax.bench.errors import BenchError
from turbojax.bench.http_load import lengths, random_requests, read_prompts
from turbojax.bench.serve import Pace, drive, find_model, serving_row
from turbojax.cli import app

CHUNK = {"choices": [{"index": 0, "delta": {"content": "word"}}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 8}}


def stream(*chunks, done=True):
    """An answer of these chunks."""
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"] * done
    return StreamingResponse(iter(lines), media_type="text/event-stream")


ANSWERS = {
    "good": lambda: stream({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, CHUNK, CHUNK, USAGE),
    "plain": lambda: stream(CHUNK, CHUNK, CHUNK),
    "cut": lambda: stream(CHUNK, done=False),
    "empty": lambda: stream(USAGE),
    "fails": lambda: stream(CHUNK, {"error": {"message": "the device is\nlost"}}),
    "busy": lambda: JSONResponse({"error": {"message": "queue full"}}, 429),
    "odd": lambda: StreamingResponse(iter(["data: {not json\n\n"]), media_type="text/event-stream"),
}


@pytest.fixture(scope="module")
def servers():
    """A server that does what the model's name says, and notes what it was asked; (url, what it heard)."""
    odd, heard = FastAPI(), []

    @odd.get("/v1/models")
    def models():
        return {"data": [{"id": "good"}]}

    @odd.post("/v1/{path:path}")
    async def answer(request: Request):
        body = await request.json()
        heard.append((request.url.path, dict(request.headers), body))
        if body["model"] == "slow":
            await asyncio.sleep(1.5)
        return ANSWERS[body["model"]]()

    with harness.serving(odd) as url:
        yield f"{url}/v1", heard


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(app, "prepare_environment", lambda: None)  # the environment is the whole test run's
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return lambda *args: CliRunner().invoke(app.app, ["bench", "serve", *map(str, args)])


def ask(url, model, num=1, *, timeout_s=20.0, **how):
    endpoint = Endpoint(url, model, **how)
    pace = Pace(max_concurrency=4, timeout_s=timeout_s)
    return asyncio.run(drive(endpoint, [HttpRequest("hello", 8)] * num, pace))


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_our_own_server_is_measured(run, tmp_path, endpoint):
    path, picture = tmp_path / "serve.json", tmp_path / "serve.png"
    load = "--requests", 20, "--max-concurrency", 4, "--input-len", "4-9", "--output-len", "16", "--vocab-size", 50
    with harness.fake_pipeline() as pipe, harness.serving_pipe(pipe) as url:
        result = run(
            "--base-url", f"{url}/v1/", "--endpoint", endpoint, *load, "--api-key", "secret", "--json", path, "--plot",
            picture,
        )  # fmt: skip
        assert wait_until_idle(pipe)
    assert result.exit_code == 0, result.stderr
    text = path.read_text()
    assert "secret" not in text
    results = json.loads(text)
    [row] = results["rows"]
    assert results["device"] == f"{url}/v1"
    assert row["case"] == f"tiny serve {endpoint} 4-9/16 at most 4"
    assert (row["requests"], row["answered"], row["output_tokens"]) == (20, 20, 320)
    assert row["value"] == row["output_tokens_per_s"] == pytest.approx(320 / row["duration_s"], rel=1e-3)
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        assert 0 <= row[name]["p50"] <= row[name]["p95"] <= row[name]["p99"]
    assert row["ttft_ms"]["mean"] <= row["e2e_ms"]["mean"]
    if endpoint == "completions":
        assert 20 * 4 <= row["input_tokens"] <= 20 * 9
    assert {"TTFT", "TPOT", "ITL", "E2E"} <= set(result.stdout.split())
    assert "20 of 20 requests answered" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_no_request_is_sent_before_its_time(monkeypatch):
    sent, begin_s = {}, time.perf_counter()

    async def send(session, endpoint, request):
        sent[request.prompt] = time.perf_counter() - begin_s

    monkeypatch.setattr("turbojax.bench.serve.send", send)
    pace = Pace(rate=200)
    asyncio.run(drive(Endpoint("http://127.0.0.1:1", "m"), [HttpRequest(str(i), 1) for i in range(12)], pace))
    assert all(sent[str(i)] > at_s - 1e-3 for i, at_s in enumerate(pace.times_s(12)))


def test_a_rate_is_that_of_the_results(run, servers, tmp_path):
    path = tmp_path / "serve.json"
    load = "--requests", 12, "--request-rate", 100, "--model", "good"
    result = run("--base-url", servers[0], *load, "--json", path)
    assert result.exit_code == 0, result.stderr
    [row] = json.loads(path.read_text())["rows"]
    assert (row["rate"], row["output_tokens"], row["input_tokens"]) == (100, 96, 36)


def test_the_request_says_what_was_asked_for(run, servers):
    url, heard = servers
    result = run("--base-url", url, "--requests", 1, "--api-key", "k", "--top-p", 0.5, "--no-ignore-eos")
    assert result.exit_code == 0, result.stderr
    path, headers, body = heard[-1]
    assert path == "/v1/chat/completions"
    assert headers["authorization"] == "Bearer k"
    assert body["model"] == "good"  # the server's first
    assert (body["max_tokens"], body["top_p"], body["stream"]) == (128, 0.5, True)
    assert "ignore_eos" not in body
    assert len(body["messages"][0]["content"].split()) == 512


def test_tokens_are_the_servers_own_count_else_parts():
    [whole] = [HttpTrace(0.0, 0, [(1.0, 1), (2.0, 1), (4.0, 1)])]
    assert (whole.num_output_tokens, whole.tpot_s, whole.itl_s) == (3, [1.5], [1.0, 2.0])
    whole.num_reported_tokens = 7
    assert (whole.num_output_tokens, whole.tpot_s, whole.itl_s) == (7, [0.5], [1.0, 2.0])


def test_without_usage_parts_count(servers):
    [trace] = ask(servers[0], "plain")
    assert (trace.num_output_tokens, trace.error) == (3, None)
    assert serving_row("case", [trace], Pace(max_concurrency=1))["counts_parts"]


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ("cut", "the stream was cut"),
        ("empty", "the answer is empty"),
        ("fails", "the device is lost"),
        ("busy", "429 queue full"),
        ("odd", "Expecting property name"),
    ],
)
def test_what_goes_wrong_is_named(servers, model, error):
    traces = ask(servers[0], model, 3)
    assert all(error in trace.error and not trace.is_whole for trace in traces)
    with pytest.raises(BenchError, match=f"none of 3 requests was answered; 3 of them: {error}"):
        serving_row("case", traces, Pace(max_concurrency=1))


def test_a_request_that_takes_too_long_ends(servers):
    [trace] = ask(servers[0], "slow", timeout_s=0.2)
    assert trace.error == "timeout"


def test_errors_are_counted_beside_answers(servers):
    traces = ask(servers[0], "good", 2) + ask(servers[0], "busy", 3)
    row = serving_row("case", traces, Pace(max_concurrency=1))
    assert (row["requests"], row["answered"], row["errors"]) == (5, 2, {"429 queue full": 3})


def test_nobody_there_is_one_line(run, servers):
    result = run("--base-url", "http://127.0.0.1:9/v1")
    assert result.exit_code == 1
    assert re.search(r"error: http://127.0.0.1:9/v1/models does not answer: \S", result.stderr)
    with pytest.raises(BenchError, match="/models: 404"):
        asyncio.run(find_model(servers[0].removesuffix("/v1"), None))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--endpoint", "edits"], "endpoint: 'edits', chat or completions"),
        (["--request-rate", 0], "rate: 0.0"),
        (["--max-concurrency", 0], "max-concurrency: 0"),
        (["--timeout", 0], "timeout: 0.0"),
        (["--input-len", "9-4"], "input-len: '9-4', a number of tokens"),
        (["--output-len", "many"], "output-len: 'many'"),
        (["--vocab-size", 1], "vocab-size: 1"),
    ],
)
def test_bad_options_are_refused_before_anything_is_sent(run, arguments, message):
    result = run("--model", "good", *arguments)
    assert result.exit_code == 1
    assert message in result.stderr


def test_prompts_of_a_file_and_made_up_ones(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("one\n\n two \n")
    found = read_prompts(path, 5, "3-4", seed=1)
    assert [r.prompt for r in found] == ["one", "two", "one", "two", "one"]
    assert {r.num_new_tokens for r in found} <= {3, 4}
    path.write_text("\n \n")
    with pytest.raises(BenchError, match="has no prompts"):
        read_prompts(path, 1, "1", seed=0)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BenchError, match="no text in UTF-8"):
        read_prompts(path, 1, "1", seed=0)
    how = {"vocab_size": 90, "seed": 5}
    ids = random_requests(50, "2-7", "1", is_chat=False, **how)
    assert {len(r.prompt) for r in ids} == set(range(2, 8))
    assert max(max(r.prompt) for r in ids) < 90
    assert ids == random_requests(50, "2-7", "1", is_chat=False, **how)
    assert all(len(r.prompt.split()) == 4 for r in random_requests(5, "4", "1", is_chat=True, **how))
    assert lengths("64-256", "x") == (64, 256)


def test_an_error_without_a_body_of_openais_shape_is_its_text():
    assert message_of(b"<html>\n  Bad   Gateway</html>") == "<html> Bad Gateway</html>"
    assert message_of(b'{"error": "plain"}') == "plain"
    assert message_of(b"[]") == "[]"
