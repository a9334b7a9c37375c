"""Packing and unpacking are inverses, and the unpack trick is integer arithmetic on every word."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.affine_linear import affine_weights, pack, unpack
from pallas_kernels.affine_linear.dequantise import packed_values
from pallas_kernels.affine_linear.reference import dequantise
from pallas_kernels.affine_linear.unpack import unpack_plane, zero_word


def random_weights(seed, L, K, N, bits, group_size, kind, has_perm=False):
    """Weights whose packed form is of `kind`, scales in float16."""
    rng = np.random.default_rng(seed)
    g = K if group_size == -1 else group_size
    scale = rng.uniform(0.01, 0.1, (L, -(-K // g), N)).astype(np.float16)
    zero = rng.integers(0, 2**bits, scale.shape).astype(np.float32)
    offset = {
        "symmetric": None,
        "zero": -zero * scale,
        "offset": rng.normal(0, 0.1, scale.shape).astype(np.float16),
    }[kind]
    perm = np.stack([rng.permutation(K) for _ in range(L)]).astype(np.int32) if has_perm else None
    codes = rng.integers(0, 2**bits, (L, K, N), dtype=np.uint8)
    return affine_weights(codes, scale, offset, perm, bits=bits, group_size=group_size)


@settings(max_examples=5, deadline=None)
@given(
    K=st.integers(32, 700),
    N=st.integers(1, 150),
    group_size=st.sampled_from([32, 64, 128, -1]),
    bits=st.sampled_from([4, 8]),
    kind=st.sampled_from(["symmetric", "zero", "offset"]),
    has_perm=st.booleans(),
    seed=st.integers(0, 999),
)
def test_unpack_is_the_inverse_of_pack(K, N, group_size, bits, kind, has_perm, seed):
    group_size = -1 if group_size > K else group_size
    w = random_weights(seed, 2, K, N, bits, group_size, kind, has_perm)
    packed = pack(w)
    assert packed.kind == kind
    again = unpack(packed)
    assert (again.bits, again.group_size) == (w.bits, w.group_size)
    np.testing.assert_array_equal(again.codes, w.codes)
    np.testing.assert_array_equal(again.scale, w.scale)
    if kind == "offset":
        np.testing.assert_allclose(again.offset, w.offset, rtol=1e-3, atol=1e-5)
    elif kind == "zero":
        np.testing.assert_array_equal(again.offset, w.offset)
    else:
        assert again.offset is None
    if has_perm:
        np.testing.assert_array_equal(again.perm, w.perm)
    np.testing.assert_allclose(packed_values(packed, 1), dequantise(w, 1), rtol=1e-5, atol=1e-5)


def test_both_plane_widths_hold_the_same_values():
    w = random_weights(0, 1, 512, 64, 4, 128, "zero")
    for width in (32, 64):
        packed = pack(w, width)
        assert packed.words.shape == (1, 512 // (4 * width), 64, width)
        np.testing.assert_array_equal(unpack(packed).codes, w.codes)


def test_word_layout():
    """Bits 4j .. 4j+3 of word r of tile t hold row (4t + j) * W + r: what the docstring of PackedAffine says."""
    codes = np.random.default_rng(0).integers(0, 16, (1, 512, 3), dtype=np.uint8)
    packed = pack(affine_weights(codes, np.ones((1, 4, 3), np.float16), bits=4, group_size=128))
    words = np.asarray(packed.words)
    for tile, column, r in ((0, 0, 0), (1, 2, 63), (0, 1, 17)):
        for plane in range(4):
            assert words[0, tile, column, r] >> (4 * plane) & 15 == codes[0, (4 * tile + plane) * 64 + r, column]


def test_group_sizes_without_a_packed_form_are_refused():
    w = affine_weights(np.zeros((1, 96, 8), np.uint8), np.ones((1, 2, 8), np.float16), bits=4, group_size=48)
    with pytest.raises(ValueError, match="group_size: 48, accepted: 32, 64, 128"):
        pack(w)


def half_add(a, b, dtype):
    """One bf16x2 or f16x2 instruction: exact in float64, then rounded once."""
    return (a.astype(np.float64) + b.astype(np.float64)).astype(dtype)


def numpy_twin(words, zero_lane, bits, plane, dtype):
    """What the assembly of `unpack.assembly` does to one 16-bit lane, instruction by instruction."""
    magic = np.uint16(0x4300 if dtype == jnp.bfloat16 else 0x6400)
    t = words >> np.uint16(bits * plane)  # a 32-bit shift moves bits between lanes: the masks drop them
    if bits == 8 and dtype == jnp.bfloat16:
        high = ((t & np.uint16(0x80)) | magic).view(dtype)
        low = ((t & np.uint16(0x7F)) | magic).view(dtype)
        high, low = (half_add(part, -magic.view(dtype), dtype) for part in (high, low))
        return half_add(half_add(low, high, dtype), -zero_lane, dtype)
    return half_add(((t & np.uint16(2**bits - 1)) | magic).view(dtype), -zero_lane, dtype)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_word_and_plane_unpacks_exactly(bits, dtype):
    words = np.arange(1 << 16, dtype=np.uint16)
    for zero in {0, 1, 2 ** (bits - 1), 2**bits - 1}:
        zeros = jnp.broadcast_to(zero_word(jnp.int32(zero), bits, dtype), words.shape)
        for plane in range(16 // bits):
            expected = (words >> (bits * plane) & (2**bits - 1)).astype(np.float32) - zero
            twin = numpy_twin(words, np.asarray(zeros)[:1], bits, plane, dtype)
            np.testing.assert_array_equal(twin.astype(np.float32), expected)
            ours = unpack_plane(jnp.asarray(words), zeros, bits=bits, plane=plane, interpret=True)
            np.testing.assert_array_equal(np.asarray(ours, np.float32), expected)
