"""`bench guided` on a small model with a tokenizer of bytes."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.lite.harness import tiny_model
from turbojax.bench.errors import BenchError
from turbojax.bench.guided import ENDLESS_SCHEMA, TimedGuide, decode_rate, read_schema
from turbojax.bench.latency import Trace
from turbojax.cli import app
from turbojax.guided import GuideCompiler
from turbojax.tokenizer import load_tokenizer

# One slot and one size of prompts: few programs to compile; the rates need not be measured.
SMALL = (
    "--max-prefill-token-num", "64", "--num-decode-steps", "1", "--no-compile-ahead", "--bandwidth", "0.01",
    "--dot-rate", "0.1",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    pytest.importorskip("llguidance")
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(app, "prepare_environment", lambda: None)  # the environment is the whole test run's
    return lambda *args: CliRunner().invoke(app.app, ["bench", "guided", *map(str, args)])


@pytest.mark.slow
def test_guided_answers_are_timed_beside_free_ones(run, model, tmp_path):
    path = tmp_path / "guided.json"
    lengths = ("--batch", 1, "--input-len", 8, "--output-len", 24)
    result = run("--model", model, *SMALL, *lengths, "--json", path)
    assert result.exit_code == 0, result.stderr
    rows = json.loads(path.read_text())["rows"]
    assert [row["case"] for row in rows] == [
        f"tiny {name} b1 kv16" for name in ("free", "guided", "guided over free", "mask")
    ]
    free, guided, ratio, mask = rows
    assert ratio["value"] == pytest.approx(guided["value"] / free["value"], rel=1e-3)
    assert mask["masks"] == 24  # a mask for each token: the schema lets no answer end earlier
    assert 0 < mask["value"] <= mask["p95"] <= mask["p99"]


def test_answers_of_the_default_schema_never_end(model):
    compiler = GuideCompiler(load_tokenizer(model), 256, ())
    times_s = []
    guide = TimedGuide(compiler.guide({"type": "json_schema", "json_schema": {"schema": ENDLESS_SCHEMA}}), times_s)
    rng = np.random.default_rng(0)
    for _ in range(300):
        bits = np.unpackbits(guide.mask().view(np.uint8), bitorder="little")[: guide.vocab_size]
        guide.advance([int(rng.choice(np.flatnonzero(bits)))])
        assert not guide.is_finished
    assert len(times_s) == 300
    assert min(times_s) > 0


def test_the_rate_counts_what_came_after_the_first_tokens():
    traces = [Trace(0.0, 3, [(1.0, 1), (2.0, 4), (3.0, 4)]), Trace(0.0, 3, [(2.0, 2), (5.0, 6)])]
    assert decode_rate(traces) == (8 + 6) / 4.0
    with pytest.raises(BenchError, match="no answer had a second token"):
        decode_rate([Trace(0.0, 3, [(1.0, 1)])])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "tiny"], "a guide reads the model's tokenizer"),
        (["--model", "m", "--output-len", 1], "output-len: 1"),
        (["--model", "m", "--batch", "0"], "batch: 0"),
        (["--model", "m", "--batch", "a"], "batch: 'a'"),
    ],
)
def test_bad_options_are_refused_before_anything_is_loaded(run, arguments, message):
    result = run(*arguments)
    assert result.exit_code == 1
    assert message in result.stderr


def test_a_schema_is_a_json_object(tmp_path):
    path = tmp_path / "schema.json"
    path.write_text('{"type": "object"}')
    assert read_schema(path) == {"type": "object"}
    for text, message in [("{", "no JSON"), ("[1]", "holds list")]:
        path.write_text(text)
        with pytest.raises(BenchError, match=message):
            read_schema(path)
