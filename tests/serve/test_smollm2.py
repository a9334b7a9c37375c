"""The command as users start it, on the real small model, through the official client: against recorded answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import openai
import pytest

ROOT = Path(__file__).parents[2]
EXPECTED = ROOT.parent / "shared" / "smollm2" / "expected.json"
MODEL = "SmolLM2-135M-Instruct"
READY_S = 300  # on a machine that does much beside
# Few and small programs, since each takes seconds to compile; the same as in tests/pipeline/test_smollm2.py.
OPTIONS = (
    "--server-port", "0", "--dtype", "float32", "--session-len", "192", "--max-batch-size", "1",
    "--max-prefill-token-num", "64", "--cache-max-entry-count", "13",
)  # fmt: skip
# The model's own template knows no tools.
TOOLS_TEMPLATE = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}Call: <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}"""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def prompts(smollm2):
    if not EXPECTED.is_file():
        pytest.skip(f"the recorded outputs are not at {EXPECTED}")
    return {prompt["id"]: prompt for prompt in json.loads(EXPECTED.read_text())["prompts"]}


@pytest.fixture(scope="module")
def template(smollm2, tmp_path_factory):
    """A file with the model's template behind one that shows tools."""
    from turbojax.tokenizer import load_tokenizer

    path = tmp_path_factory.mktemp("templates") / "tools.jinja"
    path.write_text(TOOLS_TEMPLATE + load_tokenizer(smollm2).chat_template)
    return path


@pytest.fixture(scope="module")
def client(prompts, template):
    """A client of `turbojax serve api_server`, which ends by itself on SIGTERM."""
    command = [sys.executable, "-m", "turbojax", "serve", "api_server", *OPTIONS, "--chat-template", str(template)]
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True) as server:
        watchdog = threading.Timer(READY_S, server.kill)
        watchdog.start()
        lines: list[str] = []
        try:
            while "is served at" not in (lines[-1] if lines else ""):
                lines.append(server.stderr.readline())
                assert lines[-1], f"the server ended: {''.join(lines)}"
            watchdog.cancel()
            rest = threading.Thread(target=server.stderr.read)  # a full pipe would stop the server
            rest.start()
            url = lines[-1].split()[-1]
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
                yield client
        finally:
            watchdog.cancel()
            server.send_signal(signal.SIGTERM)
            server.wait(60)
        rest.join(60)
    assert server.returncode == 0


def greedy_text(prompt, num_tokens):
    """The recorded text of so many tokens that no near tie could have turned."""
    from turbojax.hub import default_model
    from turbojax.tokenizer import load_tokenizer

    num_clear = min(num_tokens, prompt["greedy"]["near_tie"] or num_tokens)
    return load_tokenizer(default_model()).decode(prompt["greedy"]["ids"][:num_clear])


@pytest.mark.parametrize("name", ["chat_english", "chat_code"])
def test_a_chat_gives_the_recorded_answer_whole_and_in_pieces(client, prompts, name):
    prompt = prompts[name]
    ask = {"model": MODEL, "messages": prompt["messages"], "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**ask)
    text = whole.choices[0].message.content
    assert text.startswith(greedy_text(prompt, 24))
    assert whole.usage.prompt_tokens == len(prompt["input_ids"])
    stream = client.chat.completions.create(**ask, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in stream) == text


def test_a_completion_gives_the_recorded_text(client, prompts):
    for given in ("text", "input_ids"):
        prompt = prompts["english"]
        got = client.completions.create(model=MODEL, prompt=prompt[given], max_tokens=24, temperature=0)
        assert got.choices[0].text == greedy_text(prompt, 24)


def test_an_echo_has_the_recorded_scores(client, prompts):
    prompt = prompts["english"]
    got = client.completions.create(model=MODEL, prompt=prompt["text"], max_tokens=0, echo=True, logprobs=1)
    table = got.choices[0].logprobs
    assert got.choices[0].text == "".join(table.tokens) == prompt["text"]
    # Recorded with float32 weights of the same file; 4 decimals.
    assert table.token_logprobs[1:] == pytest.approx(prompt["prompt_logprobs"][1:], abs=2e-3)


def test_an_answer_follows_its_schema(client):
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer", "minimum": 0}},
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    ask = [{"role": "user", "content": "Name a city and how many people live there."}]
    got = client.chat.completions.create(model=MODEL, messages=ask, max_tokens=60, temperature=0, response_format=form)
    assert got.choices[0].finish_reason == "stop"
    answer = json.loads(got.choices[0].message.content)
    assert isinstance(answer["city"], str)
    assert isinstance(answer["people"], int)


def test_a_tool_is_called_as_its_schema_says(client):
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": schema}}
    ask = {
        "model": MODEL, "messages": [{"role": "user", "content": "What is the weather in Paris?"}], "tools": [tool],
        "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0, "max_tokens": 60,
    }  # fmt: skip
    choice = client.chat.completions.create(**ask).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert len(json.loads(call.function.arguments)["city"]) <= 20
    with client.chat.completions.stream(**ask) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    assert [one.function.arguments for one in streamed] == [call.function.arguments]
