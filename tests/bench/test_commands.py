"""Each command from its options to its results, on the tiny shape."""

import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from turbojax.bench.decode import start_row
from turbojax.bench.engine import BenchEngine
from turbojax.bench.settings import Settings
from turbojax.cli import app
from turbojax.cli.bench import command_line
from turbojax.engine.metrics import EngineMetrics

MODEL = ["--shape", "tiny", "--kv", "8"]
# Every engine here has one slot of two pages and prompts of one bucket, so that all run the same few programs, which
# are compiled once; the rates need not be measured.
ENGINE = ["--no-compile-ahead", "--num-decode-steps", "1", "--max-prefill-token-num", "64"]
RATES = ["--bandwidth", "0.01", "--dot-rate", "0.1"]


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(app, "prepare_environment", lambda: None)  # the environment is the whole test run's
    return lambda *args: CliRunner().invoke(app.app, ["bench", *map(str, args)])


def rows_of(path):
    return {row["case"]: row for row in json.loads(path.read_text())["rows"]}


@pytest.mark.slow
def test_decode(run, tmp_path):
    path = tmp_path / "results.json"
    options = "--batch", 1, "--context", 64, "--steps", 4, "--loop", "--top-p", 0.9, "--against-greedy", "--json", path
    result = run("decode", *MODEL, *ENGINE, *RATES, *options)
    assert result.exit_code == 0, result.stderr
    rows = rows_of(path)
    kinds = "decode {} top-p 0.9", "decode {}", "sampled over greedy {} top-p 0.9"
    kinds = *kinds, "loop {} top-p 0.9", "engine over loop {} top-p 0.9"
    assert list(rows) == [f"tiny {kind.format('b1 64 kv8')}" for kind in kinds]
    assert all(case in result.stdout for case in rows)
    assert "weights 1 MiB" in result.stderr
    sampled, greedy, ratio, loop, over_loop = rows.values()
    assert sampled["unit"] == "tok/s"
    assert sampled["value"] == pytest.approx(1e3 / sampled["step_ms"], rel=1e-3)
    assert sampled["share"] == pytest.approx(sampled["value"] / sampled["floor"], rel=1e-3)
    assert ratio["value"] == pytest.approx(sampled["value"] / greedy["value"], rel=1e-3)
    assert over_loop["value"] == pytest.approx(sampled["value"] / loop["value"], rel=1e-3)


@pytest.mark.parametrize(("num_read", "kind"), [(39, "cold"), (40, "warm")])
def test_a_warm_start_compiles_nothing(num_read, kind):
    engine = object.__new__(BenchEngine)
    metrics = EngineMetrics(num_compilations=40, num_programs_read=num_read)
    engine.parts = SimpleNamespace(scheduler=SimpleNamespace(metrics=metrics))
    row = start_row(SimpleNamespace(settings=Settings(shape="tiny", kv=8)), engine, 2.5)
    assert (row["case"], row["value"]) == (f"tiny {kind} start to ready kv8", 2.5)


def test_the_recorded_command_repeats_the_run_anywhere():
    words = ["bench", "decode", "--json", "/here/a.json", "--batch", "1", "--plot=/here/a.png", "--kv", "8"]
    assert command_line(words) == "turbojax bench decode --batch 1 --kv 8"


def test_prefill(run, tmp_path):
    path = tmp_path / "results.json"
    result = run("prefill", *MODEL, *ENGINE, *RATES, "--tokens", "60,64", "--repeats", 2, "--json", path)
    assert result.exit_code == 0, result.stderr
    rows = rows_of(path)
    assert list(rows) == ["tiny ttft 60", "tiny ttft 64"]
    assert all(row["unit"] == "ms" and row["share"] == pytest.approx(row["floor"] / row["value"], rel=1e-3)
               for row in rows.values())  # fmt: skip


