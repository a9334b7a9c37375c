"""The op against float64, and the interpreted kernel against the reference; every place that nobody wrote stays."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rope_write import HeadNorm, rope_write
from tests.kernels.attention.cases import quick
from tests.kernels.kv_cache.compare import assert_same_writes
from tests.kernels.rope_write.cases import CASES, Case, pages_and_q

ROUNDING = {"bfloat16": 2**-8, "float16": 2**-11}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_query_against_float64(case):
    args, options = case.arrays()
    _, q = pages_and_q(quick(functools.partial(rope_write, **options))(*args))
    # Rounded at the projection, behind the norm and behind the rotation.
    np.testing.assert_allclose(q, case.q_in_float64(args, options), rtol=0, atol=6 * 3 * ROUNDING[case.dtype])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted_kernel_is_the_reference(case):
    args, options = case.arrays()
    args = (args[0], args[1].astype(jnp.float32), *args[2:])
    options["dtype"] = jnp.dtype(jnp.float32)  # so that the reference rounds nowhere the kernel does not
    found, q = pages_and_q(quick(functools.partial(rope_write, implementation="interpret", **options))(*args))
    wanted, expected = pages_and_q(quick(functools.partial(rope_write, implementation="reference", **options))(*args))
    np.testing.assert_allclose(q, expected, rtol=1e-5, atol=1e-5)
    assert_same_writes(found, wanted, rtol=1e-2)


def test_bad_arguments_are_named():
    args, options = Case(has_bias=True).arrays()
    pages, qkv, layer, ids, offsets, cos, sin = args
    for bad, name in (
        ((pages, qkv[0], layer, ids, offsets, cos, sin), "qkv"),
        ((pages, qkv[:, :, :-64], layer, ids, offsets, cos, sin), "qkv"),
        ((pages, qkv, layer, ids, offsets[:-1], cos, sin), "page_offsets"),
        ((pages, qkv, layer, ids, offsets, cos[:-1], sin), "cos"),
        ((pages, qkv, layer, ids, offsets, cos, jnp.tile(sin, 2)), "sin"),
        ((pages, qkv, layer, ids, offsets, cos, sin[:, 1:]), "sin"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: shape"):
            rope_write(*bad, **options)
    with pytest.raises(ValueError, match=r"^bias: shape"):
        rope_write(*args, bias=options["bias"][:, 1:])
    with pytest.raises(ValueError, match=r"^norm\.k: shape \(2, 32\)"):
        rope_write(*args, norm=HeadNorm(jnp.ones((2, 64)), jnp.ones((2, 32)), 1e-5))
    with pytest.raises(ValueError, match="page_ids"):
        rope_write(pages, qkv, layer, ids + 9, offsets, cos, sin, debug=True)


def test_a_loop_over_layers_copies_no_pool():
    case = Case(rows=8, bits=(8, 8))
    (pages, qkv, _, *rest), options = case.arrays()
    pages = jax.tree.map(lambda x: jnp.concatenate([x] * 8, axis=1), pages)

    def run(pages):
        return jax.lax.fori_loop(0, 2, lambda i, p: rope_write(p, qkv, i, *rest, **options)[0], pages)

    memory = jax.jit(run, donate_argnums=0).lower(pages).compile().memory_analysis()
    pool = sum(x.nbytes for x in jax.tree.leaves(pages))
    assert memory.alias_size_in_bytes >= pool
    assert memory.temp_size_in_bytes < pool / 4
