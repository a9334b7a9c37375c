"""On an NVIDIA GPU: the KV write against its reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_cache import empty_pages, write_kv

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("head_dim", [32, 80, 96, 128])
@pytest.mark.parametrize(("k_bits", "v_bits"), [(16, 8), (8, 4), (4, 16), (4, 4)])
def test_write(k_bits, v_bits, head_dim):
    pages = empty_pages(2, 9, 3, 16, head_dim, k_bits=k_bits, v_bits=v_bits, dtype=jnp.bfloat16)
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.standard_normal((100, 3, head_dim)), jnp.bfloat16) for _ in range(2))
    places = jnp.asarray(rng.permutation(8 * 16)[:100], jnp.int32)
    at = (jnp.int32(1), 1 + places // 16, places % 16)
    found = write_kv(pages, k, v, *at, implementation="triton")
    wanted = write_kv(pages, k, v, *at, implementation="reference")
    for name, bits in (("k", k_bits), ("v", v_bits)):
        got, want = np.asarray(getattr(found, name)), np.asarray(getattr(wanted, name))
        if bits == 16:
            np.testing.assert_array_equal(got, want)
            continue
        # Divisions round differently, so a code at the middle between two may fall to either side.
        codes = [
            np.stack([(x >> (bits * j)) & (2**bits - 1) for j in range(16 // bits)]).astype(int) for x in (got, want)
        ]
        assert np.abs(codes[0] - codes[1]).max() <= 1
        assert (codes[0] != codes[1]).mean() < 1e-3
        params = [np.asarray(getattr(x, name + "_params"), np.float32) for x in (found, wanted)]
        np.testing.assert_allclose(*params, rtol=1e-3, atol=1e-6)
    assert jax.tree.structure(found) == jax.tree.structure(pages)
