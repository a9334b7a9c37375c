"""tp = 2, 4 and 8 against transformers' recorded greedy tokens and against one device."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.sharding.harness import generated, load, logits_of, recorded

SHARED = Path(__file__).parents[4] / "shared"
slow = pytest.mark.slow
# Two layers each. Their 4 query and 2 kv heads leave shards of 8 empty; MLPs and vocabularies are padded, too.
EXACT = [
    ("llama_plain", 8, (16, 16)),
    ("awq_gemm_g64", 4, (16, 16)),
    ("gptq_v1_asym_actorder", 2, (16, 16)),
    ("qwen2_bias_tied", 2, (16, 16)),
    pytest.param("llama_plain", 2, (16, 16), marks=slow),
    pytest.param("llama_plain", 4, (16, 16), marks=slow),
    pytest.param("awq_gemm_g64", 2, (16, 16), marks=slow),
    pytest.param("awq_gemm_g64", 8, (16, 16), marks=slow),
    pytest.param("gemma2_softcap", 4, (16, 16), marks=slow),
    pytest.param("phi3_fused", 2, (16, 16), marks=slow),
    pytest.param("qwen3_qknorm", 4, (16, 16), marks=slow),
]
SUM_ATOL = 5e-5  # sums over shards in another order: 1e-5 was seen


@pytest.mark.parametrize(("name", "tp", "kv_bits"), EXACT)
def test_greedy_tokens_and_logits_are_those_of_one_device(goldens, name, tp, kv_bits):
    sequences, lengths = recorded(goldens / name)
    found = logits_of(load(goldens / name, tp, kv_bits=kv_bits), sequences)
    alone = logits_of(load(goldens / name, 1, kv_bits=kv_bits), sequences)
    for logits, want, ids, length in zip(found, alone, sequences, lengths, strict=True):
        np.testing.assert_allclose(logits, want, atol=SUM_ATOL, rtol=0)
        np.testing.assert_array_equal(generated(logits, length), ids[length:])


@pytest.mark.parametrize(
    ("name", "tp", "kv_bits"),
    [
        ("awq_gemm_g64", 2, (8, 8)),
        pytest.param("llama_plain", 2, (8, 8), marks=slow),
        pytest.param("llama_plain", 8, (4, 4), marks=slow),
        ("ct_w8a8_int8", 2, (16, 16)),
        pytest.param("fp8_tensor_ct", 4, (16, 16), marks=slow),
        pytest.param("fp8_block", 2, (16, 16), marks=slow),
    ],
)
def test_where_values_are_rounded_shards_differ_no_more_than_a_rounding_does(goldens, name, tp, kv_bits):
    """A difference of 1e-6 rounds keys or activations otherwise, and shards have activations' scales of their own.

    Their logits must lie nearer to those of one device than rounding in a whole other place puts them: than those of
    one device with its KV cache rounded (or, where it is, not rounded).
    """
    sequences, lengths = recorded(goldens / name)
    other = (8, 8) if kv_bits == (16, 16) else (16, 16)
    found = logits_of(load(goldens / name, tp, kv_bits=kv_bits), sequences)
    alone = logits_of(load(goldens / name, 1, kv_bits=kv_bits), sequences)
    rounded = logits_of(load(goldens / name, 1, kv_bits=other), sequences)
    rms = lambda a, b: float(np.sqrt(np.mean((np.concatenate(a) - np.concatenate(b)) ** 2)))
    limit = rms(rounded, alone)
    assert rms(found, alone) < limit
    for logits, want, length in zip(found, alone, lengths, strict=True):
        second, first = np.sort(want[length - 1 : -1], axis=-1)[:, -2:].T
        is_clear = first - second > 6 * limit
        assert is_clear.any()
        np.testing.assert_array_equal(generated(logits, length)[is_clear], generated(want, length)[is_clear])


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 8])
def test_smollm2_up_to_near_ties(smollm2, tp):
    """9 query and 3 kv heads: an empty place on one of two devices; two pieces of each kv head on eight."""
    path = SHARED / "smollm2" / "expected.json"
    if not path.is_file():
        pytest.skip(f"the recorded outputs are not at {path}")
    prompts = [
        p for p in json.loads(path.read_text())["prompts"] if len(p["input_ids"]) + len(p["greedy"]["ids"]) <= 128
    ]
    sequences = [np.array(p["input_ids"] + p["greedy"]["ids"], np.int32) for p in prompts]
    found = logits_of(load(smollm2, tp), sequences)
    for prompt, logits in zip(prompts, found, strict=True):
        greedy = prompt["greedy"]
        compared = len(greedy["ids"]) if greedy["near_tie"] is None else greedy["near_tie"]
        assert compared > 0
        tokens = generated(logits, len(prompt["input_ids"]))
        assert tokens[:compared].tolist() == greedy["ids"][:compared], prompt["id"]


def test_there_are_eight_devices():
    assert len(jax.devices()) == 8
