"""On two NVIDIA GPUs: shards with the engine's kernels and NCCL against transformers' recorded outputs."""

import jax
import numpy as np
import pytest

from pallas_kernels import backend
from tests.core.harness import clear_margin
from tests.sharding.harness import case_of, generated, logits_of, recorded
from turbojax.api import pipeline
from turbojax.assembly import open_model
from turbojax.configs import EngineConfig, GenerationConfig
from turbojax.sharding import placements

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def two_gpus():
    if jax.default_backend() != "gpu" or jax.device_count() < 2:
        pytest.skip(f"two GPUs are needed, there are {jax.device_count()} devices of {jax.default_backend()}")


@pytest.mark.parametrize("name", ["llama_plain", "qwen2_bias_tied", "awq_gemm_g64", "gptq_v1_asym_actorder"])
def test_goldens_in_16_bits(goldens, name):
    """Within torch's own bounds for the type; greedy choices equal wherever the recorded margin is clear."""
    case = case_of(goldens, name)
    dtype = "bfloat16" if "bf16_engine" in case["tolerance"] else "float16"
    tolerance = case["tolerance"]["bf16_engine" if dtype == "bfloat16" else "f16_engine"]
    expected = np.load(goldens / name / "expected.npz")
    [placement] = placements(2, 1)
    backend.reset_counts()
    model = open_model(goldens / name, EngineConfig(dtype=dtype, tp=2), lambda share: None, placement)
    sequences, lengths = recorded(goldens / name)
    clear = clear_margin(tolerance)
    every = zip(("p17", "p40"), logits_of(model, sequences), sequences, lengths, strict=True)
    for prompt, logits, ids, length in every:
        errors = logits[length - 4 : length] - expected[f"{prompt}_logits"]
        assert np.abs(errors).max() <= tolerance["logits_atol"]
        assert np.sqrt(np.mean(errors**2)) <= tolerance["logits_rms"]
        is_clear = expected[f"{prompt}_gen_margin"] > clear
        np.testing.assert_array_equal(generated(logits, length)[is_clear], ids[length:][is_clear])
    assert backend.num_fallbacks() == 0


def test_an_engine_answers_as_one_device_does(goldens):
    """The persistent batch over two GPUs, KV8, up to the first step whose recorded margin is not clear."""
    folder = goldens / "llama_plain"
    inputs, expected = np.load(folder / "inputs.npz"), np.load(folder / "expected.npz")
    config = EngineConfig(tp=2, dtype="bfloat16", quant_policy=8, max_batch_size=4, session_len=128)
    greedy = GenerationConfig(max_new_tokens=16, ignore_eos=True)
    with pipeline(folder, config) as pipe:
        answers = pipe([inputs[f"{p}_ids"].tolist() for p in ("p17", "p40")], greedy)
        assert pipe.metrics.num_failed_steps == 0
    compared = 0
    for prompt, answer in zip(("p17", "p40"), answers, strict=True):
        unclear = np.flatnonzero(expected[f"{prompt}_gen_margin"] < 0.35)
        length = int(unclear[0]) if unclear.size else 16
        assert answer.token_ids[:length] == expected[f"{prompt}_gen_ids"][:length].tolist()
        compared += length
    assert compared > 0
