"""Codes go to qwix and come back as they were, and mean there what they mean here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import AffineTensor, open_checkpoint
from turbojax import from_flax, from_params
from turbojax.errors import InteropError, MissingExtraError
from turbojax.integrations.qarray import from_qarray, to_qarray
from turbojax.models.model import load_model

qwix = pytest.importorskip("qwix")

K, N, GROUP = 64, 24, 16


def random_tensor(bits, kind, dtype, group_size=GROUP, seed=0):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 1 << bits, (K, N), dtype=np.uint8)
    scale = rng.uniform(0.01, 1, (K // group_size, N)).astype(dtype)
    zero = rng.integers(0, 1 << bits, scale.shape).astype(np.float32)
    offset = None if kind == "symmetric" else -(zero * scale)
    return AffineTensor(codes, scale, offset, bits, group_size)


@pytest.mark.parametrize("group_size", [GROUP, K])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("kind", "dtype"), [("symmetric", np.float16), ("symmetric", np.float32), ("zero", np.float32)]
)
def test_codes_come_back_as_they_were(bits, kind, dtype, group_size):
    tensor = random_tensor(bits, kind, dtype, group_size)
    array = to_qarray(tensor)
    assert isinstance(array, qwix.QArray)
    assert array.qvalue.dtype == {4: jnp.int4, 8: jnp.int8}[bits]
    again = from_qarray(array)
    assert (again.bits, again.group_size, again.scale.dtype) == (bits, group_size, dtype)
    np.testing.assert_array_equal(again.codes, tensor.codes)
    np.testing.assert_array_equal(again.scale, tensor.scale)
    assert (again.offset is None) == (kind == "symmetric")
    if kind == "zero":
        np.testing.assert_array_equal(again.offset, tensor.offset)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["symmetric", "zero"])
def test_qwix_reads_the_same_values(bits, kind):
    tensor = random_tensor(bits, kind, np.float32)
    want = tensor.dequantize()
    np.testing.assert_allclose(qwix.dequantize(to_qarray(tensor)), want, rtol=0, atol=1e-5 * abs(want).max())
    np.testing.assert_allclose(from_qarray(to_qarray(tensor)).dequantize(), want, rtol=0, atol=1e-5 * abs(want).max())


@pytest.mark.parametrize("how", [
    {"qtype": jnp.int4, "channelwise_axes": (1,), "tiled_axes": {0: 16}},
    {"qtype": jnp.int8, "channelwise_axes": (1,)},
    {"qtype": jnp.int8, "tiled_axes": {0: 32, 1: 8}},
    {"qtype": jnp.int4, "channelwise_axes": (1,), "tiled_axes": {0: 16}, "calibration_method": "minmax"},
    {"qtype": "int3", "channelwise_axes": (1,)},
    {"qtype": jnp.int8},
])  # fmt: skip
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_qwix_quantises_means_the_same_here(how, dtype):
    weight = jax.random.normal(jax.random.key(0), (K, N), dtype)
    array = qwix.quantize(weight, **how)
    want = qwix.dequantize(array.astype(jnp.float32))
    got = from_qarray(array).dequantize()
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * float(abs(want).max()))


def test_unsigned_codes_begin_at_zero():
    codes = np.arange(K * N, dtype=np.uint8).reshape(K, N)
    array = qwix.QArray(jnp.asarray(codes), jnp.full((1, N), 0.5), None)
    np.testing.assert_array_equal(from_qarray(array).dequantize(), 0.5 * codes)


def test_what_has_no_counterpart_is_refused():
    tensor = random_tensor(4, "zero", np.float32)
    with pytest.raises(InteropError, match="act-order"):
        to_qarray(AffineTensor(tensor.codes, tensor.scale, None, 4, GROUP, np.arange(K, dtype=np.int32)))
    with pytest.raises(InteropError, match="64 inputs are no multiple of 24"):
        to_qarray(AffineTensor(tensor.codes, tensor.scale[:3], None, 4, 24))
    with pytest.raises(InteropError, match="zero points"):
        to_qarray(AffineTensor(tensor.codes, tensor.scale, tensor.offset * np.float32(1.001), 4, GROUP))
    eight = qwix.quantize(jnp.ones((K, N)), jnp.float8_e4m3fn, channelwise_axes=(1,))
    with pytest.raises(InteropError, match="'kernel' is a QArray of float8_e4m3fn"):
        from_qarray(eight, "kernel")
    with pytest.raises(InteropError, match=r"QArray of int8 \[2, 3, 4\]"):
        from_qarray(qwix.quantize(jnp.ones((2, 3, 4)), jnp.int8))
    with pytest.raises(InteropError, match=r"'kernel': a scale or zero point \[5, 1\] does not divide"):
        from_qarray(qwix.QArray(jnp.ones((K, N), jnp.int8), jnp.ones((5, 1))), "kernel")


def test_qwix_is_asked_for_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "qwix", None)
    with pytest.raises(MissingExtraError, match=r"turbojax\[qwix\]"):
        to_qarray(random_tensor(4, "symmetric", np.float32))


def test_a_model_takes_qarrays_for_the_tensors_of_a_checkpoint(goldens):
    """Under Hugging Face names [N, K], and as kernels of flax [K, N]; nothing is quantised again."""
    checkpoint = open_checkpoint(goldens / "ct_w4_asym_g32")
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    arrays = {name: to_qarray(t) if isinstance(t, AffineTensor) else t for name, t in tensors.items()}
    assert any(isinstance(array, qwix.QArray) for array in arrays.values())
    want = load_model(goldens / "ct_w4_asym_g32")
    rename = lambda name, x: name.replace(".weight", ".kernel") if isinstance(x, qwix.QArray) else name
    kernels = {rename(name, x): x for name, x in arrays.items()}
    transposed = {name: x.T if isinstance(x, qwix.QArray) else x for name, x in arrays.items()}
    for model in (from_params(checkpoint.config, transposed), from_flax(checkpoint.config, kernels)):
        assert model.spec == want.spec
        jax.tree.map(np.testing.assert_array_equal, model.weights, want.weights)
