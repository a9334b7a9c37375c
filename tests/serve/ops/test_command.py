"""`turbojax serve api_server` on a model, as an operator runs it: ready, watched, loaded, and told to end."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.serve.ops.harness import error_of, wait_for

ROOT = Path(__file__).parents[3]
OPTIONS = (
    "--server-port 0 --model-name tiny --dtype float32 --session-len 256 --max-batch-size 2 --cache-block-seq-len 16 "
    "--max-prefill-token-num 64 --cache-max-entry-count 40 --api-key sk-operator --log-json --drain-s 120"
)
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "ignore_eos": True}
NUM_STREAMS = 4  # two more than there are slots


@pytest.mark.slow
def test_a_server_under_load_that_is_told_to_end_answers_what_it_has(tiny_folder):
    command = [sys.executable, "-m", "turbojax", "serve", "api_server", str(tiny_folder), *OPTIONS.split()]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(process.stdout))
    try:
        url = next(found[1] for line in process.stdout if (found := re.search(r"served at (http://\S+)/v1", line)))
        reader.start()
        with (
            httpx.Client(base_url=url, timeout=120, headers={"Authorization": "Bearer sk-operator"}) as client,
            ThreadPoolExecutor(NUM_STREAMS) as threads,
        ):
            assert client.get("/health/ready").json() == {"status": "ok"}
            whole = client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 150}).raise_for_status().json()
            begun: list[str] = []
            streams = [threads.submit(stream, client, begun) for _ in range(NUM_STREAMS)]
            wait_for(lambda: len(begun) >= NUM_STREAMS - 2, at_most_s=120)  # all slots are taken
            process.terminate()
            wait_for(lambda: client.get("/health/ready").status_code == 503)
            assert client.get("/health/live").json() == {"status": "draining"}
            assert "turbojax_draining 1.0" in client.get("/metrics").text
            assert error_of(client.post("/v1/chat/completions", json=CHAT))[0] == 503
            for one in streams:
                assert one.result(120) == whole["choices"][0]["message"]["content"]
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        if reader.ident is not None:
            reader.join()
        process.stdout.close()
    logged = [json.loads(line) for line in lines if line.startswith("{")]
    ended = [line for line in logged if line["message"] == "generation"]
    assert [line["num_generated_tokens"] for line in ended] == [150] * (NUM_STREAMS + 1)
    assert not [line for line in logged if line["level"] == "error"]


def stream(client: httpx.Client, begun: list[str]) -> str:
    """The text of an answer that is streamed; its first piece is noted."""
    text = ""
    with client.stream("POST", "/v1/chat/completions", json=CHAT | {"max_tokens": 150, "stream": True}) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            data = line.removeprefix("data: ")
            if not line or data == "[DONE]":
                continue
            delta = json.loads(data)["choices"][0]["delta"].get("content") or ""
            if delta and not text:
                begun.append(delta)
            text += delta
    return text
