"""AWQ, GPTQ and compressed-tensors integers: values by the layouts' equations."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoints import (
    AffineFormat,
    AffineTensor,
    ConfigError,
    DenseFormat,
    open_checkpoint,
)
from tests.checkpoints import layouts
from tests.checkpoints.layouts import BF16, folder, of
from tests.checkpoints.samples import AWQ, GPTQ, linear

property_test = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def value_of(codes, zero, scale, group):
    """(q - z) * s in float64: exact, and so is float32."""
    return (codes - np.broadcast_to(zero, scale.shape)[group]) * scale.astype(np.float64)[group]


def check_linear(path, tensors, config, want, form):
    checkpoint = open_checkpoint(folder(path / "m", of("a", tensors) | {"b.weight": np.ones((2, 2), BF16)}, config))
    assert set(checkpoint.tensors) == {"a.weight", "b.weight"}, "arrays of a linear are one tensor"
    assert checkpoint.tensors["b.weight"].format == DenseFormat("bfloat16"), "modules left out stay dense"
    info, tensor = checkpoint.tensors["a.weight"], checkpoint.read("a.weight")
    assert (info.shape, info.format) == (want.T.shape, form)
    assert info.num_bytes == sum(np.asarray(t).nbytes for t in tensors.values())
    assert isinstance(tensor, AffineTensor)
    checkpoint.check()
    tensor.check()
    found = AffineFormat(tensor.bits, tensor.group_size, tensor.offset is not None, tensor.perm is not None)
    assert found == form, "headers foretell the tensor"
    np.testing.assert_array_equal(tensor.dequantize(), want)


@property_test
@given(K=st.integers(1, 80), words=st.integers(1, 5), g=st.integers(1, 90), seed=st.integers(0, 99))
def test_awq(tmp_path, K, words, g, seed):
    codes, zero, scale = linear(K, 8 * words, g, 4, seed=seed, low_zero=0)
    want, form = value_of(codes, zero, scale, np.arange(K) // g), AffineFormat(4, min(g, K), True)
    check_linear(tmp_path, layouts.awq(codes, zero, scale), AWQ | {"group_size": g}, want, form)


@property_test
@given(
    bits=st.sampled_from([2, 3, 4, 8]), blocks=st.integers(1, 3), N=st.integers(1, 20), g=st.integers(1, 100),
    act_order=st.booleans(), version=st.sampled_from([1, 2]), seed=st.integers(0, 99),
)  # fmt: skip
def test_gptq(tmp_path, bits, blocks, N, g, act_order, version, seed):
    K = 32 * blocks
    codes, zero, scale = linear(K, N, g, bits, seed=seed)
    group = np.arange(K) // g
    if act_order:
        group = np.random.default_rng(seed).permutation(group)
    config = GPTQ | {"bits": bits, "group_size": g, "desc_act": act_order, "sym": False}
    config["checkpoint_format"] = "gptq" if version == 1 else "gptq_v2"
    tensors = layouts.gptq(codes, zero, scale, bits, group=group, version=version)
    has_perm = bool((np.diff(group) < 0).any())
    form = AffineFormat(8 if bits == 8 else 4, min(g, K), True, has_perm)
    check_linear(tmp_path, tensors, config, value_of(codes, zero, scale, group), form)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_symmetric_gptq_has_no_offsets(tmp_path, bits, caplog):
    codes, _, scale = linear(64, 16, 32, bits)
    zero, group = np.full(scale.shape, 2 ** (bits - 1)), np.arange(64) // 32
    config = GPTQ | {"bits": bits, "group_size": 32, "sym": True}
    tensors = layouts.gptq(codes, zero, scale, bits, group=group)
    form = AffineFormat(8 if bits == 8 else 4, 32, has_offset=bits == 3)
    want = value_of(codes, zero, scale, group)
    check_linear(tmp_path, tensors, config, want, form)
    assert ("1 linears of 3 bits are kept in codes of 4" in caplog.text) == (bits == 3)
    check_linear(tmp_path, {k: t for k, t in tensors.items() if k != "qzeros"}, config, want, form)


@property_test
@given(
    bits=st.sampled_from([2, 3, 4, 5, 8]), K=st.integers(1, 80), N=st.integers(1, 20), g=st.integers(1, 90),
    symmetric=st.booleans(), act_order=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_packed_integers(tmp_path, bits, K, N, g, symmetric, act_order, seed):
    codes, zero, scale = linear(K, N, g, bits, dtype=BF16, seed=seed, low_zero=0)
    zero = np.full(zero.shape, 2 ** (bits - 1)) if symmetric else zero
    group = np.arange(K) // g
    group = np.random.default_rng(seed).permutation(group) if act_order else group
    tensors = layouts.packed(codes, None if symmetric else zero, scale, bits, group=group if act_order else None)
    has_perm = bool((np.diff(group) < 0).any())
    form = AffineFormat(4 if bits <= 4 else 8, min(g, K), not symmetric or bits in (2, 3, 5), has_perm)
    check_linear(
        tmp_path, tensors, layouts.pack_config(bits, g, symmetric), value_of(codes, zero, scale, group), form
    )  # fmt: skip


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("strategy", "scales"), [("group", 3), ("channel", 1), ("tensor", 0)])
def test_eight_bit_integers_with_activations_in_16_bits(tmp_path, strategy, scales, symmetric):
    """W8A16: stored plainly as int8, kept in canonical codes."""
    K, N, g = 70, 12, 32 if scales == 3 else 70
    codes, zero, scale = linear(K, N, g, 8)
    zero = np.full(zero.shape, 128) if symmetric else zero
    if not scales:
        scale[:], zero[:] = scale[0, 0], zero[0, 0]
    part = (lambda a: a.T) if scales else (lambda a: a[0, :1])
    tensors = {"weight": (codes - 128).astype(np.int8).T, "weight_scale": part(scale)}
    if not symmetric:
        tensors["weight_zero_point"] = part((zero - 128).astype(np.int8))
    config = layouts.pack_config(8, 32 if scales == 3 else None, symmetric, strategy=strategy)
    config["format"] = "int-quantized"
    want = value_of(codes, zero, scale, np.arange(K) // g)
    check_linear(tmp_path, tensors, config, want, AffineFormat(8, g, not symmetric))


def test_activations_in_eight_bits_beside_four_bit_weights_stay_in_16(tmp_path, caplog):
    codes, _, scale = linear(64, 8, 32, 4)
    config = layouts.pack_config(4, 32, True, activations={"num_bits": 8, "type": "int", "dynamic": True})
    want = value_of(codes, 8, scale, np.arange(64) // 32)
    check_linear(tmp_path, layouts.packed(codes, None, scale, 4), config, want, AffineFormat(4, 32, False))
    assert "activations of 1 linears stay in 16 bits" in caplog.text


def test_e4m3_weights_alone_become_dense(tmp_path, caplog):
    codes = np.arange(-20, 20, dtype=np.float32).reshape(4, 10).astype(ml_dtypes.float8_e4m3fn)
    scale = np.array([[1], [2], [3], [4]], np.float32)
    config = layouts.pack_config(8, None, True, strategy="channel") | {"format": "float-quantized"}
    config["config_groups"]["group_0"]["weights"]["type"] = "float"
    checkpoint = open_checkpoint(folder(tmp_path / "m", {"a.weight": codes, "a.weight_scale": scale}, config))
    assert checkpoint.tensors["a.weight"].format == DenseFormat("float32")
    np.testing.assert_array_equal(checkpoint.read("a.weight"), codes.astype(np.float32) * scale)
    assert "1 linears of e4m3 weights alone become dense" in caplog.text


def test_groups_of_modules_have_schemes_of_their_own(tmp_path):
    four, eight = linear(64, 8, 32, 4), linear(64, 8, 16, 8)
    config = layouts.pack_config(4, 32, False)
    config["config_groups"]["group_1"] = layouts.pack_config(8, 16, False)["config_groups"]["group_0"]
    config["config_groups"]["group_1"]["targets"] = ["re:.*down_proj$"]
    tensors = of("l.0.up_proj", layouts.packed(*four, 4)) | of("l.0.down_proj", layouts.packed(*eight, 8))
    checkpoint = open_checkpoint(folder(tmp_path / "m", tensors, config))
    for part, (codes, zero, scale), g in (("up", four, 32), ("down", eight, 16)):
        want = value_of(codes, zero, scale, np.arange(64) // g)
        np.testing.assert_array_equal(checkpoint.read(f"l.0.{part}_proj.weight").dequantize(), want)
    for group in config["config_groups"].values():
        group["targets"] = ["re:nothing"]
    with pytest.raises(ConfigError, match=r"config\.json: tensor 'l\.0\.(up|down)_proj'.*no group"):
        open_checkpoint(folder(tmp_path / "m", tensors, config))


def test_gptq_settings_may_differ_by_module(tmp_path):
    group = np.arange(64) // 32
    four, eight = linear(64, 8, 32, 4), linear(64, 8, 64, 8)
    tensors = of("l.up", layouts.gptq(*four, 4, group=group)) | of("l.down", layouts.gptq(*eight, 8, group=group // 2))
    changes = {"-:.*head": {}, r"+:l\.down": {"bits": 8, "group_size": -1}}
    config = GPTQ | {"bits": 4, "group_size": 32, "sym": False, "dynamic": changes}
    checkpoint = open_checkpoint(folder(tmp_path / "m", tensors, config))
    for part, (codes, zero, scale), groups in (("up", four, group), ("down", eight, group // 2)):
        want = value_of(codes, zero, scale, groups)
        np.testing.assert_array_equal(checkpoint.read(f"l.{part}.weight").dequantize(), want)


QUANTISED = ("awq_gemm_g128", "awq_gemm_g64", "gptq_v1_sym", "gptq_v1_asym_actorder", "gptq_v2_asym", "gptq_8bit",
             "ct_w4_sym_g128", "ct_w4_asym_g128", "ct_w4_sym_g32", "ct_w4_asym_g32")  # fmt: skip


@pytest.mark.parametrize("case", QUANTISED)
def test_goldens_have_the_recorded_values(goldens, case):
    checkpoint, probe = open_checkpoint(goldens / case), np.load(goldens / case / "weights_probe.npz")
    checkpoint.check()
    quantised = {n for n, info in checkpoint.tensors.items() if isinstance(info.format, AffineFormat)}
    assert {key.rpartition(":")[0].removesuffix(".weight") + ".weight" for key in probe.files} == quantised
    for name in quantised:
        value, key = checkpoint.read(name).dequantize().T, name.removesuffix(".weight")
        key = key if f"{key}:corner" in probe.files else name
        np.testing.assert_allclose(value[:8, :8], probe[f"{key}:corner"], rtol=1e-3, atol=1e-4)
        x = np.cos(0.7 * np.arange(value.shape[1]) + 0.3)
        np.testing.assert_allclose(value @ x, probe[f"{key}:matvec"], atol=1e-4, rtol=0)
