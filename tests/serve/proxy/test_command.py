"""`turbojax serve proxy` as a process: it says where it is, drains on a signal, and says in one line what is wrong."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from tests.serve.proxy.fake_node import WAIT_S, Gate, wait_until
from tests.serve.proxy.harness import BODY, CHAT
from turbojax.cli import serve_proxy
from turbojax.cli.app import app
from turbojax.cli.serve_options import config_of
from turbojax.serve.proxy.settings import ProxyConfig
from turbojax.serve.settings import ServeConfig

ROOT = Path(__file__).parents[3]


@contextmanager
def process(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """The command, and a client of it once it listens."""
    command = [sys.executable, "-m", "turbojax", "serve", "proxy", "--server-port", "0", *arguments]
    running = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=os.environ | environment)
    assert running.stderr is not None
    try:
        lines: list[str] = []
        while not (found := re.search(r"nodes are behind (http://\S+)/v1", lines[-1] if lines else "")):
            lines.append(running.stderr.readline())
            assert lines[-1], "".join(lines)
        with httpx.Client(base_url=found[1], timeout=WAIT_S, trust_env=False, verify=False) as client:
            yield running, client
    finally:
        running.kill()
        running.communicate()


def test_a_signal_lets_streams_end(two):
    gate = Gate(two[0].loop)

    async def answer(received, connection):
        await connection.start()
        await connection.chunk(b"data: 1\n\n")
        await gate.wait()
        await connection.chunk(b"data: [DONE]\n\n")
        await connection.end()

    for node in two:
        node.answer = answer
    nodes = [word for node in two for word in ("--node", node.url)]
    with process(*nodes, TURBOJAX_ADMIN_KEY="an-admin-key", TURBOJAX_NODE_API_KEY="of-the-nodes") as (running, client):
        operator = {"Authorization": "Bearer an-admin-key"}
        wait_until(lambda: all(one["is_up"] for one in client.get("/nodes/status", headers=operator).json().values()))
        with client.stream("POST", CHAT, json=BODY) as got:
            pieces = got.iter_raw()
            assert next(pieces) == b"data: 1\n\n"
            running.send_signal(signal.SIGTERM)
            wait_until(lambda: client.get("/health").json()["status"] == "draining", "draining")
            refused = client.post(CHAT, json=BODY)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            gate.open()
            assert b"".join(pieces) == b"data: [DONE]\n\n"
        assert running.wait(WAIT_S) == 0
    assert {received.headers["authorization"] for node in two for received in node.received} == {"Bearer of-the-nodes"}


def test_every_field_has_an_option_and_options_reach_their_configs(monkeypatch):
    calls = []
    monkeypatch.setattr(serve_proxy, "run", lambda *args: calls.append(args))
    known = inspect.signature(serve_proxy.proxy).parameters.keys()
    assert {field.name for field in dataclasses.fields(ProxyConfig)} - {"server"} <= known
    # What is of a model, of its engine or of batches has no meaning here.
    foreign = {
        "model_name", "max_upload_bytes", "min_priority", "stall_s", "chat_template", "tool_call_parser",
        "reasoning_parser",
    }  # fmt: skip
    own = {field.name for field in dataclasses.fields(ServeConfig) if "batch" not in field.name} - foreign
    assert own <= known
    words = "--node http://a --node http://b/v1 --max-tries 5 --api-key a-clients-key --idle-timeout-s 7 --drain-s 1"
    assert CliRunner().invoke(app, ["serve", "proxy", *words.split()]).exit_code == 0
    server, given = calls[0]
    assert server == ServeConfig(server_port=8000, api_keys=("a-clients-key",), drain_s=1.0)
    config = config_of(ProxyConfig, given)
    assert (config.nodes, config.max_tries, config.idle_timeout_s) == (("http://a", "http://b"), 5, 7.0)


def test_the_help_has_the_proxys_own_defaults(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = CliRunner().invoke(app, ["serve", "proxy", "--help"]).stdout
    for name in ("max_tries", "idle_timeout_s", "health_interval_s", "routing_strategy"):
        line = next(line for line in shown.splitlines() if f"--{name.replace('_', '-')} " in line)
        default = getattr(ProxyConfig, name)
        assert f"Default: {default:g}." in line if isinstance(default, float) else f"Default: {default}." in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--node", "nowhere"], "node.url is 'nowhere'"),
        (
            ["--routing-strategy", "best"],
            "ProxyConfig.routing_strategy is 'best'; accepted: one of min_expected_latency",
        ),
        (["--idle-timeout-s", "0"], "ProxyConfig.idle_timeout_s is 0.0"),
        (["--admin-key", "short"], "ProxyConfig.admin_keys"),
        (["--max-body-bytes", "0"], "ServeConfig.max_body_bytes is 0"),
        (["--ssl-certfile", "none.pem"], "ServeConfig.ssl_certfile"),
    ],
)
def test_what_is_wrong_is_one_line(arguments, words):
    done = CliRunner().invoke(app, ["serve", "proxy", *arguments])
    assert done.exit_code == 1
    assert words in done.output
    assert done.output.count("\n") == 1


def test_a_port_in_use_is_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = CliRunner().invoke(app, ["serve", "proxy", "--server-port", str(taken.getsockname()[1])])
    assert done.exit_code == 1
    assert "is in use" in done.output
    assert done.output.count("\n") == 1
