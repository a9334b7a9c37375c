"""How a model is cut: properties of the cut, and in numpy what shards compute together against what the whole does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from checkpoints import AffineFormat, AffineTensor, Checkpoint, DenseFormat, EightBitFormat, EightBitTensor, TensorInfo
from checkpoints.tensors import LogicalTensor
from turbojax.errors import ConfigError
from turbojax.models.cutting import PADDING, HeadCut, ModelCut, run_of, shard_arrays, whole_blocks
from turbojax.models.families import architecture_of
from turbojax.models.planning import plan_model
from turbojax.models.shard_view import Part, ShardView, shard_architecture
from turbojax.models.spec import EightBit, GroupedAffine, LinearSpec

SHARDS = st.integers(2, 16)


@given(st.integers(1, 16), st.integers(1, 16), SHARDS)
def test_every_query_head_is_somewhere_once_beside_its_kv_head(num_kv_heads, group, num_shards):
    cut = HeadCut.of(num_kv_heads * group, num_kv_heads, num_shards)
    found = []
    for shard in range(num_shards):
        kv_heads, query_heads = cut.kv_heads(shard), cut.query_heads(shard)
        assert len(kv_heads) == cut.places_per_shard
        assert len(query_heads) == cut.places_per_shard * cut.heads_per_place
        for i, head in enumerate(query_heads):
            if head != PADDING:
                found.append(head)
                assert head // group == kv_heads[i // cut.heads_per_place]
    assert sorted(found) == list(range(num_kv_heads * group))


@pytest.mark.parametrize(
    ("heads", "num_shards", "kv_heads", "group"),
    [
        ((64, 8), 2, 4, 8),  # divides
        ((32, 8), 16, 1, 2),  # a kv head on two shards each
        ((9, 3), 2, 2, 3),  # SmolLM2: an empty place
        ((9, 3), 8, 1, 2),
        ((28, 4), 8, 1, 4),  # seven query heads a kv head, in four and three
    ],
)
def test_shards_have_as_few_heads_as_can_be(heads, num_shards, kv_heads, group):
    cut = HeadCut.of(*heads, num_shards)
    assert (cut.places_per_shard, cut.heads_per_place) == (kv_heads, group)


@example([PADDING, 0, 1], 0)
@given(st.lists(st.integers(-1, 30), min_size=1, max_size=20), st.integers(0, 1))
def test_shard_arrays_takes_rows_and_zeros(index, axis):
    array = 1 + np.arange(31 * 31).reshape(31, 31)
    want = np.take(array, np.maximum(index, 0), axis)
    gone = np.asarray(index) == PADDING
    want[(slice(None),) * axis + (gone,)] = 0
    np.testing.assert_array_equal(shard_arrays(array, np.asarray(index), axis), want)


def test_one_run_is_a_view():
    array = np.arange(20)
    assert np.shares_memory(shard_arrays(array, np.arange(3, 9), 0), array)


def test_whole_blocks_are_halved_until_nothing_is_cut():
    assert whole_blocks([np.arange(128), np.arange(128, 256)], 128) == 128
    assert whole_blocks([np.arange(192), np.arange(192, 384)], 128) == 64
    assert whole_blocks([np.r_[np.arange(96), np.full(96, PADDING)]], 128) == 32
    assert whole_blocks([np.arange(5, 10)], 128) == 1


# -- tensors ----------------------------------------------------------------------------------------------


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 1,
    "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 32, "vocab_size": 75, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False,
}  # fmt: skip
LINEARS = ("q", "k", "v", "o", "gate", "up", "down")


def affine(rng, n, k, group_size, *, has_perm=False):
    codes = rng.integers(0, 16, (k, n)).astype(np.uint8)
    scale, offset = rng.normal(size=(2, -(-k // group_size), n)).astype(np.float32)
    perm = rng.permutation(k).astype(np.int32) if has_perm else None
    form = AffineFormat(4, group_size, has_offset=True, has_perm=has_perm)
    return AffineTensor(codes, scale, offset, 4, group_size, perm), form


def tensor_of(rng, kind, n, k):
    """A random linear, and the format that its header would have."""
    if kind == "dense":
        return rng.normal(size=(n, k)).astype(np.float32), DenseFormat("float32")
    if kind == "int8":
        codes = rng.integers(-127, 128, (n, k)).astype(np.int8)
        return EightBitTensor(codes, rng.normal(size=(n, 1)).astype(np.float32)), EightBitFormat("int8")
    if kind == "a scale a column":
        return affine(rng, n, k, k)
    return affine(rng, n, k, 32, has_perm=kind == "act-order")


def checkpoint_of(kind):
    """A model of one layer whose linears are of one kind."""
    rng, arch, logical = np.random.default_rng(0), architecture_of(CONFIG), []

    def add(name, tensor, form, shape):
        logical.append(LogicalTensor(TensorInfo(name, shape, form, Path("here"), 0), lambda: tensor))

    for part, source in arch.sources.items():
        name = source.at(0)
        if part in LINEARS:
            shape = (arch.out_dims[part], arch.in_dims.get(part, arch.embed_dim))
            add(name, *tensor_of(rng, kind, *shape), shape)
            bias = rng.normal(size=shape[0]).astype(np.float32)
            add(name.removesuffix(".weight") + ".bias", bias, DenseFormat("float32"), bias.shape)
        else:
            shape = (75, 96) if part in ("embedding", "head") else (96,)
            add(name, rng.normal(size=shape).astype(np.float32), DenseFormat("float32"), shape)
    return Checkpoint(Path("here"), CONFIG, {}, logical), arch


def product(x, tensor):
    """x @ the tensor, float64."""
    if isinstance(tensor, AffineTensor):
        return x @ tensor.dequantize().astype(np.float64)
    dense = tensor.dequantize() if isinstance(tensor, EightBitTensor) else tensor
    return x @ dense.astype(np.float64).T


@pytest.mark.parametrize("num_shards", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["dense", "int8", "w4", "a scale a column", "act-order"])
def test_shards_compute_together_what_the_whole_does(kind, num_shards):
    """Column-parallel parts side by side, row-parallel ones as a sum; padded places hold what must not count."""
    checkpoint, arch = checkpoint_of(kind)
    spec = plan_model(checkpoint, arch, "float32", lambda layer: (16, 16))
    cut, own = ModelCut.of(spec, num_shards), shard_architecture(arch)
    views = [ShardView(checkpoint, arch, cut, shard) for shard in range(num_shards)]
    local, rng = cut.shard_spec().segments[0].layer, np.random.default_rng(1)
    for part in LINEARS:
        whole = checkpoint.read(arch.sources[part].at(0))
        x = rng.normal(size=(3, arch.in_dims.get(part, arch.embed_dim)))
        want, total = product(x, whole), 0
        every = [view.read(own.sources[part].at(0)) for view in views]
        if part in ("o", "down"):
            columns = np.concatenate([cut.columns(part, shard) for shard in range(num_shards)])
            garbage = 7.0 if part == "o" else 0.0  # attention of an empty place is anything; the MLP's is zero
            side_by_side = np.where(columns == PADDING, garbage, x[:, np.maximum(columns, 0)])
            mine = np.split(side_by_side, num_shards, axis=1)
            for shard, tensor in enumerate(every):
                total = total + local_product(mine[shard], side_by_side, tensor)
            np.testing.assert_allclose(total, want, atol=1e-9, err_msg=part)
            assert len({t.shape for t in every}) == 1
            continue
        for shard, tensor in enumerate(every):
            rows = cut.rows(part, shard)
            wanted = np.where(rows == PADDING, 0, want[:, np.maximum(rows, 0)])
            np.testing.assert_allclose(product(x, tensor), wanted, atol=1e-9, err_msg=part)
    assert local.o.in_dim == local.num_heads * local.head_dim
    assert local.down.in_dim * 2 == sum(part.out_dim for part in local.gate_up)


def local_product(mine, side_by_side, tensor):
    """What a shard adds; permuted codes look their inputs up in those of all shards."""
    if isinstance(tensor, AffineTensor) and tensor.perm is not None:
        order = np.arange(len(tensor.perm), dtype=np.int32)
        plain = AffineTensor(tensor.codes, tensor.scale, tensor.offset, tensor.bits, tensor.group_size, order)
        return product(side_by_side[:, tensor.perm], plain)
    return product(mine, tensor)


def test_blocks_of_scales_are_sliced_with_their_codes():
    """Two halves of 256 columns, then four runs of 128, whose one block along K is a scale for each channel."""
    rng = np.random.default_rng(0)
    codes = rng.normal(size=(256, 512)).astype(ml_dtypes.float8_e4m3fn)
    whole = EightBitTensor(codes, rng.normal(size=(2, 4)).astype(np.float32))
    dense = whole.dequantize()
    for width in (256, 128):
        for start in range(0, 512, width):
            part = Part(np.arange(128, 256), np.arange(start, start + width), None, None, True).of(whole, None)
            np.testing.assert_array_equal(part.dequantize(), dense[128:, start : start + width])
            assert part.has_blocks == (width > 128)
    padded = Part(None, run_of(1, 384, 512), None, None, True).of(whole, None).dequantize()
    np.testing.assert_array_equal(padded, np.pad(dense[:, 384:], ((0, 0), (0, 256))))


def test_a_bias_behind_the_sum_is_added_once():
    checkpoint, arch = checkpoint_of("dense")
    spec = plan_model(checkpoint, arch, "float32", lambda layer: (16, 16))
    cut, own = ModelCut.of(spec, 4), shard_architecture(arch)
    for part in ("o", "down"):
        name = own.sources[part].at(0).removesuffix(".weight") + ".bias"
        found = [ShardView(checkpoint, arch, cut, shard).read(name) for shard in range(4)]
        np.testing.assert_array_equal(sum(found), checkpoint.read(name.partition(" of ")[2]))


def with_linear(spec, **linears):
    """The spec with other linears in its one layer."""
    [segment] = spec.segments
    return replace(spec, segments=(replace(segment, layer=replace(segment.layer, **linears)),))


@settings(max_examples=30)
@given(st.integers(1, 40).map(lambda n: 16 * n), SHARDS, st.sampled_from([16, 32, 64, 128]))
def test_groups_of_the_mlp_stay_whole(ffw_dim, num_shards, group_size):
    if ffw_dim % group_size or ffw_dim == group_size:
        return
    checkpoint, arch = checkpoint_of("dense")
    spec = plan_model(checkpoint, arch, "float32", lambda layer: (16, 16))
    storage = GroupedAffine(4, group_size)
    cut = ModelCut.of(with_linear(spec, down=LinearSpec(ffw_dim, 96, storage)), num_shards)
    assert cut.ffw_len % group_size == 0
    assert cut.ffw_len * num_shards >= ffw_dim
    assert cut.shard_spec().segments[0].layer.down.storage == storage


def test_blocks_of_scales_are_not_cut_apart():
    checkpoint, arch = checkpoint_of("dense")
    spec = plan_model(checkpoint, arch, "float32", lambda layer: (16, 16))
    spec = with_linear(spec, o=LinearSpec(192, 96, EightBit("float8_e4m3fn", has_blocks=True)))
    with pytest.raises(ConfigError, match=r"EngineConfig\.tp is 2.*blocks of 128 of o whole; 2 cut them into 64"):
        ModelCut.of(spec, 2).shard_spec()
