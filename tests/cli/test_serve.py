"""`turbojax serve api_server`: its options become configs; the server itself is tested over HTTP."""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import socket
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from turbojax.cli import app, serve
from turbojax.configs import ClusterConfig, EngineConfig
from turbojax.serve.settings import ServeConfig


@pytest.fixture
def served(monkeypatch):
    """What the server is run with."""
    calls = []
    monkeypatch.setattr(serve, "run", lambda *args: calls.append(args))
    return calls


def test_without_options_the_configs_are_as_they_are(run, served):
    assert run("serve", "api_server").exit_code == 0
    assert served == [(None, EngineConfig(compile_ahead=None), ServeConfig())]


def test_every_field_of_the_server_has_an_option():
    known = inspect.signature(serve.api_server).parameters
    assert {field.name for field in dataclasses.fields(ServeConfig)} <= known.keys()
    engine = {field.name for field in dataclasses.fields(EngineConfig)}
    server = {field.name for field in dataclasses.fields(ServeConfig)}
    cluster = {"coordinator_address", "num_processes", "process_id"}
    assert known.keys() <= engine | server | cluster | {"model"}


def test_the_help_has_the_servers_own_defaults(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = run("serve", "api_server", "--help").stdout
    for name in ("max_connections", "max_body_bytes", "max_batch_requests", "batch_priority", "log_level"):
        line = next(line for line in shown.splitlines() if f"--{name.replace('_', '-')} " in line)
        assert f"Default: {getattr(ServeConfig, name)}." in line


def test_options_reach_their_configs(run, served):
    arguments = (
        "my/model --server-name 0.0.0.0 --server-port 0 --model-name m --quant-policy 8 --cache-max-entry-count 0.5 "
        "--session-len 4096 --max-batch-size 16 --model-format awq --cache-block-seq-len 32 --max-queue-len 5 "
        "--max-prefill-token-num 512 --no-enable-prefix-caching --api-keys key-of-one --api-key key-of-two "
        "--allow-origins https://example.com --request-timeout-s 5 --log-json --tool-call-parser hermes --tp 4 --dp 2 "
        "--num-processes 2 --process-id 0 --coordinator-address 10.0.0.1:900"
    )
    assert run("serve", "api_server", *arguments.split()).exit_code == 0
    model, engine, config = served[0]
    assert model == "my/model"
    assert engine == EngineConfig(
        quant_policy=8, cache_max_entry_count=0.5, session_len=4096, max_batch_size=16, model_format="awq",
        cache_block_seq_len=32, max_prefill_token_num=512, enable_prefix_caching=False, max_queue_len=5,
        compile_ahead=None, tp=4, dp=2, cluster=ClusterConfig("10.0.0.1:900", 2, 0),
    )  # fmt: skip
    assert config == ServeConfig(
        server_name="0.0.0.0", server_port=0, model_name="m", api_keys=("key-of-one", "key-of-two"),
        allow_origins=("https://example.com",), request_timeout_s=5, log_json=True, tool_call_parser="hermes",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--server-port", "70000", "ServeConfig.server_port is 70000"),
        ("--quant-policy", "3", "EngineConfig.quant_policy is 3"),
        ("--tp", "0", "EngineConfig.tp is 0"),
        ("--api-keys", "short", "ServeConfig.api_keys is '1 keys'"),
    ],
)
def test_a_bad_value_is_one_line(run, served, option, value, said):
    done = run("serve", "api_server", option, value)
    assert done.exit_code == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert served == []


def test_a_port_that_is_taken_is_said_before_a_model_is_loaded(run, pipes):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run("serve", "api_server", "--server-port", taken.getsockname()[1])
    assert done.exit_code == 1
    assert "in use" in done.stderr
    assert pipes == []


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (None, "SmolLM2-135M-Instruct"),
        ("owner/name", "owner/name"),
        ("{}/a-model", "a-model"),
        ("{}/b.Q4.gguf", "b.Q4"),
    ],
)
def test_a_model_is_called_as_its_folder_file_or_repository(tmp_path, model, name):
    (tmp_path / "a-model").mkdir()
    (tmp_path / "b.Q4.gguf").touch()
    assert serve.default_name(model and model.format(tmp_path)) == name


