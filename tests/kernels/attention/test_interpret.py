"""The kernels' numerics in the interpreter, on the CPU, against float64 numpy."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import paged_decode_attention, paged_prefill_attention, scratch
from pallas_kernels.paged_attention.decode_kernel import DecodeConfig, decode_attention
from pallas_kernels.paged_attention.prefill_kernel import PrefillConfig, prefill_attention
from pallas_kernels.paged_attention.tiles import ScoreFunction, locate
from pallas_kernels.paged_attention.unpack import dequantise_plane, plane_factor, unpack_plane
from tests.kernels.attention.cases import CASES, Case, decode_problem, prefill_problem, quick
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
    run = quick(lambda *a: decode_attention(*a, ScoreFunction(**options), sinks, config, True))
    found = run(q, pages, jnp.int32(1), tables, lengths)
    assert relative_error(found, wanted) < TOLERANCE
    np.testing.assert_array_equal(np.asarray(found[1], np.float32), 0)


@pytest.mark.parametrize(
    ("case", "ranges"),
    [(CASES[2], (1, 0)), (CASES[6], (3, 32)), (CASES[6], (1, 0)), (CASES[9], (8, 64)), (CASES[9], (1, 0))],
    ids=str,
)
def test_prefill(case, ranges):
    """Whole, and in ranges: fewer than the steps of a tile, and more."""
    q, pages, tables, starts, histories, wanted = prefill_problem(case, jnp.bfloat16)
    options = case.options()
    sinks = options.pop("sinks")
    config = PrefillConfig(16, 2, 4, 2, *ranges)
    run = quick(lambda *a: prefill_attention(*a, ScoreFunction(**options), sinks, config, True))
    found = run(q, pages, jnp.int32(1), tables, starts, histories)
    assert relative_error(found, wanted) < TOLERANCE
    np.testing.assert_array_equal(np.asarray(found[int(starts[-1]) :], np.float32), 0)


def test_public_functions_take_the_interpreter():
    case = Case(32, 1, 8, 8)
    q, pages, tables, lengths, wanted = decode_problem(case, jnp.bfloat16)
    options = {"scale": 32**-0.5, "implementation": "interpret"}
    decode = quick(functools.partial(paged_decode_attention, **options))
    found = decode(q, pages, jnp.int32(1), tables, lengths)
    assert relative_error(found, wanted) < TOLERANCE
    q, pages, tables, starts, histories, wanted = prefill_problem(case, jnp.bfloat16)
    prefill = quick(functools.partial(paged_prefill_attention, **options))
    found = prefill(q, pages, jnp.int32(1), tables, starts, histories)
    assert relative_error(found, wanted) < TOLERANCE


@pytest.mark.parametrize("implementation", ["reference", "interpret"])
def test_nobody_attends_to_nothing(implementation):
    _, pages, tables, *_ = decode_problem(Case(32, 1, 8, 8), jnp.bfloat16)
    nobody, options = jnp.zeros((0, 2, 32), jnp.bfloat16), {"scale": 1.0, "implementation": implementation}
    none = jnp.zeros(0, jnp.int32)
    found = paged_decode_attention(nobody, pages, jnp.int32(1), tables[:0], none, **options)
    assert (found.shape, found.dtype) == (nobody.shape, nobody.dtype)
    padding, starts = jnp.ones((3, 2, 32), jnp.bfloat16), jnp.zeros(1, jnp.int32)
    found = paged_prefill_attention(padding, pages, jnp.int32(1), tables[:0], starts, none, **options)
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.zeros((3, 2, 32)))


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


def test_the_work_list_holds_every_item_once_and_shorter_ones_last():
    counts = np.array([3, 0, 1, 2, 0, 4, 0, 0], np.int32)
    sizes = np.array([0, 1, 1, 0, 0, 2, 0, 0], np.int32)
    pieces = [
        tuple(map(int, locate(jnp.int32(i), jnp.asarray(counts), jnp.asarray(sizes), 3))) for i in range(counts.sum())
    ]
    assert sorted(pieces) == [(row, number) for row, count in enumerate(counts) for number in range(count)]
    order = [3 if number < counts[row] - 1 else sizes[row] for row, number in pieces]
    assert order == sorted(order, reverse=True)


def test_a_copied_step_is_whole():
    """Pages of 16 keys, four a step: those behind a chunk's last key are hidden, and must not hold NaN."""
    _, pages, tables, starts, histories, _ = prefill_problem(Case(32, 1, 8, 8), jnp.bfloat16)
    copy = functools.partial(scratch.dequantised_pages, dtype=jnp.bfloat16, pages_per_step=4, interpret=True)
    found, _ = quick(copy)(pages, jnp.int32(1), tables, starts, histories)
    for chunk, count in enumerate(np.asarray(histories + starts[1:] - starts[:-1])):
        step_ends = -(-count // 64) * 64
        values = np.asarray(found.v[0], np.float32).reshape(len(histories), -1, *found.v.shape[2:])[chunk]
        assert np.isfinite(values[: step_ends // 16]).all()
