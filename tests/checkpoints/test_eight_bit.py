"""Folders with int8 and e4m3 weights: values by their formats' equations, and what cannot be honoured is refused."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints import (
    ConfigError,
    CorruptFileError,
    DenseFormat,
    EightBitFormat,
    EightBitTensor,
    MissingTensorError,
    ShapeMismatchError,
    UnsupportedFormatError,
    open_checkpoint,
)

E4M3, E5M2, E8M0, BF16 = (
    ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu, ml_dtypes.bfloat16,
)  # fmt: skip
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
BLOCKS = FP8 | {"weight_block_size": [128, 128]}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": INT8 | {"strategy": "channel", "dynamic": False},
            "input_activations": INT8 | {"strategy": "token", "dynamic": True},
            "output_activations": None,
        }
    },
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "sparsity_config": {},
    "transform_config": {},
}


def folder(path, tensors, quantization):
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    config = {"architectures": ["LlamaForCausalLM"], "quantization_config": quantization}
    (path / "config.json").write_text(json.dumps(config))
    return path


def codes_of(dtype, N, K):
    return np.random.default_rng(0).integers(-126, 127, (N, K)).astype(np.int8).astype(dtype)


CASES = {  # dtype of the codes, N, K, shape and dtype of the scale, its name, whether a scale covers a block
    "int8 channel": (np.int8, 70, 300, (70, 1), np.float32, "weight_scale", False),
    "int8 matrix": (np.int8, 70, 300, (1,), np.float32, "weight_scale", False),
    "e4m3 matrix": (E4M3, 70, 300, (), np.float32, "weight_scale", False),
    "e4m3 channel": (E4M3, 70, 300, (70,), BF16, "weight_scale", False),
    "e4m3 blocks": (E4M3, 1200, 300, (10, 3), np.float32, "weight_scale_inv", True),
    "e4m3 blocks, bfloat16 scales": (E4M3, 70, 300, (1, 3), BF16, "weight_scale_inv", True),
    "e4m3 blocks, powers of two": (E4M3, 256, 256, (2, 2), E8M0, "weight_scale_inv", True),
    "e4m3, one block along K": (E4M3, 200, 100, (2, 1), np.float32, "weight_scale_inv", True),
}


@pytest.mark.parametrize("case", CASES)
def test_values_are_codes_times_scales(tmp_path, case):
    dtype, N, K, scale_shape, scale_dtype, scale_name, has_blocks = CASES[case]
    codes = codes_of(dtype, N, K)
    scale = np.random.default_rng(1).uniform(0.5, 3, scale_shape).astype(scale_dtype)
    tensors = {"a.weight": codes, f"a.{scale_name}": scale, "a.bias": np.ones(N, np.float32)}
    checkpoint = open_checkpoint(folder(tmp_path / "m", tensors, W8A8 if dtype == np.int8 else FP8))
    info = checkpoint.tensors["a.weight"]
    assert (info.shape, info.num_bytes) == ((N, K), codes.nbytes + scale.nbytes)
    assert info.format == EightBitFormat(np.dtype(dtype).name, has_blocks)
    assert set(checkpoint.tensors) == {"a.weight", "a.bias"}, "scales belong to their weight"
    assert checkpoint.tensors["a.bias"].format == DenseFormat("float32")
    tensor, n, k = checkpoint.read("a.weight"), np.arange(N), np.arange(K)
    wide = scale.astype(np.float32)
    by_block = lambda: wide[n[:, None] // 128, k[None, :] // 128]
    want = by_block() if has_blocks else np.broadcast_to(wide.reshape(-1, 1), (N, K))
    np.testing.assert_array_equal(tensor.codes, codes)
    assert tensor.has_blocks == (has_blocks and K > 128), "one block along K is a scale a channel"
    np.testing.assert_array_equal(tensor.dequantize(), codes.astype(np.float32) * want)


@pytest.mark.parametrize(
    ("case", "has_blocks"),
    [("ct_w8a8_int8", False), ("fp8_block", True), ("fp8_tensor_ct", False), ("fp8_tensor_autofp8", False)],
)
def test_goldens_have_the_recorded_values(goldens, case, has_blocks):
    checkpoint, probe = open_checkpoint(goldens / case), np.load(goldens / case / "weights_probe.npz")
    quantised = {n for n, info in checkpoint.tensors.items() if isinstance(info.format, EightBitFormat)}
    assert {key.rpartition(":")[0].removesuffix(".weight") + ".weight" for key in probe.files} == quantised
    for name in quantised:
        value, key = checkpoint.read(name).dequantize(), name.removesuffix(".weight")
        key = key if f"{key}:corner" in probe.files else name
        np.testing.assert_array_equal(value[:8, :8], probe[f"{key}:corner"])
        x = np.cos(0.7 * np.arange(value.shape[1]) + 0.3)
        np.testing.assert_allclose(value @ x, probe[f"{key}:matvec"], atol=1e-4, rtol=0)
        assert checkpoint.tensors[name].format.has_blocks == has_blocks


def test_what_was_left_out_stays_dense_and_what_is_not_used_is_said(tmp_path, caplog):
    tensors = {
        "a.weight": codes_of(E4M3, 4, 8),
        "a.weight_scale": np.ones(1, np.float32),
        "a.input_scale": np.ones(1, np.float32),
        "lm_head.weight": np.ones((4, 8), BF16),
    }
    quantization = FP8 | {"activation_scheme": "static", "kv_cache_scheme": {"num_bits": 8}}
    checkpoint = open_checkpoint(folder(tmp_path / "m", tensors, quantization))
    assert set(checkpoint.tensors) == {"a.weight", "lm_head.weight"}
    assert checkpoint.tensors["lm_head.weight"].format == DenseFormat("bfloat16")
    assert "1 static activation scales are not used" in caplog.text
    assert "kv_cache_scheme is not used" in caplog.text


def test_a_dynamic_scheme_says_nothing(tmp_path, caplog):
    tensors = {"a.weight": codes_of(np.int8, 4, 8), "a.weight_scale": np.ones((4, 1), np.float32)}
    open_checkpoint(folder(tmp_path / "m", tensors, W8A8))
    assert not caplog.text


ONE = np.ones(1, np.float32)
BROKEN = {  # tensors of module "a"; the error, and what it names
    "no scale": ({"weight": codes_of(E4M3, 4, 8)}, MissingTensorError, r"m: tensor 'a\.weight_scale'"),
    "scale of another weight": (
        {"weight": codes_of(E4M3, 300, 300), "weight_scale_inv": np.ones((2, 3), np.float32)},
        ShapeMismatchError, r"'a\.weight_scale_inv'.*\[2, 3\].*\[300, 1\].*\[3, 3\]",
    ),
    "int8 in blocks": (
        {"weight": codes_of(np.int8, 256, 256), "weight_scale": np.ones((2, 2), np.float32)},
        ShapeMismatchError, r"'a\.weight_scale'.*\[2, 2\].*\[256, 1\]",
    ),
    "scale of numbers": (
        {"weight": np.ones((4, 8), BF16), "weight_scale": ONE}, UnsupportedFormatError, r"'a\.weight'.*bfloat16.*int8",
    ),
    "e5m2": (
        {"weight": np.ones((4, 8), E5M2), "weight_scale": ONE}, UnsupportedFormatError, r"'a\.weight'.*e5m2.*e4m3fn",
    ),
    "stacked experts": (
        {"weight": np.ones((2, 4, 8), E4M3), "weight_scale": ONE}, UnsupportedFormatError, r"\[2, 4, 8\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_weights_and_scales_that_do_not_belong_together(tmp_path, case):
    tensors, error, names = BROKEN[case]
    with pytest.raises(error, match=names):
        open_checkpoint(folder(tmp_path / "m", {f"a.{name}": t for name, t in tensors.items()}, FP8))


def test_a_scale_that_is_not_finite(tmp_path):
    tensors = {"a.weight": codes_of(np.int8, 4, 8), "a.weight_scale": np.array([[1], [np.nan], [1], [1]], np.float32)}
    checkpoint = open_checkpoint(folder(tmp_path / "m", tensors, W8A8))
    with pytest.raises(CorruptFileError, match=r"model\.safetensors: tensor 'a\.weight_scale'.*not finite"):
        checkpoint.check()


def changed(config, field, value):
    """The config with one nested field replaced; a dotted path."""
    key, _, rest = field.partition(".")
    return config | {key: changed(config[key], rest, value) if rest else value}


GROUP, FLOAT = "config_groups.group_0", {"num_bits": 8, "type": "float"}
REFUSED = [  # config, field, value, and what of it cannot be honoured
    ({"quant_method": "smooth_quant"}, "quant_dtype", "float8_e5m2", "quant_dtype is 'float8_e5m2'.*'int8'"),
    (BLOCKS, "weight_block_size", [64, 64], r"weight_block_size is \[64, 64\].*\[128, 128\]"),
    (BLOCKS, "fmt", "e5m2", "fmt is 'e5m2'.*'e4m3'"),
    (BLOCKS, "activation_scheme", "none", "activation_scheme is 'none'"),
    (W8A8, "format", "marlin-24", "config_groups.group_0.format is 'marlin-24'.*int-quantized"),
    (W8A8, "transform_config", {"config_groups": {"R1": {}}}, "transform_config is"),
    (W8A8, "sparsity_config", {"format": "sparse-24-bitmask"}, "sparsity_config is"),
    (W8A8, f"{GROUP}.weights.num_bits", 4, "weights.num_bits is 4"),
    (W8A8, f"{GROUP}.weights", FLOAT | {"strategy": "group"}, "weights.strategy is 'group'"),
    (W8A8, f"{GROUP}.weights", FLOAT | {"symmetric": False}, "weights.symmetric is False"),
    (W8A8, f"{GROUP}.weights", None, "weights is None.*quantised weights"),
    (W8A8, f"{GROUP}.weights.strategy", "block", "weights.strategy is 'block'"),
    (W8A8, f"{GROUP}.weights", FLOAT | {"strategy": "block", "block_structure": [64, 64]}, "block_structure is"),
    (W8A8, f"{GROUP}.input_activations.symmetric", False, "input_activations.symmetric is False"),
    (W8A8, f"{GROUP}.input_activations.type", "float", "input_activations.type is 'float'.*'int'"),
    (W8A8, f"{GROUP}.input_activations.strategy", "group", "input_activations.strategy is 'group'"),
    (W8A8, f"{GROUP}.input_activations.dynamic", "local", "input_activations.dynamic is 'local'"),
    (W8A8, f"{GROUP}.output_activations", INT8, "output_activations is"),
]


@pytest.mark.parametrize(("config", "field", "value", "names"), REFUSED)
def test_schemes_that_cannot_be_honoured(tmp_path, config, field, value, names):
    with pytest.raises(UnsupportedFormatError, match=rf"config\.json: quantization_config: .*{names}"):
        open_checkpoint(folder(tmp_path / "m", {"a.weight": np.ones((4, 8), BF16)}, changed(config, field, value)))


@pytest.mark.parametrize(("field", "value"), [("config_groups", {}), (GROUP, 3), (f"{GROUP}.weights", "int8")])
def test_configs_that_are_none(tmp_path, field, value):
    with pytest.raises(ConfigError, match=r"config\.json: quantization_config: config_groups"):
        open_checkpoint(folder(tmp_path / "m", {"a.weight": np.ones((4, 8), BF16)}, changed(W8A8, field, value)))


def test_compressed_tensors_blocks_and_groups_of_activations(tmp_path):
    group = {
        "weights": FLOAT | {"strategy": "block", "block_structure": [128, 128]},
        "input_activations": FLOAT | {"strategy": "group", "group_size": 128, "dynamic": True},
    }
    config = W8A8 | {"format": "float-quantized", "config_groups": {"group_0": group}}
    tensors = {"a.weight": codes_of(E4M3, 256, 300), "a.weight_scale": np.ones((2, 3), BF16)}
    assert open_checkpoint(folder(tmp_path / "m", tensors, config)).read("a.weight").has_blocks


@pytest.mark.parametrize("dtype", [np.int8, E4M3])
def test_smooth_quant_calls_its_scale_another_name(tmp_path, dtype):
    config = {"quant_method": "smooth_quant", "quant_dtype": "int8" if dtype == np.int8 else "float8_e4m3fn"}
    tensors = {"a.weight": codes_of(dtype, 4, 8), "a.scale": np.arange(1, 5, dtype=np.float32)[:, None]}
    checkpoint = open_checkpoint(folder(tmp_path / "m", tensors, config))
    assert set(checkpoint.tensors) == {"a.weight"}
    want = tensors["a.weight"].astype(np.float32) * tensors["a.scale"]
    np.testing.assert_array_equal(checkpoint.read("a.weight").dequantize(), want)


@pytest.mark.parametrize(
    ("codes", "scale", "names"),
    [
        (np.zeros((4, 8), np.uint8), np.ones((4, 1), np.float32), "codes must be int8 or float8_e4m3fn"),
        (np.zeros(4, np.int8), np.ones((4, 1), np.float32), "codes must be"),
        (np.zeros((4, 8), np.int8), np.ones((4, 1), np.float16), r"scale must be float32 \[4, 1\], got float16"),
        (np.zeros((4, 300), np.int8), np.ones((1, 3), np.float32), r"scale must be float32 \[4, 1\]"),
        (
            np.zeros((4, 300), E4M3),
            np.ones((1, 2), np.float32),
            r"scale must be float32 \[1, 3\], got float32 \[1, 2\]",
        ),
    ],
)
def test_a_tensor_holds_its_invariants(codes, scale, names):
    with pytest.raises(ValueError, match=names):
        EightBitTensor(codes, scale)
