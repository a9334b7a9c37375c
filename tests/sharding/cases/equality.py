"""tp = 2, 4 and 8 against transformers' recorded greedy tokens and against one device."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.core.test_eight_bit import RMS_OF_ROUNDED_X
from tests.models.test_eight_bit import in_layers, random_llama, write
from tests.sharding.harness import case_of, generated, load, logits_of, recorded

SHARED = Path(__file__).parents[4] / "shared"
slow = pytest.mark.slow
# Two layers each. Their 4 query and 2 or 1 kv heads leave shards of 8 empty; MLPs and vocabularies are padded, too.
EXACT = [
    ("llama_plain", 8),
    ("awq_gemm_g64", 4),
    ("gptq_v1_asym_actorder", 2),
    ("qwen2_bias_tied", 2),
    pytest.param("awq_gemm_g64", 8, marks=slow),
    pytest.param("gemma2_softcap", 4, marks=slow),
    pytest.param("phi3_fused", 2, marks=slow),
]


@pytest.mark.parametrize(("name", "tp"), EXACT)
def test_logits_and_greedy_tokens_are_those_recorded(goldens, name, tp):
    """Within the tolerance that one device is held to."""
    atol, expected = (
        case_of(goldens, name)["tolerance"]["float32_engine"]["logits_atol"],
        np.load(goldens / name / "expected.npz"),
    )
    sequences, lengths = recorded(goldens / name)
    every = zip(("p17", "p40"), logits_of(load(goldens / name, tp), sequences), sequences, lengths, strict=True)
    for prompt, logits, ids, length in every:
        np.testing.assert_allclose(logits[length - 4 : length], expected[f"{prompt}_logits"], atol=atol, rtol=0)
        np.testing.assert_array_equal(generated(logits, length), ids[length:])


@pytest.mark.parametrize(("name", "tp", "bits"), [("awq_gemm_g64", 2, 8)])
def test_rounded_keys_and_values(goldens, name, tp, bits):
    """A difference of 1e-6 rounds some of them otherwise: shards are nearer to one device than it is to 16 bits.

    Where its two likeliest tokens are further apart than three times what moved between them, they pick the same.
    """
    sequences, lengths = recorded(goldens / name)
    found, alone = (logits_of(load(goldens / name, n, kv_bits=(bits, bits)), sequences) for n in (tp, 1))
    moved = rms(found, alone)
    assert moved < rms(logits_of(load(goldens / name, 1), sequences), alone)
    for logits, want, length in zip(found, alone, lengths, strict=True):
        second, first = np.sort(want[length - 1 : -1], axis=-1)[:, -2:].T
        is_clear = first - second > 6 * moved
        assert is_clear.any()
        np.testing.assert_array_equal(generated(logits, length)[is_clear], generated(want, length)[is_clear])


@slow
@pytest.mark.parametrize(("name", "tp"), [("ct_w8a8_int8", 8), ("fp8_tensor_ct", 4)])
def test_activations_of_eight_bits(goldens, name, tp):
    """Each shard has scales of its own, which are never coarser: as far from what is recorded as one device may be."""
    sequences, lengths = recorded(goldens / name)
    expected, found = np.load(goldens / name / "expected.npz"), logits_of(load(goldens / name, tp), sequences)
    last = [logits[length - 4 : length] for logits, length in zip(found, lengths, strict=True)]
    assert 0.05 < rms(last, [expected[f"{p}_logits"] for p in ("p17", "p40")]) < RMS_OF_ROUNDED_X[name]
    if name == "ct_w8a8_int8":
        for logits, ids, length in zip(found, sequences, lengths, strict=True):
            np.testing.assert_array_equal(generated(logits, length), ids[length:])


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=slow)])
def test_blocks_of_scales_go_whole_to_a_shard(tmp_path, tp):
    """Inputs have the scales that they have on one device, so what differs is a code here and there, where sums of
    another order round to its neighbour; scales of another block would move logits by a tenth of their spread or more.
    Four shards share two kv heads, and three blocks of the MLP."""
    write(tmp_path, random_llama(), in_layers("e4m3 blocks"))
    sequences = [np.arange(40) * 7 % 64, np.arange(17) * 11 % 64]
    found, alone = (logits_of(load(tmp_path / "8", n), sequences) for n in (tp, 1))
    assert rms(found, alone) < 0.01 * np.concatenate(alone).std()
    for mine, want in zip(found, alone, strict=True):
        np.testing.assert_array_equal(mine.argmax(-1), want.argmax(-1))


def rms(found, want):
    return float(np.sqrt(np.mean((np.concatenate(found) - np.concatenate(want)) ** 2)))


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
