"""The kernels lower for CUDA on a machine without a GPU, and change the logits in place."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.sampling import sample_tokens
from pallas_kernels.sampling.api import kernel_sample
from pallas_kernels.sampling.tiles import SampleConfig
from tests.kernels.attention.test_lowering import DEVICES, lower
from tests.kernels.attention.test_lowering import on as on_device


def shapes(rows, vocab, num_forbidden):
    array = jax.ShapeDtypeStruct
    column = lambda dtype: array((rows,), dtype)
    settings = [column(dtype) for dtype in (jnp.float32, jnp.int32, jnp.float32, jnp.float32)]
    forbidden = [array((rows, num_forbidden), jnp.int32)] if num_forbidden else []
    return array((rows, vocab), jnp.float32), *settings, array((rows, 2), jnp.uint32), *forbidden


@pytest.mark.parametrize(
    ("kind", "rows", "vocab", "num_forbidden"),
    [(DEVICES[0], 1, 128256, 8), (DEVICES[1], 256, 151936, 0), (DEVICES[2], 7, 49153, 16), (DEVICES[3], 2, 30, 1)],
)
def test_two_kernels(kind, rows, vocab, num_forbidden):
    call = lambda *args: sample_tokens(*args, implementation="triton")
    assert lower(kind, call, *shapes(rows, vocab, num_forbidden)) == 2


def test_other_cuts_lower():
    for config in (SampleConfig(1024, 1, 1), SampleConfig(16384, 8, 32)):
        call = lambda *args, config=config: kernel_sample(*args, None, config, False)
        assert lower(DEVICES[2], call, *shapes(4, 128256, 0)) == 2


def test_logits_too_large_for_the_kernels_are_refused():
    with on_device(DEVICES[2]), pytest.raises(ValueError, match="logits of 2147483648 bytes"):
        jax.eval_shape(lambda *args: sample_tokens(*args, implementation="triton"), *shapes(4096, 1 << 17, 0))
