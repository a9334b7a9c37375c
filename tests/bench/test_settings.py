"""What a benchmark is told: names of cases, contradictions."""

import pytest

from turbojax.bench.decode import Grid
from turbojax.bench.errors import BenchError
from turbojax.bench.serving import Prefill, Serving
from turbojax.bench.settings import Settings
from turbojax.errors import ConfigError


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"shape": "llama-3.1-8b", "kv": 8}, "decode b64 4k kv8"),
        ({"shape": "llama-3.1-8b", "weights": "bf16", "kv": 4}, "bf16 decode b64 4k kv4"),
        ({"shape": "qwen3-8b"}, "qwen3-8b decode b64 4k kv16"),
        ({"shape": "qwen3-8b", "weights": "w8"}, "qwen3-8b w8 decode b64 4k kv16"),
        (
            {"shape": "llama-3.1-8b", "kv": 4, "engine": {"kv_hadamard": True, "batch_invariant": True}},
            "decode b64 4k kv4 hadamard batch-invariant",
        ),
        ({"model": "models/a.gguf"}, "a.gguf decode b64 4k kv16"),
        ({"shape": "qwen3-8b", "label": "mine"}, "mine decode b64 4k kv16"),
        ({"shape": "llama-3.1-8b", "label": "", "sampling": {"top_p": 0.9}}, "decode b64 4k kv16 top-p 0.9"),
    ],
)
def test_the_name_of_a_case(fields, name):
    assert Settings(**fields).case("decode b64 4k") == name


def test_sampling_is_off_until_it_is_asked_for():
    assert Settings(shape="tiny").generation().is_greedy
    sampled = Settings(shape="tiny", sampling={"top_p": 0.9}).generation()
    assert (sampled.is_greedy, sampled.top_p) == (False, 0.9)
    assert (sampled.temperature, sampled.top_k, sampled.min_p) == (1.0, 0, 0.0), "the row says top-p alone"


def test_what_was_given_goes_over_what_the_benchmark_needs():
    config = Settings(shape="tiny", kv=4, engine={"max_batch_size": 7}).config(max_batch_size=3, session_len=50)
    assert not config.enable_prefix_caching, "a second round would compute no prompts"
    assert (config.max_batch_size, config.session_len, config.quant_policy) == (7, 50, 4)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "either model .* or shape"),
        ({"model": "a", "shape": "tiny"}, "either model .* or shape"),
        ({"model": "a", "weights": "w4"}, "weights"),
        ({"shape": "tiny", "kv": 5}, "kv: 5"),
        ({"shape": "tiny", "bytes_per_s": 0.0}, "bandwidth: 0.0"),
        ({"shape": "tiny", "flops_per_s": -1.0}, "dot-rate: -1.0"),
    ],
)
def test_contradictions_are_named(fields, reason):
    with pytest.raises(BenchError, match=reason):
        Settings(**fields)


def test_a_grid_fits_its_engine():
    settings = Settings(shape="tiny", engine={"num_decode_steps": 2, "max_prefill_token_num": 64})
    config = Grid(((1, 100), (4, 100), (8, 10)), num_steps=8).config(settings)
    assert config.max_batch_size == 8
    # 4 prompts of two chunks each, then 32 steps to warm up, 8 to time, and four calls of 2.
    assert config.session_len == 100 + 4 * 2 + 32 + 8 + 4 * 2


@pytest.mark.parametrize(
    ("grid", "reason"),
    [
        (Grid((), 1), "integers >= 1"),
        (Grid(((1, 0),), 1), "integers >= 1"),
        (Grid(((1, 1),), 0), "integers >= 1"),
        (Grid(((9, 1),), 1), "max-batch-size 8 is below batch 9"),
        (Grid(((1, 1),), 1, against_greedy=True), "against-greedy"),
    ],
)
def test_a_grid_that_cannot_be_run(grid, reason):
    with pytest.raises(BenchError, match=reason):
        grid.config(Settings(shape="tiny", engine={"max_batch_size": 8}))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_requests": 0}, "requests: 0"),
        ({"input_len": 0}, "input-len: 0"),
        ({"output_len": -1}, "output-len: -1"),
        ({"concurrency": 0}, "concurrency: 0"),
        ({"rate": 2.0}, "either concurrency"),
        ({"concurrency": None}, "either concurrency"),
        ({"concurrency": None, "rate": 0.0}, "rate: 0.0"),
    ],
)
def test_a_load_that_cannot_be_run(fields, reason):
    good = {"kind": "throughput", "num_requests": 1, "input_len": 1, "output_len": 1, "concurrency": 1}
    with pytest.raises(BenchError, match=reason):
        Serving(**(good | fields))


def test_prompts_have_tokens():
    with pytest.raises(BenchError, match="tokens: 0"):
        Prefill((8, 0), 1)
    with pytest.raises(BenchError, match="repeats: 0"):
        Prefill((8,), 0)


def test_the_config_checks_the_rest():
    with pytest.raises(ConfigError, match="max_batch_size"):
        Settings(shape="tiny", engine={"max_batch_size": 0}).config()
