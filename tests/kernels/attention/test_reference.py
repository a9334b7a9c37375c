"""The reference, which CPUs run, against float64 numpy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_cache.pages import check_page_ids
from pallas_kernels.paged_attention import paged_decode_attention, paged_prefill_attention, scratch
from tests.kernels.attention.cases import CASES, LENGTHS, Case, decode_problem, prefill_problem, quick
from tests.kernels.attention.oracle import expected, random_pages, random_queries, relative_error

FLOAT32 = 2e-6  # float32 sums of a few hundred terms


@pytest.mark.parametrize("case", [*CASES[::2], CASES[9]], ids=str)
def test_decode(case):
    q, pages, tables, lengths, wanted = decode_problem(case, jnp.float32)
    decode = quick(functools.partial(paged_decode_attention, **case.options()))
    found = decode(q, pages, jnp.int32(1), tables, lengths)
    assert relative_error(found, wanted) < FLOAT32
    np.testing.assert_array_equal(found[LENGTHS.index(0)], 0)


@pytest.mark.parametrize("case", [*CASES[1::2], CASES[6]], ids=str)
def test_prefill(case):
    q, pages, tables, starts, histories, wanted = prefill_problem(case, jnp.float32)
    prefill = quick(functools.partial(paged_prefill_attention, **case.options()))
    found = prefill(q, pages, jnp.int32(1), tables, starts, histories)
    assert relative_error(found, wanted) < FLOAT32
    np.testing.assert_array_equal(found[int(starts[-1]) :], 0)


@pytest.mark.parametrize("window", [None, 300])
def test_several_ranges_of_keys(window):
    """Lengths around the 256 keys that the reference takes at a time."""
    pages, tables = random_pages(0, tables=4, table_len=12, kv_heads=2, head_dim=32, page_len=64, k_bits=8, v_bits=4)
    q, lengths = random_queries(1, 4, 6, 32), (255, 256, 257, 700)
    options = {"scale": 0.2, "window": window}
    wanted = expected(q, pages, 1, tables, list(enumerate(lengths)), **options)
    decode = quick(functools.partial(paged_decode_attention, **options))
    found = decode(q, pages, jnp.int32(1), tables, jnp.asarray(lengths, jnp.int32))
    assert relative_error(found, wanted) < FLOAT32


@pytest.mark.parametrize("case", [CASES[1], dataclasses.replace(CASES[1], window=20)], ids=str)
def test_a_row_does_not_depend_on_its_batch(case):
    q, pages, tables, lengths, _ = decode_problem(case, jnp.float32)
    decode = quick(lambda n: paged_decode_attention(q, pages, jnp.int32(1), tables, n, **case.options()))
    whole = decode(lengths)
    for row in range(len(LENGTHS)):
        alone = decode(jnp.where(jnp.arange(len(LENGTHS)) == row, lengths, 0))
        np.testing.assert_array_equal(whole[row], alone[row])


@pytest.mark.parametrize("case", [CASES[3]], ids=str)
def test_a_dequantised_copy_of_the_pages_gives_the_same(case, monkeypatch):
    q, pages, tables, starts, histories, wanted = prefill_problem(case, jnp.float32)
    copy = functools.partial(scratch.dequantised_pages, dtype=jnp.float16, pages_per_step=8, interpret=True)
    copied, in_order = quick(copy)(pages, jnp.int32(1), tables, starts, histories)
    prefill = quick(functools.partial(paged_prefill_attention, **case.options()))
    found = prefill(q, copied, jnp.int32(0), in_order, starts, histories)
    assert relative_error(found, wanted) < 1e-3  # float16 keys and values
    assert scratch.pays(pages, tables)
    assert not scratch.pays(copied, tables)
    monkeypatch.setattr(scratch, "MAX_COPY_BYTES", 1 << 10)
    assert not scratch.pays(pages, tables)


@pytest.mark.parametrize("page", [-1, 55])
def test_debug_names_a_page_that_is_not_in_the_pool(page):
    q, pages, tables, lengths, _ = decode_problem(Case(32, 2), jnp.float32)
    decode = lambda tables: paged_decode_attention(q, pages, jnp.int32(1), tables, lengths, scale=1.0, debug=True)
    check_page_ids("block_tables", tables, pages)
    with pytest.raises(ValueError, match=rf"block_tables: page {page}, accepted: 0 \.\. 54"):
        decode(tables.at[2, 1].set(page))
    with pytest.raises(ValueError, match="block_tables: traced, accepted with debug=True: concrete arrays"):
        jax.jit(decode)(tables)


def test_equal_keys_give_the_mean_of_the_values():
    case = Case(32, 2)
    _, pages, tables, lengths, _ = decode_problem(case, jnp.float32)
    q = jnp.zeros((len(LENGTHS), 4, 32), jnp.float32)
    found = paged_decode_attention(q, pages, jnp.int32(1), tables, lengths, scale=1.0)
    values = np.asarray(pages.v[1])[np.asarray(tables)]
    for row, length in enumerate(LENGTHS):
        if length:
            mean = np.moveaxis(values[row], 1, 2).reshape(-1, 2, 32)[:length].mean(0)
            np.testing.assert_allclose(found[row], np.repeat(mean, 2, axis=0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": (9, 4, 64)}, r"q: shape \(9, 4, 64\)"),
        ({"q": (9, 5, 32)}, r"q: shape \(9, 5, 32\)"),
        ({"tables": (3, 6)}, r"block_tables: shape \(3, 6\)"),
        ({"sinks": (3,)}, r"sinks: shape \(3,\), accepted: \(4,\)"),
        ({"window": 0}, "window: 0, accepted: above 0"),
        ({"scale": 0.0}, "scale: 0.0, accepted: above 0"),
    ],
)
def test_bad_input_names_the_argument(change, message):
    q, pages, tables, lengths, _ = decode_problem(Case(32, 2), jnp.float32)
    given = {"q": q, "tables": tables, "sinks": None, "scale": 1.0, "window": None}
    given |= {k: jnp.zeros(v, given[k].dtype if given[k] is not None else jnp.float32) if isinstance(v, tuple) else v
              for k, v in change.items()}  # fmt: skip
    options = {k: given[k] for k in ("sinks", "scale", "window")}
    with pytest.raises(ValueError, match=message):
        paged_decode_attention(given["q"], pages, jnp.int32(1), given["tables"], lengths, **options)
