"""Packing while loading: into any rows of a fused linear, from codes of either orientation, in groups of any size."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import AffineTensor, WordTensor
from pallas_kernels.affine_linear import AffineWeights, PackedAffine, pack, unpack
from tests.checkpoints import layouts
from turbojax.core.weights import Linear
from turbojax.models.affine_stack import AffineStack
from turbojax.models.packing import pack_linear, regrouped
from turbojax.models.placing import fill
from turbojax.models.spec import GroupedAffine, LinearSpec


def affine(K, N, bits, g, seed, *, k_contiguous=False):
    rng, G = np.random.default_rng(seed), -(-K // g)
    codes = rng.integers(0, 2**bits, (K, N)).astype(np.uint8)
    codes = np.asfortranarray(codes) if k_contiguous else codes
    scale = rng.uniform(0.5, 2, (G, N)).astype(np.float16).astype(np.float32)
    zero = rng.integers(0, 2**bits, (G, N)).astype(np.float32)
    return AffineTensor(codes, scale, -zero * scale, bits, g)


@settings(max_examples=20, deadline=None)
@given(
    bits=st.sampled_from([4, 8]), K=st.integers(1, 300), runs=st.integers(1, 4), heads=st.integers(1, 3),
    g=st.sampled_from([16, 32, 64, 96, 128, 512]), k_contiguous=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_a_stack_packs_as_its_joined_parts_would(bits, K, runs, heads, g, k_contiguous, seed):
    """Rows of two parts take turns, `heads` and one at a time, in two layers that are written one by one."""
    g = min(g, K)
    sizes = [8 * runs * heads, 8 * runs]
    spec = LinearSpec(K, sum(sizes), GroupedAffine(bits, g, has_offset=True))
    stack = AffineStack(spec, 2, pack=True)
    fields = {"codes": [], "scale": [], "offset": []}
    for layer in range(2):
        parts = [affine(K, N, bits, g, seed + 2 * layer + i, k_contiguous=k_contiguous) for i, N in enumerate(sizes)]
        num_bytes = stack.write(layer, parts, [None, None], runs)
        for field, joined in fields.items():
            first, second = (getattr(p, field).T for p in parts)
            turns = [
                rows
                for r in range(runs)
                for rows in (first[8 * heads * r : 8 * heads * (r + 1)], second[8 * r : 8 * (r + 1)])
            ]
            joined.append(np.concatenate(turns))
    plain = AffineWeights(**{f: np.stack(a) for f, a in fields.items()}, bits=bits, group_size=g)
    assert num_bytes == sum(getattr(plain, field)[0].nbytes for field in fields)
    found, want = stack.weights(), pack_linear(Linear(plain)).weight
    assert type(found) is type(want)
    for field in ("words", "scale", "shift") if isinstance(want, PackedAffine) else ("codes", "scale", "offset"):
        np.testing.assert_array_equal(getattr(found, field), getattr(want, field), err_msg=field)


def test_groups_that_fall_into_smaller_ones_have_a_packed_form():
    parts = affine(288, 64, 4, 96, 0)
    plain = AffineWeights(parts.codes.T[None], parts.scale.T[None], parts.offset.T[None], bits=4, group_size=96)
    packed = pack_linear(Linear(plain)).weight
    again = unpack(packed)
    assert (packed.kind, again.group_size) == ("zero", 32)
    np.testing.assert_array_equal(again.codes, plain.codes)
    np.testing.assert_array_equal(again.scale, plain.scale.repeat(3, axis=2))
    assert regrouped(AffineWeights(plain.codes, plain.scale, bits=4, group_size=48)).group_size == 48, "16 is too few"


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_pack_alike_whichever_axis_is_contiguous(bits):
    codes = np.random.default_rng(0).integers(0, 2**bits, (1, 70, 300)).astype(np.uint8)
    scale = np.ones((1, 70, 1), np.float32)
    turned = np.ascontiguousarray(codes.swapaxes(1, 2)).swapaxes(1, 2)
    one, other = (pack(AffineWeights(c, scale, bits=bits, group_size=300)).words for c in (codes, turned))
    np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(unpack(pack(AffineWeights(turned, scale, bits=bits, group_size=300))).codes, codes)


@pytest.mark.parametrize("turned", [False, True])
def test_fill_interleaves_runs(turned):
    parts = [np.arange(N * 200).reshape(N, 200) for N in (8, 4)]
    parts[1] = parts[1] + 10_000
    out = np.empty((12, 200), int)
    fill(out, [np.asfortranarray(p) for p in parts] if turned else parts, 4)
    want = np.concatenate([p for r in range(4) for p in (parts[0][2 * r : 2 * r + 2], parts[1][r : r + 1])])
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize(("K", "g"), [(256, 64), (256, 32), (128, 32), (512, 128)])
def test_words_pack_as_their_codes_do(K, g):
    """In AWQ's order, two parts in four runs of rows each; planes of 64 words a column and of 32."""
    tensors = [affine(K, N, 4, g, seed) for seed, N in enumerate((64, 32))]
    words = [WordTensor(layouts.awq_rows(t.codes), t.scale, t.offset) for t in tensors]
    stacks = []
    for parts in (tensors, words):
        stack = AffineStack(LinearSpec(K, 96, GroupedAffine(4, g, has_offset=True)), 1, pack=True)
        assert stack.takes_words
        stack.write(0, parts, [None, None], 4)
        stacks.append(stack.weights())
    for field in ("words", "scale", "shift"):
        np.testing.assert_array_equal(*(getattr(stack, field) for stack in stacks), err_msg=field)


def test_words_are_not_taken_where_codes_must_be_seen():
    whole_tiles = LinearSpec(256, 8, GroupedAffine(4, 32))
    assert AffineStack(whole_tiles, 1, pack=True).takes_words
    assert not AffineStack(whole_tiles, 1, pack=True, whole=False).takes_words
    assert not AffineStack(whole_tiles, 1, pack=False).takes_words
    for K, bits in ((96, 4), (256, 8)):
        assert not AffineStack(LinearSpec(K, 8, GroupedAffine(bits, 32)), 1, pack=True).takes_words
