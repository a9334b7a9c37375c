"""The kernels' numerics in the interpreter, on the CPU, against float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import paged_decode_attention, paged_prefill_attention
from pallas_kernels.paged_attention.decode_kernel import DecodeConfig, decode_attention
from pallas_kernels.paged_attention.prefill_kernel import PrefillConfig, prefill_attention
from pallas_kernels.paged_attention.tiles import ScoreFunction, locate
from pallas_kernels.paged_attention.unpack import dequantise_plane, plane_factor, unpack_plane
from tests.kernels.attention.cases import CASES, Case, decode_problem, prefill_problem
from tests.kernels.attention.oracle import relative_error

TOLERANCE = 1e-2  # bfloat16 queries and outputs: 2e-3 is typical


@pytest.mark.parametrize(
    ("case", "cut"),
    [
        (CASES[0], (32, 2)),
        (CASES[3], (64, 1)),
        (CASES[4], (16, 1)),
        (CASES[5], (96, 1)),
        (CASES[8], (32, 1)),
    ],
    ids=str,
)
def test_decode(case, cut):
    """Ranges shorter than the rows, and one range for all; one and two pages a step."""
    q, pages, tables, lengths, wanted = decode_problem(case, jnp.bfloat16)
    options = case.options()
    sinks = options.pop("sinks")
    config = DecodeConfig(*cut, 4, 3)
    found = jax.jit(lambda *a: decode_attention(*a, ScoreFunction(**options), sinks, config, True))(
        q, pages, jnp.int32(1), tables, lengths
    )
    assert relative_error(found, wanted) < TOLERANCE
    np.testing.assert_array_equal(np.asarray(found[1], np.float32), 0)


@pytest.mark.parametrize("case", [CASES[2], CASES[6], CASES[9]], ids=str)
def test_prefill(case):
    q, pages, tables, starts, histories, wanted = prefill_problem(case, jnp.bfloat16)
    options = case.options()
    sinks = options.pop("sinks")
    config = PrefillConfig(16, 2, 4, 2)
    found = jax.jit(lambda *a: prefill_attention(*a, ScoreFunction(**options), sinks, config, True))(
        q, pages, jnp.int32(1), tables, starts, histories
    )
    assert relative_error(found, wanted) < TOLERANCE
    np.testing.assert_array_equal(np.asarray(found[int(starts[-1]) :], np.float32), 0)


def test_public_functions_take_the_interpreter():
    case = Case(32, 1, 8, 8)
    q, pages, tables, lengths, wanted = decode_problem(case, jnp.bfloat16)
    found = paged_decode_attention(q, pages, jnp.int32(1), tables, lengths, scale=32**-0.5, implementation="interpret")
    assert relative_error(found, wanted) < TOLERANCE
    q, pages, tables, starts, histories, wanted = prefill_problem(case, jnp.bfloat16)
    found = paged_prefill_attention(
        q, pages, jnp.int32(1), tables, starts, histories, scale=32**-0.5, implementation="interpret"
    )
    assert relative_error(found, wanted) < TOLERANCE


def test_float32_pages_are_refused_by_the_kernel():
    q, pages, tables, lengths, _ = decode_problem(Case(32, 1), jnp.float32)
    with pytest.raises(ValueError, match="16-bit k pages hold float32"):
        paged_decode_attention(q, pages, jnp.int32(1), tables, lengths, scale=1.0, implementation="interpret")


@pytest.mark.parametrize("bits", [8, 4])
def test_unpack_every_word(bits):
    words = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    for plane in range(16 // bits):
        codes = (words.astype(np.int64) >> (bits * plane)) % 2**bits
        wanted = codes * plane_factor(bits, plane)
        for base in (0, 1024):
            found = unpack_plane(jnp.asarray(words), bits=bits, plane=plane, keep_base=base > 0, interpret=True)
            np.testing.assert_array_equal(np.asarray(found, np.int64), wanted + base)
        scale, offset = (jnp.full(words.shape, x, jnp.float16) for x in (0.25, -3.0))
        values = dequantise_plane(jnp.asarray(words), scale, offset, bits=bits, plane=plane, interpret=True)
        np.testing.assert_array_equal(np.asarray(values, np.float64), codes * 0.25 - 3.0)


def test_the_work_list_holds_every_item_once_with_last_ones_last():
    counts = np.array([3, 0, 1, 2, 0, 4, 0, 0], np.int32)
    pieces = [tuple(map(int, locate(jnp.int32(i), jnp.asarray(counts)))) for i in range(counts.sum())]
    assert sorted(pieces) == [(row, number) for row, count in enumerate(counts) for number in range(count)]
    lasts = [number == counts[row] - 1 for row, number in pieces]
    assert lasts == sorted(lasts)
