"""On an NVIDIA GPU: the kernel against the reference, as models call it."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rope_write import rope_write
from tests.kernels.kv_cache.compare import assert_same_writes
from tests.kernels.rope_write.cases import CASES, Case, pages_and_q

pytestmark = pytest.mark.gpu

LARGE = [
    Case(rows=120, kv_heads=8, group=4, head_dim=128, rotary=128, splits=splits, bits=bits)
    for splits, bits in ((1, (16, 16)), (4, (8, 8)), (2, (4, 4)))
]


@pytest.mark.parametrize("case", CASES + LARGE, ids=str)
def test_kernel_is_the_reference(case):
    args, options = case.arrays()
    args = (args[0], args[1].astype(jnp.float32), *args[2:])
    options["dtype"] = jnp.dtype(jnp.float32)
    found, q = pages_and_q(rope_write(*args, implementation="triton", **options))
    wanted, expected = pages_and_q(rope_write(*args, implementation="reference", **options))
    np.testing.assert_allclose(q, expected, rtol=1e-5, atol=1e-5)
    assert_same_writes(found, wanted, rtol=1e-2)
    again, repeated = pages_and_q(rope_write(*args, implementation="triton", **options))
    np.testing.assert_array_equal(q, repeated)
    np.testing.assert_array_equal(np.asarray(found.k), np.asarray(again.k))