def test_a_process_that_follows_opens_neither_port_nor_folder(run, monkeypatch, tmp_path):
    opened = []

    def follow(model, config, shown):
        opened.append((model, config.cluster.process_id))
        raise SystemExit(0)

    monkeypatch.setattr(serve.session, "follow", follow)
    monkeypatch.setattr("turbojax.serve.server.listen", lambda config: pytest.fail("a follower listens"))
    cluster = ("--num-processes", "2", "--process-id", "1", "--coordinator-address", "127.0.0.1:900")
    assert run("serve", "api_server", "my/model", *cluster, "--batch-dir", str(tmp_path / "b")).exit_code == 0
    assert opened == [("my/model", 1)]
    assert not (tmp_path / "b").exists()


def test_an_extra_that_is_not_installed_is_named(run, pipes, monkeypatch):
    monkeypatch.setitem(sys.modules, "turbojax.serve.app", None)  # cannot be imported
    done = run("serve", "api_server", "--server-port", "0")
    assert done.exit_code == 1
    assert "pip install 'turbojax[serve]'" in done.stderr
    assert pipes == []


@pytest.fixture
def served_at_once(monkeypatch):
    """The command with everything but the engine and the server, which ends as soon as it has said where it is."""

    def pipeline(model, backend_config):
        logging.getLogger("turbojax.engine").info("a plan\nof two lines")
        return nullcontext()

    def run_server(app, config, listener, on_ready):
        logging.getLogger("turbojax.serve").info("serving")
        on_ready("http://127.0.0.1:1")
        return True

    monkeypatch.setattr("turbojax.api.pipeline", pipeline)
    monkeypatch.setattr("turbojax.serve.service.Service", lambda pipe, config, name: SimpleNamespace(model_name=name))
    monkeypatch.setattr("turbojax.serve.app.create_app", lambda service: None)
    monkeypatch.setattr("turbojax.serve.server.run_server", run_server)
    monkeypatch.setattr(app, "prepare_environment", lambda: None)
    return lambda *args: CliRunner().invoke(app.app, ["serve", "api_server", "m", "--server-port", "0", *args])


def test_with_json_every_line_is_an_object_from_the_first_one_on(served_at_once):
    done = served_at_once("--log-json")
    assert (done.exit_code, done.stdout) == (0, "")
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(line["level"], line["message"]) for line in lines] == [
        ("info", "loading m"), ("info", "a plan\nof two lines"), ("info", "serving"),
        ("info", "'m' is served at http://127.0.0.1:1/v1"),
    ]  # fmt: skip


def test_without_it_a_start_is_for_readers_and_what_is_served_has_times(served_at_once):
    done = served_at_once()
    assert done.exit_code == 0
    *loading, serving, ready = done.stderr.splitlines()
    assert loading == ["loading m", "a plan", "of two lines"]
    assert serving.endswith("Z INFO serving")
    assert ready == "'m' is served at http://127.0.0.1:1/v1"


def test_with_json_an_error_is_a_line_of_the_log(run, pipes):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run("serve", "api_server", "--log-json", "--server-port", taken.getsockname()[1])
    [line] = map(json.loads, done.stderr.splitlines())
    assert (done.exit_code, line["level"]) == (1, "error")
    assert "in use" in line["message"]


def test_a_template_that_is_none_is_known_before_a_model_is_loaded(run, pipes, tmp_path):
    done = run("serve", "api_server", "--server-port", "0", "--chat-template", tmp_path / "none.jinja")
    assert done.exit_code == 1
    assert "ServeConfig.chat_template" in done.stderr
    assert pipes == []
