"""Weights rounded again, against the same rounding in float64 numpy; and the bytes that they take."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.affine_linear import affine_weights
from turbojax.core.weights import Linear
from turbojax.lite.audit_weights import (
    affine_values,
    layer_values,
    linear_bytes,
    rounded_layer,
    rounded_linear,
    rounded_weights,
)
from turbojax.lite.grid import Grid
from turbojax.models.random_model import random_model
from turbojax.models.spec import EightBit, LinearSpec

GRID = Grid(bits=4, group_size=32, float_offset=True)


def test_dense_weights_round_to_the_nearest_of_sixteen_values_of_their_group():
    w = np.random.default_rng(0).standard_normal((2, 8, 80)).astype(np.float32)  # the last group is half a one
    found = rounded_linear(Linear(jnp.asarray(w)), LinearSpec(80, 8), GRID, 2)
    for layer in range(2):
        got = np.asarray(layer_values(found, jnp.int32(layer)), np.float64)
        for start in range(0, 80, 32):
            group = w[layer, :, start : start + 32].astype(np.float64)
            step = ((group.max(-1) - group.min(-1)) / 15)[:, None]
            assert np.abs(got[:, start : start + 32] - group).max() <= (step * 0.51).max()
            levels = (got[:, start : start + 32] - group.min(-1, keepdims=True)) / step
            np.testing.assert_allclose(levels, np.round(levels), atol=0.02)


def test_affine_weights_are_their_values_in_the_order_of_the_inputs():
    rng = np.random.default_rng(1)
    codes, perm = rng.integers(0, 16, (1, 64, 8)), rng.permutation(64)[None]
    scale, offset = rng.random((1, 2, 8)), rng.standard_normal((1, 2, 8))
    w = affine_weights(
        codes.astype(np.uint8), scale.astype(np.float32), offset.astype(np.float32), perm.astype(np.int32),
        bits=4, group_size=32,
    )  # fmt: skip
    by_row = lambda x: np.repeat(x[0], 32, axis=0)
    x = rng.standard_normal((3, 64))
    want = x[:, perm[0]] @ (codes[0] * by_row(scale) + by_row(offset))
    np.testing.assert_allclose(x @ np.asarray(affine_values(w, jnp.int32(0)), np.float64).T, want, rtol=1e-5, atol=1e-5)


def test_eight_bit_linears_stay():
    linear = Linear(jnp.zeros((1, 2, 2)))
    assert rounded_linear(linear, LinearSpec(2, 2, EightBit("int8")), GRID, 1) is linear


@pytest.mark.parametrize(
    ("form", "grid", "bits", "group"), [("bf16", None, 16, None), ("w4", None, 4, 128), ("bf16", GRID, 4, 32)]
)
def test_bytes_of_linears(form, grid, bits, group):
    spec = random_model("tiny", form, dtype="float32").spec
    want = 0
    for segment in spec.segments:
        layer = segment.layer
        for part in (*layer.qkv, layer.o, *layer.gate_up, layer.down):
            weights = part.in_dim * part.out_dim
            want += segment.num_layers * (
                weights * bits // 8 + (0 if group is None else part.out_dim * 4 * -(-part.in_dim // group))
            )
    assert linear_bytes(spec, grid) == want


@pytest.mark.parametrize("form", ["bf16", "w4"])
def test_one_layer_is_on_the_grid_and_the_others_are_as_they_were(form):
    weights = random_model("tiny", form, dtype="float32").weights
    (segment,), (rounded,) = weights.segments, rounded_weights(weights, GRID).segments
    for layer in range(weights.spec.num_layers):
        (found,) = rounded_layer(weights, GRID, jnp.int32(layer)).segments
        for name in ("o", "down"):
            for other in range(weights.spec.num_layers):
                want = layer_values(getattr(rounded if other == layer else segment, name), jnp.int32(other))
                np.testing.assert_allclose(
                    layer_values(getattr(found, name), jnp.int32(other)), want, rtol=1e-5, atol=1e-6
                )
        assert found.attn_norm.shape == segment.attn_norm.shape


def test_bytes_of_linears_with_one_layer_on_a_grid():
    spec = random_model("tiny", "bf16", dtype="float32").spec
    saved = [linear_bytes(spec) - linear_bytes(spec, GRID, layer) for layer in range(spec.num_layers)]
    assert sum(saved) == linear_bytes(spec) - linear_bytes(spec, GRID)
    assert len(set(saved)) == 1
