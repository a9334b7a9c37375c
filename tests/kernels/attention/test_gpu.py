"""On an NVIDIA GPU: the kernels against float64, bitwise repeatable, and the inline assembly against its twin."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backend
from pallas_kernels.paged_attention import paged_decode_attention, paged_prefill_attention
from pallas_kernels.paged_attention.decode_kernel import DecodeConfig, decode_attention
from pallas_kernels.paged_attention.prefill_kernel import PrefillConfig, prefill_attention
from pallas_kernels.paged_attention.tiles import ScoreFunction, call_kernel
from pallas_kernels.paged_attention.unpack import dequantise_plane, unpack_plane
from tests.kernels.attention.cases import CASES, LENGTHS, decode_problem, prefill_problem
from tests.kernels.attention.oracle import relative_error

pytestmark = pytest.mark.gpu
TOLERANCE = 1e-2  # bfloat16 queries and outputs: 2e-3 is typical


@pytest.fixture(autouse=True)
def _poison():
    """Fills freed device memory with NaN, so that an element that a kernel leaves unwritten shows."""
    jnp.full((64 << 20,), jnp.nan, jnp.float32).block_until_ready()


@pytest.mark.parametrize("range_len", [16, 32, 128])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_decode(case, range_len):
    q, pages, tables, lengths, wanted = decode_problem(case, jnp.bfloat16)
    options = case.options()
    sinks = options.pop("sinks")
    function, config = ScoreFunction(**options), DecodeConfig(range_len, 1, 4, 3)
    run = jax.jit(lambda *a: decode_attention(*a, function, sinks, config, False))
    found = run(q, pages, jnp.int32(1), tables, lengths)
    assert relative_error(found, wanted) < TOLERANCE
    again = run(q, pages, jnp.int32(1), tables, lengths)
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(again, np.float32))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chosen_configuration(case):
    q, pages, tables, lengths, wanted = decode_problem(case, jnp.bfloat16)
    backend.reset_counts()
    found = paged_decode_attention(q, pages, jnp.int32(1), tables, lengths, **case.options())
    assert relative_error(found, wanted) < TOLERANCE
    assert backend.num_fallbacks() == 0


@pytest.mark.parametrize("case", CASES, ids=str)
def test_prefill(case):
    q, pages, tables, starts, histories, wanted = prefill_problem(case, jnp.bfloat16)
    backend.reset_counts()
    found = paged_prefill_attention(q, pages, jnp.int32(1), tables, starts, histories, **case.options())
    assert relative_error(found, wanted) < TOLERANCE
    np.testing.assert_array_equal(np.asarray(found[int(starts[-1]) :], np.float32), 0)
    assert backend.num_fallbacks() == 0


@pytest.mark.parametrize("ranges", [(3, 32), (8, 16)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_prefill_in_ranges(case, ranges):
    q, pages, tables, starts, histories, wanted = prefill_problem(case, jnp.bfloat16)
    options = case.options()
    sinks = options.pop("sinks")
    function, config = ScoreFunction(**options), PrefillConfig(16, 1, 4, 2, *ranges)
    run = jax.jit(lambda *a: prefill_attention(*a, function, sinks, config, False))
    found = run(q, pages, jnp.int32(1), tables, starts, histories)
    assert relative_error(found, wanted) < TOLERANCE
    np.testing.assert_array_equal(np.asarray(found[int(starts[-1]) :], np.float32), 0)
    again = run(q, pages, jnp.int32(1), tables, starts, histories)
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(again, np.float32))


@pytest.mark.parametrize("case", CASES[1:4], ids=str)
def test_a_row_does_not_depend_on_its_batch(case):
    q, pages, tables, lengths, _ = decode_problem(case, jnp.bfloat16)
    whole = paged_decode_attention(q, pages, jnp.int32(1), tables, lengths, **case.options())
    for row in range(len(LENGTHS)):
        alone = jnp.where(jnp.arange(len(LENGTHS)) == row, lengths, 0)
        found = paged_decode_attention(q, pages, jnp.int32(1), tables, alone, **case.options())
        np.testing.assert_array_equal(np.asarray(whole[row], np.float32), np.asarray(found[row], np.float32))


@pytest.mark.parametrize("keep_base", [True, False])
@pytest.mark.parametrize(("bits", "plane"), [(8, 0), (8, 1), (4, 0), (4, 1), (4, 2), (4, 3)])
def test_unpack_every_word(bits, plane, keep_base):
    words = jnp.arange(65536, dtype=jnp.uint16).reshape(1024, 64)
    unpack = functools.partial(unpack_plane, bits=bits, plane=plane, keep_base=keep_base)

    def kernel(words_ref, out_ref, names):
        out_ref[...] = unpack(words_ref[...], interpret=False)

    shape = {"out": jax.ShapeDtypeStruct(words.shape, jnp.float16)}
    found = call_kernel(kernel, "unpack", (1,), {"words": words}, shape, num_warps=4, num_stages=1, interpret=False)
    np.testing.assert_array_equal(np.asarray(found["out"]), np.asarray(unpack(words, interpret=True)))


@pytest.mark.parametrize(("bits", "plane"), [(8, 0), (8, 1), (4, 0), (4, 1), (4, 2), (4, 3)])
def test_dequantise_every_word(bits, plane):
    words = jnp.arange(65536, dtype=jnp.uint16).reshape(1024, 64)
    rng = np.random.default_rng(0)
    scale, offset = (jnp.asarray(rng.standard_normal((1024, 64)), jnp.float16) for _ in range(2))
    dequantise = functools.partial(dequantise_plane, bits=bits, plane=plane)

    def kernel(words_ref, scale_ref, offset_ref, out_ref, names):
        out_ref[...] = dequantise(words_ref[...], scale_ref[...], offset_ref[...], interpret=False)

    inputs = {"words": words, "scale": scale, "offset": offset}
    shape = {"out": jax.ShapeDtypeStruct(words.shape, jnp.float16)}
    found = call_kernel(kernel, "dequantise", (1,), inputs, shape, num_warps=4, num_stages=1, interpret=False)
    wanted = dequantise(words, scale, offset, interpret=True)
    np.testing.assert_allclose(np.asarray(found["out"], np.float32), np.asarray(wanted, np.float32), rtol=1e-3)
