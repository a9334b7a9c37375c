"""Layers run one by one: what they compute is the engine's model, and factors folded through them change nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.core.harness import all_logits, chunks, fresh
from tests.lite.harness import VOCAB, tiny_model
from turbojax.core.decoder import logits_of
from turbojax.lite.floats import FloatModel
from turbojax.lite.folding import fold, heads_of, shared
from turbojax.lite.forward import advance, observe
from turbojax.models.model import load_model

IDS = np.random.default_rng(0).integers(0, VOCAB, (2, 40)).astype(np.int32)


@pytest.fixture(scope="module", params=["qwen2", "gemma2", "phi3"])
def folder(request, tmp_path_factory):
    """Biases; norms that are offset and come after, softcaps and windows; fused tensors."""
    return tiny_model(tmp_path_factory.mktemp("models") / request.param, request.param)


def test_layers_one_by_one_are_the_engines_model(folder):
    source, model = FloatModel(folder), load_model(folder, dtype="float32")
    hidden = source.embed(IDS)
    for i in range(source.num_layers):
        hidden = advance(source, source.layer(i), hidden, batch_size=2)
    got = jax.jit(logits_of)(model.weights, jnp.asarray(hidden[1]))
    state = fresh(model.spec, page_len=16)
    want = all_logits(model.weights, state, chunks((0, IDS[1], 0, True), sink=2), 16)[1]
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), atol=2e-3)


def test_factors_of_every_input_can_be_folded_away(folder):
    source, rng = FloatModel(folder), np.random.default_rng(1)
    hidden = source.embed(IDS)
    want = advance(source, source.layer(1), hidden, batch_size=2)
    for group in source.groups:
        layer = source.layer(1)
        in_dim = layer.weights[group.tensors[0].format(i=1)].shape[1]
        before = {name: w.copy() for name, w in layer.weights.items()}
        scale = shared(np.exp(rng.normal(0, 1, in_dim)), heads_of(source, group)).astype(np.float32)
        fold(source, layer, group, scale)
        for name in group.tensors:
            assert not np.allclose(layer.weights[name.format(i=1)], before[name.format(i=1)])
        np.testing.assert_allclose(advance(source, layer, hidden, batch_size=2), want, atol=2e-4, rtol=1e-4)


def test_statistics_are_those_of_the_inputs(folder):
    source = FloatModel(folder)
    layer, hidden = source.layer(0), source.embed(IDS)
    stats = observe(source, layer, hidden, batch_size=1)
    norm = layer.others[source.arch.sources["attn_norm"].at(0)] + source.arch.norm_offset
    x = hidden.reshape(-1, hidden.shape[2]).astype(np.float64)
    x = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + source.arch.norm_eps) * norm
    np.testing.assert_allclose(stats["qkv"].rows, x, atol=1e-4)
    for found in stats.values():
        rows = found.rows.astype(np.float64)  # few enough tokens that all are kept
        assert len(rows) == IDS.size
        np.testing.assert_allclose(found.gram, rows.T @ rows / len(rows), atol=1e-5 * np.abs(found.gram).max())
        np.testing.assert_allclose(found.mean_abs, np.abs(rows).mean(0), rtol=1e-4)
        np.testing.assert_array_equal(found.max_abs, np.abs(found.rows).max(0))


def test_a_tensor_of_several_parts_is_read_once(tmp_path):
    source = FloatModel(tiny_model(tmp_path / "phi3", "phi3"))
    assert [len(group.tensors) for group in source.groups] == [1, 1, 1, 1]
    assert len(source.weight_names(0)) == 4