def test_throughput_of_a_file(run, tmp_path):
    path, load = tmp_path / "results.json", tmp_path / "chat.jsonl"
    lines = [{"input_len": 64, "output_len": 5}, {"token_ids": list(range(60)), "output_len": 7}] * 2
    load.write_text("\n".join(map(json.dumps, lines)))
    result = run("throughput", *MODEL, *ENGINE, *RATES, "--file", load, "--concurrency", 1, "--json", path)
    assert result.exit_code == 0, result.stderr
    row = rows_of(path)["tiny throughput chat kv8"]
    assert row["requests"] == 4
    assert row["value"] == pytest.approx(24 / row["duration_s"], rel=1e-3)
    assert row["value"] < row["floor"]
    for metric in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        assert row[metric].keys() == {"mean", "p50", "p95", "p99"}
        assert metric.removesuffix("_ms").upper() in result.stdout


def test_throughput_at_a_rate(run, tmp_path):
    path = tmp_path / "results.json"
    options = "--requests", 3, "--input-len", 64, "--output-len", 4, "--rate", 50, "--max-batch-size", 1
    assert run("throughput", *MODEL, *ENGINE, *RATES, *options, "--json", path).exit_code == 0
    row = rows_of(path)["tiny throughput 64/4 rate 50 kv8"]
    assert (row["requests"], row["rate"], row["floor"]) == (3, 50, None)


def test_latency(run, tmp_path):
    path = tmp_path / "results.json"
    options = "--requests", 2, "--input-len", 64, "--output-len", 4, "--json", path
    assert run("latency", *MODEL, *ENGINE, *RATES, *options).exit_code == 0
    row = rows_of(path)["tiny latency 64/4 kv8"]
    assert (row["unit"], row["value"]) == ("ms", row["e2e_ms"]["mean"])


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["interleave", "--shape", "tiny", "--prompt", "4096"], "beyond the limit of 4,096"),
        (["interleave", "--shape", "tiny", "--streams", "0"], "streams: 0, an integer >= 1"),
        (["decode"], "either model (a checkpoint) or shape"),
        (["decode", "--shape", "tiny", "--model", "a"], "either model (a checkpoint) or shape"),
        (["prefill", "--shape", "llama-9"], "shape 'llama-9' is unknown; known are llama-3.1-8b"),
        (["decode", "--shape", "tiny", "--weights", "w3"], "weight format 'w3' is unknown; known are w4"),
        (["decode", "--shape", "tiny", "--batch", "1,x"], "batch: '1,x', integers"),
        (["decode", "--shape", "tiny", "--cells", "4x8x9"], "cells: '4x8x9', a batch and a context"),
        (["decode", "--shape", "tiny", "--cells", "4x8", "--batch", "1"], "give it without batch and context"),
        (["decode", "--shape", "tiny", "--top-p", "2"], "top_p is 2.0"),
        (["decode", "--shape", "tiny", "--profile"], "needs an NVIDIA GPU"),
        (["decode", "--shape", "tiny", "--context", "9999"], "beyond the limit of 4,096"),
        (
            ["decode", "--shape", "tiny", "--context", "32", "--cache-max-entry-count", "9", "--batch", "16"],
            "pages, and the KV pool has 8",
        ),
        (["throughput", "--shape", "tiny", "--rate", "0"], "rate: 0.0"),
        (["throughput", "--shape", "tiny", "--rate", "1", "--concurrency", "1"], "either concurrency"),
    ],
)
def test_bad_input_is_one_line(run, args, reason):
    result = run(*args, *ENGINE, *RATES)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert reason in result.stderr


def test_an_empty_file_is_one_line(run, tmp_path):
    load = tmp_path / "load.jsonl"
    load.write_text("\n")
    result = run("throughput", *MODEL, *ENGINE, *RATES, "--file", load)
    assert (result.exit_code, "has no requests" in result.stderr) == (1, True)


def test_a_file_of_something_else_is_found_before_anything_runs(run, tmp_path):
    path = tmp_path / "results.json"
    path.write_text("{}")
    result = run("prefill", *MODEL, *ENGINE, *RATES, "--json", path)
    assert (result.exit_code, "no file of benchmark results" in result.stderr) == (1, True)
    assert "weights after" not in result.stderr
