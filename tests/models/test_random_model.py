"""Named shapes and random weights: public numbers, the loader's own form, ordinary activations."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import AffineFormat, EightBitFormat
from pallas_kernels.affine_linear import AffineWeights, pack
from pallas_kernels.eight_bit_linear import EightBitWeights
from pallas_kernels.eight_bit_linear.reference import dequantise
from turbojax.bench.roofline import linear_ops, pair_flops
from turbojax.core.weights import Linear
from turbojax.errors import ModelConfigError
from turbojax.models import random_model as rm
from turbojax.models.abstract import abstract_weights
from turbojax.models.families import architecture_of
from turbojax.models.planning import plan_model
from turbojax.models.shapes import SHAPES, UnknownShapeError, shape_config
from turbojax.models.spec import Dense, EightBit, GroupedAffine


def planned(shape, form):
    config = dict(shape_config(shape))
    arch = architecture_of(config)
    return plan_model(rm.described_checkpoint(shape, config, arch, form), arch, "bfloat16", lambda layer: (8, 8))


@pytest.mark.parametrize(
    ("shape", "num_parameters"),  # as the model cards count them, in billions
    [("llama-3.1-8b", 8.03), ("llama-3.1-70b", 70.6), ("qwen2.5-7b", 7.62), ("qwen3-8b", 8.19)],
)
def test_the_shapes_have_the_published_number_of_parameters(shape, num_parameters):
    leaves = jax.tree.leaves(abstract_weights(planned(shape, rm.WEIGHT_FORMATS["bf16"])))
    assert sum(leaf.size for leaf in leaves) / 1e9 == pytest.approx(num_parameters, rel=1e-3)


@pytest.mark.parametrize("shape", ["llama-3.1-8b", "qwen3-8b"])
def test_behind_the_parity_length_attention_costs_the_flops_of_the_linears(shape):
    spec = planned(shape, rm.WEIGHT_FORMATS["bf16"])
    weights = abstract_weights(spec)
    pairs = sum(pair_flops(segment) for segment in spec.segments)
    assert pairs * spec.parity_len == pytest.approx(sum(op.num_flops for op in linear_ops(weights, 1)))
    windowed = [replace(segment, layer=replace(segment.layer, window=4096)) for segment in spec.segments]
    assert replace(spec, segments=tuple(windowed)).parity_len == math.inf


def test_an_unknown_shape_or_format_names_those_that_there_are():
    with pytest.raises(UnknownShapeError, match=r"'gpt-5'.*llama-3.1-8b"):
        rm.random_model("gpt-5")
    with pytest.raises(ModelConfigError, match=r"'w3'.*w4"):
        rm.random_model("tiny", "w3")


@pytest.mark.parametrize("weight_format", rm.WEIGHT_FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_has_every_format(shape, weight_format):
    form = rm.WEIGHT_FORMATS[weight_format]
    spec = planned(shape, form)
    assert len(spec.segments) == 1, "one stack of layers"
    layer = spec.segments[0].layer
    for part in (*layer.qkv, layer.o, *layer.gate_up, layer.down):
        if isinstance(form, AffineFormat):
            assert part.storage == GroupedAffine(form.bits, form.group_size, form.has_offset)
        elif isinstance(form, EightBitFormat):
            assert part.storage == EightBit(form.dtype, form.has_blocks and part.in_dim > 128)
        else:
            assert part.storage == Dense()
    assert (len(layer.qkv), len(layer.gate_up)) == (1, 1), "fused"


@pytest.mark.parametrize("weight_format", rm.WEIGHT_FORMATS)
def test_random_weights_are_the_tree_that_loading_gives(weight_format):
    model = rm.random_model("tiny", weight_format, seed=3)
    expected = abstract_weights(model.spec)
    assert jax.tree.structure(model.weights) == jax.tree.structure(expected)
    for got, want in zip(jax.tree.leaves(model.weights), jax.tree.leaves(expected), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
    again, other = rm.random_model("tiny", weight_format, seed=3), rm.random_model("tiny", weight_format, seed=4)
    same = [np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (model.weights, again.weights)), strict=True)]
    assert all(same)
    assert not np.array_equal(model.weights.embedding.weight, other.weights.embedding.weight)


def values(w):
    """float32 [L, N, K] of a linear's weight."""
    if isinstance(w, EightBitWeights):
        return np.stack([dequantise(w, layer) for layer in range(w.codes.shape[0])])
    if not isinstance(w, AffineWeights):
        return np.asarray(w, np.float32)
    spread = lambda a: np.repeat(np.asarray(a, np.float32), w.group_size, axis=2)[:, :, : w.K]
    offset = -(2.0 ** (w.bits - 1)) * w.scale if w.offset is None else w.offset
    return np.asarray(w.codes, np.float32) * spread(w.scale) + spread(offset)


@pytest.mark.parametrize("weight_format", rm.WEIGHT_FORMATS)
def test_linears_keep_the_size_of_what_they_multiply(weight_format):
    weights = rm.random_model("tiny", weight_format).weights
    layers = weights.segments[0]
    for linear in (*layers.qkv, layers.o, *layers.gate_up, layers.down, weights.head):
        value = values(linear.weight)
        assert value.std() * value.shape[2] ** 0.5 == pytest.approx(1, rel=0.06)
        assert not np.array_equal(value[0, :8], value[-1, 8:16])


@pytest.mark.parametrize(("weight_format", "kind"), [("w4", "symmetric"), ("w4-awq", "zero"), ("w8", "symmetric")])
def test_on_a_gpu_codes_come_packed_as_pack_packs_them(monkeypatch, weight_format, kind):
    monkeypatch.setattr(rm.backend, "on_gpu", lambda: True)
    spec = planned("tiny", rm.WEIGHT_FORMATS[weight_format])
    abstract = abstract_weights(spec).segments[0].gate_up[0]
    w, rng = rm.random_linear(jax.random.key(0, impl="rbg"), abstract).weight, np.random.default_rng(0)
    groups = abstract.weight.scale.shape
    scale = rng.uniform(1, 2, groups).astype(np.float16)
    offset = -np.float16(2 ** (abstract.weight.bits - 1)) * scale if kind == "zero" else None
    codes = rng.integers(0, 2**abstract.weight.bits, abstract.weight.codes.shape, np.uint8)
    packed = pack(AffineWeights(codes, scale, offset, bits=abstract.weight.bits, group_size=128))
    assert w.kind == kind
    assert jax.tree.structure(w) == jax.tree.structure(packed)
    for got, want in zip(jax.tree.leaves(w), jax.tree.leaves(packed), strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)


def test_any_linear_gets_its_layers_and_a_small_bias():
    abstract = Linear(jax.ShapeDtypeStruct((3, 5, 12), jnp.bfloat16), jax.ShapeDtypeStruct((3, 5), jnp.bfloat16))
    made = rm.random_linear(jax.random.key(1, impl="rbg"), abstract)
    assert (made.weight.shape, made.bias.shape) == ((3, 5, 12), (3, 5))
    assert np.abs(np.asarray(made.bias, np.float32)).max() <= 0.02
