"""The fused kernels between linears lower for CUDA, on a machine without a GPU, and are one kernel each."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.residual_norm import add_rms_norm
from pallas_kernels.rope_write import rope_write
from tests.kernels.attention.test_lowering import DEVICES, lower
from tests.kernels.rope_write.cases import CASES


@pytest.mark.parametrize("kind", DEVICES)
def test_rope_write_is_one_kernel(kind):
    for case in CASES:
        args, options = case.arrays()
        assert lower(kind, lambda *a, o=options: rope_write(*a, implementation="triton", **o)[1], *args) == 1


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("width", [576, 8192])
def test_add_rms_norm_is_one_kernel(kind, width):
    array = jax.ShapeDtypeStruct
    args = (array((256, width), jnp.bfloat16), array((4, 256, width), jnp.float32), array((32, width), jnp.float32),
            array((), jnp.int32))  # fmt: skip
    assert lower(kind, lambda *a: add_rms_norm(*a, eps=1e-5, implementation="triton"), *args) == 1
