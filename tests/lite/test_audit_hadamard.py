"""The Hadamard matrix on queries and keys: attention is as before, and keys with a few large dims round better."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_cache.quantise import quantise
from pallas_kernels.rope_write.hadamard import hadamard_scale, hadamard_signs
from tests.core.harness import all_logits, chunks, decode, decode_batch, fresh, prefill
from turbojax.models.model import load_model

PAGE_LEN = 16


@pytest.mark.parametrize("head_dim", [64, 96, 80, 24, 1])
def test_the_matrix_is_orthogonal_and_its_own_inverse(head_dim):
    matrix = hadamard_signs(head_dim).astype(np.float64) * hadamard_scale(head_dim)
    np.testing.assert_allclose(matrix @ matrix, np.eye(head_dim), atol=1e-12)
    np.testing.assert_array_equal(matrix, matrix.T)


def with_hadamard(model):
    """The model with the matrix whatever its bits are."""
    segments = tuple(
        dataclasses.replace(s, layer=dataclasses.replace(s.layer, k_hadamard=True)) for s in model.spec.segments
    )
    spec = dataclasses.replace(model.spec, segments=segments)
    return dataclasses.replace(model, spec=spec, weights=dataclasses.replace(model.weights, spec=spec))


@pytest.mark.parametrize("case", ["qwen3_qknorm", "gemma2_softcap"])
def test_logits_stay_with_unrounded_keys(goldens, case):
    model = load_model(goldens / case, dtype="float32")
    ids = np.load(goldens / case / "inputs.npz")["p40_ids"]
    plain, turned = (
        all_logits(
            m.weights, fresh(m.spec, num_slots=1, page_len=PAGE_LEN), chunks((0, ids, 0, True), sink=1), PAGE_LEN
        )[1]
        for m in (model, with_hadamard(model))
    )
    np.testing.assert_allclose(np.asarray(turned), np.asarray(plain), atol=1e-4, rtol=0)


def test_decode_continues_as_prefill_does(goldens):
    """Both read keys that are turned, with queries that are."""
    model = load_model(goldens / "llama_plain", dtype="float32", kv_bits=(4, 8), kv_hadamard=True)
    assert all(segment.layer.k_hadamard for segment in model.spec.segments)
    ids = np.load(goldens / "llama_plain" / "inputs.npz")["p17_ids"]
    state = fresh(model.spec, num_slots=1, page_len=PAGE_LEN)
    state, first = prefill(model.weights, state, chunks((0, ids, 0, True), sink=1))
    _, more = decode(model.weights, state, decode_batch([0], 1), num_steps=8)
    whole = np.concatenate([ids, np.asarray(first), np.asarray(more)[:, 0]])
    _, logits = all_logits(
        model.weights, fresh(model.spec, num_slots=1, page_len=PAGE_LEN), chunks((0, whole, 0, True), sink=1), PAGE_LEN
    )
    assert np.asarray(logits).argmax(-1)[len(ids) - 1 : -1].tolist() == whole[len(ids) :].tolist()


def test_large_dims_are_spread():
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((200, 64)) * np.where(np.arange(64) % 32 == 5, 30, 1)
    matrix = hadamard_signs(64) * hadamard_scale(64)

    def error(x):
        codes, params = quantise(jnp.asarray(x, jnp.float32), 4)
        params = np.asarray(params, np.float64)
        return np.square(np.asarray(codes) * params[:, :1] + params[:, 1:] - x).mean()

    assert error(keys @ matrix) < 0.5 * error(keys)
