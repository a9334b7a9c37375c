"""On an NVIDIA GPU: the KV write against its reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_cache import empty_pages, write_kv
from tests.kernels.kv_cache.compare import assert_same_writes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("head_dim", [32, 80, 96, 128])
@pytest.mark.parametrize(("k_bits", "v_bits"), [(16, 8), (8, 4), (4, 16), (4, 4)])
def test_write(k_bits, v_bits, head_dim):
    pages = empty_pages(2, 9, 3, 16, head_dim, k_bits=k_bits, v_bits=v_bits, dtype=jnp.bfloat16)
    # Poisoned: a place left unwritten, or one written that should not be, differs from the reference's.
    pages = jax.tree.map(lambda x: jnp.full_like(x, 0xABCD if x.dtype == jnp.uint16 else 77.0), pages)
    rng = np.random.default_rng(0)
    k, v = (jnp.asarray(rng.standard_normal((100, 3, head_dim)), jnp.bfloat16) for _ in range(2))
    places = jnp.asarray(rng.permutation(8 * 16)[:100], jnp.int32)
    at = (jnp.int32(1), 1 + places // 16, places % 16)
    found = write_kv(pages, k, v, *at, implementation="triton")
    wanted = write_kv(pages, k, v, *at, implementation="reference")
    assert_same_writes(found, wanted)
    assert jax.tree.structure(found) == jax.tree.structure(pages)
