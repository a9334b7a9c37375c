"""The KV cache: layout, quantisation error, in-place writes; reference and interpreted kernel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.kv_cache import bytes_per_token, empty_pages, write_kv
from pallas_kernels.kv_cache.quantise import pack, quantise, unpack
from tests.kernels.attention.cases import quick
from tests.kernels.attention.oracle import dequantised
from tests.kernels.kv_cache.compare import assert_same_writes

PRECISIONS = [(16, 8), (8, 4), (4, 16), (4, 4)]


def rows(seed, count, heads, head_dim, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((count, heads, head_dim)), dtype)


@pytest.mark.parametrize(("k_bits", "v_bits"), PRECISIONS)
@pytest.mark.parametrize("head_dim", [32, 80])
def test_written_rows_come_back(k_bits, v_bits, head_dim):
    """Within half a step of the rounded scale, plus float16's rounding of scale and offset; other places stay zero."""
    pages = empty_pages(2, 5, 3, 16, head_dim, k_bits=k_bits, v_bits=v_bits, dtype=jnp.float32)
    k, v = rows(0, 20, 3, head_dim), rows(1, 20, 3, head_dim)
    places = np.random.default_rng(2).permutation(np.arange(16, 80))[:20].astype(np.int32)
    ids, offsets = places // 16, places % 16
    pages = quick(write_kv)(pages, k, v, jnp.int32(1), jnp.asarray(ids), jnp.asarray(offsets))
    for bits, x, stored, params in ((k_bits, k, pages.k, pages.k_params), (v_bits, v, pages.v, pages.v_params)):
        values = dequantised(stored, params, bits)
        found, x = values[1, ids, :, offsets], np.asarray(x, np.float64)
        spread = (x.max(-1) - x.min(-1))[..., None]
        bound = 0 if bits == 16 else spread / (2**bits - 1) * 0.51 + 2e-3 * np.abs(x).max()
        assert np.all(np.abs(found - x) <= bound)
        values[1, ids, :, offsets] = 0
        np.testing.assert_array_equal(values, 0)


@settings(max_examples=15, deadline=None)
@given(st.sampled_from([8, 4]), st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_pack_and_unpack_are_inverse(bits, words, seed):
    codes = np.random.default_rng(seed).integers(0, 2**bits, (3, words * 16 // bits)).astype(np.uint16)
    packed = pack(jnp.asarray(codes), bits)
    assert packed.shape == (3, words)
    np.testing.assert_array_equal(unpack(packed, bits), codes)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [0.0, 2.5, -1e-8, 1e6, -1e6])
def test_constant_vectors_are_finite(bits, value):
    codes, params = quantise(jnp.full((1, 64), value), bits)
    scale, offset = np.asarray(params, np.float64)[0]
    np.testing.assert_array_equal(codes, 0)
    assert scale == 0
    assert offset == pytest.approx(np.clip(value, -65504, 65504), rel=1e-3, abs=1e-7)


@pytest.mark.parametrize("bits", [16, 8])
def test_a_loop_over_layers_copies_no_pool(bits):
    layers, num_rows = 4, 8
    pages = empty_pages(layers, 64, 2, 16, 64, k_bits=bits, v_bits=bits, dtype=jnp.float32)
    k, at = rows(0, num_rows, 2, 64), (jnp.arange(num_rows, dtype=jnp.int32), jnp.zeros(num_rows, jnp.int32))
    write = jax.jit(
        lambda p: jax.lax.fori_loop(0, layers, lambda layer, p: write_kv(p, k, k, layer, *at), p), donate_argnums=0
    )
    memory = write.lower(pages).compile().memory_analysis()
    pool = sum(x.nbytes for x in jax.tree.leaves(pages))
    assert memory.alias_size_in_bytes >= pool
    assert memory.temp_size_in_bytes < pool / 10


@pytest.mark.parametrize(("k_bits", "v_bits"), PRECISIONS)
def test_interpreted_kernel_writes_what_the_reference_writes(k_bits, v_bits):
    head_dim, num_rows = 80, 21
    pages = empty_pages(2, 9, 3, 16, head_dim, k_bits=k_bits, v_bits=v_bits, dtype=jnp.bfloat16)
    k, v = rows(0, num_rows, 3, head_dim, jnp.bfloat16), rows(1, num_rows, 3, head_dim, jnp.bfloat16).at[4].set(2.5)
    places = jnp.asarray(np.random.default_rng(2).permutation(8 * 16)[:num_rows], jnp.int32)
    at = (jnp.int32(1), 1 + places // 16, places % 16)
    found, wanted = (
        quick(functools.partial(write_kv, implementation=name))(pages, k, v, *at) for name in ("interpret", "reference")
    )
    assert_same_writes(found, wanted)


def test_bytes_of_a_token():
    pages = empty_pages(3, 5, 2, 16, 64, k_bits=8, v_bits=4, dtype=jnp.bfloat16)
    stored = sum(x.nbytes for x in jax.tree.leaves(pages))
    assert bytes_per_token(2, 64, k_bits=8, v_bits=4) * 3 * 5 * 16 == stored
    assert bytes_per_token(8, 128, k_bits=16, v_bits=16) == 2 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("k_shape", "ids", "message"),
    [((4, 3, 64), 4, r"k: shape \(4, 3, 64\)"), ((4, 2, 64), 5, r"k: shape \(4, 2, 64\), accepted: \(5, 2, 64\)")],
)
def test_bad_shapes_name_the_argument(k_shape, ids, message):
    pages = empty_pages(1, 3, 2, 16, 64, dtype=jnp.float32)
    with pytest.raises(ValueError, match=message):
        write_kv(pages, jnp.zeros(k_shape), jnp.zeros(k_shape), jnp.int32(0), *[jnp.zeros(ids, jnp.int32)] * 2)


def test_heads_that_do_not_pack_are_refused():
    with pytest.raises(ValueError, match="head_dim: 6, accepted at 4 bits: a multiple of 4"):
        empty_pages(1, 3, 2, 16, 6, k_bits=4, dtype=jnp.float32)
    with pytest.raises(ValueError, match="v_bits: 5"):
        empty_pages(1, 3, 2, 16, 64, v_bits=5, dtype=jnp.float32)


def test_debug_names_a_page_that_is_not_in_the_pool():
    pages = empty_pages(1, 3, 2, 16, 64, dtype=jnp.float32)
    k, at = jnp.zeros((2, 2, 64)), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match=r"page_ids: page 3, accepted: 0 \.\. 2"):
        write_kv(pages, k, k, jnp.int32(0), at.at[1].set(3), at, debug=True)
