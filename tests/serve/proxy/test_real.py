"""The whole of it: two servers on the tiny model behind a proxy; one is killed, the other told to end."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import openai
import pytest

from tests.serve.proxy.fake_node import wait_until
from tests.serve.proxy.harness import proxy_over

ROOT = Path(__file__).parents[3]
NUM_TOKENS = 480
LONG = {
    "model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": NUM_TOKENS, "temperature": 0.0,
    "extra_body": {"ignore_eos": True},
}  # fmt: skip


@dataclass
class Replica:
    process: subprocess.Popen[str]
    url: str


@contextmanager
def replicas(folder: Path, number: int) -> Iterator[list[Replica]]:
    """So many servers on one checkpoint."""
    command = [sys.executable, "-m", "tests.serve.proxy.replica", str(folder)]
    started: list[Replica] = []
    try:
        for _ in range(number):  # one after the other: the first compiles for all
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
            started.append(Replica(process, ""))
            assert process.stdout is not None
            started[-1].url = process.stdout.readline().strip()
            assert started[-1].url, "a server did not start"
        yield started
    finally:
        for replica in started:
            replica.process.kill()
            replica.process.communicate()


class Stream:
    """An answer, taken as it comes, by a thread."""

    def __init__(self, client: openai.OpenAI, pool: ThreadPoolExecutor) -> None:
        self.has_begun, self.text, self.reason = Event(), "", None
        self._done = pool.submit(self._take, client)
        assert self.has_begun.wait(60)

    def _take(self, client: openai.OpenAI) -> None:
        with client.chat.completions.create(**LONG, stream=True) as pieces:
            for piece in pieces:
                self.text += piece.choices[0].delta.content or ""
                self.reason = piece.choices[0].finish_reason
                self.has_begun.set()

    def end(self) -> None:
        self._done.result(60)


@pytest.mark.slow
def test_a_server_that_is_killed_takes_only_its_streams_with_it(tiny_folder):
    with (
        replicas(tiny_folder, 2) as (kept, killed),
        proxy_over([kept, killed], health_interval_s=0.2) as client,
        openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as own,
        ThreadPoolExecutor(4) as pool,
    ):
        assert [model.id for model in own.models.list()] == ["tiny"]
        whole, lost = Stream(own, pool), Stream(own, pool)  # the nodes take turns
        killed.process.kill()
        with pytest.raises(openai.APIError, match="has failed"):
            lost.end()
        assert lost.reason is None
        whole.end()
        assert whole.reason == "length"
        assert whole.text.startswith(lost.text)
        for _ in range(3):
            assert own.chat.completions.create(**LONG | {"max_tokens": 2}).usage.completion_tokens == 2
        assert not client.status_of(killed)["is_up"]
        last = Stream(own, pool)
        kept.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not client.status_of(kept)["is_up"], "noticing that it drains")
        with pytest.raises(openai.InternalServerError, match="No node that serves 'tiny' is up"):
            own.chat.completions.create(**LONG)
        last.end()
        assert last.text == whole.text
        assert kept.process.wait(60) == 0
