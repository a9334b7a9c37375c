"""`turbojax generate --openai-batch`: OpenAI's batch file in, answers out, and how a stopped run goes on."""

import asyncio
import json
import signal
from contextlib import contextmanager

import openai
import pytest

from tests.pipeline.harness import wait_until_idle
from tests.serve.batches.harness import jsonl, line, records
from tests.serve.harness import fake_pipeline
from turbojax.cli import session
from turbojax.errors import EngineFailedError
from turbojax.serve.batches import answers

MODEL = "a/fake"


@pytest.fixture
def opened(run, monkeypatch):
    """Pipelines that the command opened, on an engine without a device."""
    pipes = []

    @contextmanager
    def open_pipeline(model, config):
        with session.shown_log(), fake_pipeline() as pipe:
            pipes.append(pipe)
            yield pipe
            assert wait_until_idle(pipe), "something leaked"

    monkeypatch.setattr(session, "open_pipeline", open_pipeline)
    return pipes


@pytest.fixture
def files(tmp_path):
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


@pytest.fixture
def batch(run, opened, files):
    return lambda *more: run("generate", "--model", MODEL, "--openai-batch", *files, *more)


def chat(custom_id, text="Hello", **body):
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 3} | body
    return line(custom_id, **body)


def completion(custom_id, **body):
    return line(custom_id, url="/v1/completions", **{"model": MODEL, "prompt": "Hello", "max_tokens": 3} | body)


def found(files):
    return {record["custom_id"]: record for record in records(files[1].read_bytes())}


def test_chats_and_completions_are_answered(batch, files):
    files[0].write_bytes(jsonl(chat("a"), "", completion("b", n=2)))
    result = batch()
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    assert "generation" not in result.stderr
    got = found(files)
    assert got.keys() == {"a", "b"}
    answer = openai.types.chat.ChatCompletion.model_validate(got["a"]["response"]["body"])
    assert answer.usage.completion_tokens <= 3
    assert len(got["b"]["response"]["body"]["choices"]) == 2
    assert {record["response"]["status_code"] for record in got.values()} == {200}


def test_lines_that_fail_are_told_and_tried_again(batch, files, opened):
    bad = [
        "{torn",
        chat("unknown", top_q=1),
        chat("other model", model="gpt"),
        chat("good", "again"),
        line("url", url="/v1/x"),
    ]
    files[0].write_bytes(jsonl(chat("good"), *bad))
    first = batch()
    assert first.exit_code == 1
    assert "5 lines failed" in first.stderr
    for number, reason in ((2, "no JSON"), (3, "top_q"), (4, "'gpt' does not exist"), (5, "earlier line"), (6, "url")):
        assert any(one.startswith(f"line {number}: ") and reason in one for one in first.stderr.splitlines())
    answered = next(record for record in records(files[1].read_bytes()) if record["custom_id"] == "good")
    files[0].write_bytes(jsonl(chat("good"), chat("unknown"), chat("other model")))
    assert batch().exit_code == 0
    got = records(files[1].read_bytes())
    assert sorted(record["custom_id"] for record in got) == ["good", "other model", "unknown"]
    assert answered in got
    assert "all 3 lines are answered" in batch().stderr
    assert len(opened) == 2


def test_a_torn_last_line_is_written_again(batch, files):
    files[0].write_bytes(jsonl(*[chat(f"id-{i}") for i in range(5)]))
    assert batch().exit_code == 0
    whole = files[1].read_bytes()
    last = whole[:-1].rfind(b"\n") + 1
    files[1].write_bytes(whole[: last + 9])
    assert batch().exit_code == 0
    assert files[1].read_bytes().startswith(whole[:last])
    assert sorted(found(files)) == [f"id-{i}" for i in range(5)]


@pytest.mark.usefixtures("ctrl_c_is_heard")
def test_ctrl_c_keeps_what_was_answered(batch, files, monkeypatch):
    answered = []
    real = answers.answer

    async def interrupted(service, url, body, priority):
        if len(answered) == 3:
            signal.raise_signal(signal.SIGINT)
        answered.append(body)
        result = await real(service, url, body, priority)
        await asyncio.sleep(0)
        return result

    monkeypatch.setattr(answers, "answer", interrupted)
    files[0].write_bytes(jsonl(*[chat(f"id-{i}") for i in range(6)]))
    first = batch()
    assert first.exit_code == 130
    assert "the same command goes on" in first.stderr
    before = files[1].read_bytes()
    monkeypatch.setattr(answers, "answer", real)
    assert batch().exit_code == 0
    assert files[1].read_bytes().startswith(before)
    assert sorted(found(files)) == [f"id-{i}" for i in range(6)]


def test_an_engine_that_is_lost_or_always_fails_ends_the_run_with_one_line(batch, files, monkeypatch):
    files[0].write_bytes(jsonl(*[chat(f"id-{i}") for i in range(50)]))

    async def lost(service, url, body, priority):
        raise EngineFailedError("the device is lost: no device")

    monkeypatch.setattr(answers, "answer", lost)
    result = batch()
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == "error: the device is lost: no device"

    async def failing(service, url, body, priority):
        return answers.Result(500, {"error": {"message": "out of pages"}})

    monkeypatch.setattr(answers, "answer", failing)
    result = batch()
    assert result.exit_code == 1
    assert "fails again and again, the last time with: out of pages" in result.stderr
    assert len(records(files[1].read_bytes())) < 50


def test_a_foreign_output_file_is_refused_untouched(batch, files, opened):
    files[0].write_bytes(jsonl(chat("a")))
    files[1].write_text('{"my": "data"}\n')
    result = batch()
    assert result.exit_code == 1
    assert "line 1 is no answer of a batch" in result.stderr.replace("\n", "")
    assert files[1].read_text() == '{"my": "data"}\n'
    assert opened == []


def test_what_does_not_go_together_is_refused(run, batch, files):
    files[0].write_text(json.dumps(chat("a")))
    assert batch("--temperature", "0.5").exit_code == 2
    assert batch("--raw").exit_code == 2
    assert run("generate", "a prompt", "--openai-batch", *files).exit_code == 2
    assert run("generate", "--openai-batch", files[0]).exit_code == 2
    missing = run("generate", "--openai-batch", files[0].with_name("none"), files[1])
    assert missing.exit_code == 1
    assert "No such file" in missing.stderr
