"""What is written reads back to the same codes, by readers made from the layouts' description, and by ours."""

import numpy as np
import pytest

from checkpoints import AffineTensor, Checkpoint, UnsupportedFormatError, open_checkpoint
from checkpoints.exporters import LAYOUTS, AffineScheme, EightBitScheme, export_folder, staged
from checkpoints.exporters.folder import check_layout
from checkpoints.tensors import AffineFormat, DenseFormat, EightBitFormat, LogicalTensor, TensorInfo
from tests.lite import readers
from turbojax.lite.eight_bit import rounded_blocks, rounded_channels
from turbojax.lite.gptq import GptqOptions, gptq
from turbojax.lite.grid import Grid, rounded

MODULE = "model.layers.0.mlp.down_proj"
READERS = {"awq": readers.awq, "gptq": readers.gptq, "gptq_v2": readers.gptq, "compressed-tensors": readers.compressed}
CASES = [
    ("awq", Grid(4, 64), False), ("awq", Grid(4, 32, symmetric=True), False),
    ("gptq", Grid(4, 64, min_zero=1), False), ("gptq", Grid(8, 32, symmetric=True), True),
    ("gptq_v2", Grid(4, 64), True), ("gptq_v2", Grid(8, 128), False),
    ("compressed-tensors", Grid(4, 64), False), ("compressed-tensors", Grid(4, 32, symmetric=True), False),
    ("compressed-tensors", Grid(8, 32), False),
]  # fmt: skip


def weights(N=24, K=200, seed=0):
    return np.random.default_rng(seed).standard_normal((N, K)).astype(np.float32)


def checkpoint_of(path, tensor, form):
    """One linear, an embedding and a head."""
    embed = np.ones((4, 8), np.float16)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    shape = tensor.shape[::-1] if isinstance(tensor, AffineTensor) else tensor.shape
    entries = [(f"{MODULE}.weight", shape, form, tensor)]
    entries += [
        (name, embed.shape, DenseFormat("float16"), embed) for name in ("model.embed_tokens.weight", "lm_head.weight")
    ]
    tensors = [LogicalTensor(TensorInfo(n, s, f, path, 0), lambda value=v: value) for n, s, f, v in entries]
    return Checkpoint(path, config, {"eos_token_id": 0}, tensors)


def affine_checkpoint(path, tensor):
    form = AffineFormat(tensor.bits, tensor.group_size, tensor.offset is not None, tensor.perm is not None)
    return checkpoint_of(path, tensor, form)


def write(tmp_path, checkpoint, layout, scheme, **options):
    with staged(tmp_path / "out") as folder:
        export_folder(checkpoint, LAYOUTS[layout], scheme, folder, **options)
    return tmp_path / "out"


@pytest.mark.parametrize(("layout", "grid", "act_order"), CASES, ids=str)
def test_grouped_codes_come_back(tmp_path, layout, grid, act_order):
    w = weights()
    if act_order:
        x = np.random.default_rng(1).standard_normal((400, w.shape[1])) * np.linspace(0.1, 2, w.shape[1])
        tensor = gptq(w, x.T @ x, grid, GptqOptions(act_order=True, static_groups=False))
        assert tensor.perm is not None
    else:
        tensor = rounded(w, grid)
    scheme = AffineScheme(grid.bits, grid.group_size, grid.symmetric, act_order=act_order)
    folder = write(tmp_path, affine_checkpoint(tmp_path, tensor), layout, scheme)
    arrays, config = readers.arrays_of(folder)
    assert config["quant_method"] == layout.removesuffix("_v2")
    codes, zeros, scale, groups = READERS[layout](arrays, MODULE, config)
    order = np.arange(w.shape[1]) if tensor.perm is None else tensor.perm
    np.testing.assert_array_equal(codes[order], tensor.codes)
    np.testing.assert_array_equal(groups[order], np.arange(w.shape[1]) // grid.group_size)
    np.testing.assert_allclose(readers.values(codes, zeros, scale, groups), tensor.dequantize(), rtol=1e-6, atol=1e-7)
    again = open_checkpoint(folder)
    assert again.config["quantization_config"] == config
    np.testing.assert_array_equal(again.read(f"{MODULE}.weight").dequantize(), tensor.dequantize())
    np.testing.assert_array_equal(again.read("lm_head.weight"), np.ones((4, 8)))
    assert "lm_head" in (config.get("ignore") or config.get("modules_to_not_convert"))


@pytest.mark.parametrize("layout", ["compressed-tensors", "smooth_quant"])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_eight_bit_codes_come_back(tmp_path, layout, dtype):
    w = weights()
    tensor = rounded_channels(w, dtype)
    checkpoint = checkpoint_of(tmp_path, tensor, EightBitFormat(dtype))
    folder = write(tmp_path, checkpoint, layout, EightBitScheme(dtype))
    arrays, _ = readers.arrays_of(folder)
    scale = arrays[f"{MODULE}.scale" if layout == "smooth_quant" else f"{MODULE}.weight_scale"]
    assert scale.shape == (len(w), 1)
    got = arrays[f"{MODULE}.weight"].astype(np.float64) * scale
    step = scale if dtype == "int8" else np.abs(w) / 8 + scale * 2**-9
    assert (np.abs(got - w) <= 0.501 * step).all()
    np.testing.assert_array_equal(open_checkpoint(folder).read(f"{MODULE}.weight").dequantize(), tensor.dequantize())


@pytest.mark.parametrize("shape", [(200, 300), (130, 100)])
def test_blocks_come_back(tmp_path, shape):
    w = weights(*shape)
    tensor = rounded_blocks(w)
    checkpoint = checkpoint_of(tmp_path, tensor, EightBitFormat("float8_e4m3fn", has_blocks=True))
    folder = write(tmp_path, checkpoint, "fp8", EightBitScheme("float8_e4m3fn", has_blocks=True))
    arrays, config = readers.arrays_of(folder)
    assert config["weight_block_size"] == [128, 128]
    codes, scale = arrays[f"{MODULE}.weight"].astype(np.float64), arrays[f"{MODULE}.weight_scale_inv"]
    assert scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = np.s_[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
            assert np.abs(codes[at]).max() == 448
            assert (np.abs(codes[at] * scale[i, j] - w[at]) <= np.abs(w[at]) / 15 + scale[i, j] * 2**-10).all()
    np.testing.assert_array_equal(open_checkpoint(folder).read(f"{MODULE}.weight").dequantize(), tensor.dequantize())


def test_shards_are_bounded_and_indexed(tmp_path):
    tensor, scheme = rounded(weights(), Grid(4, 64)), AffineScheme(4, 64, False)
    folder = write(tmp_path, affine_checkpoint(tmp_path, tensor), "awq", scheme, max_shard_bytes=100)
    assert sorted(p.name for p in folder.glob("*.safetensors")) == [
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    ]
    readers.arrays_of(folder)
    np.testing.assert_array_equal(open_checkpoint(folder).read(f"{MODULE}.weight").codes, tensor.codes)


@pytest.mark.parametrize(
    ("layout", "scheme", "shape", "reason"),
    [
        ("awq", AffineScheme(8, 64, False), (24, 200), "codes of 4 bits"),
        ("awq", AffineScheme(4, 64, False, act_order=True), (24, 200), "static groups"),
        ("awq", AffineScheme(4, 32, False, float_offset=True), (24, 200), "no float offsets"),
        ("awq", AffineScheme(4, 64, False), (20, 200), "8 outputs a word, and it has 20"),
        ("gptq", AffineScheme(4, 64, False), (24, 196), "8 inputs of 4 bits a word, and it has 196"),
        ("gptq", EightBitScheme("int8"), (24, 200), "groups alone"),
        ("compressed-tensors", AffineScheme(4, 32, False, float_offset=True), (24, 200), "no float offsets"),
        ("compressed-tensors", EightBitScheme("float8_e4m3fn", True), (24, 200), "written as 'fp8'"),
        ("compressed-tensors", AffineScheme(4, 64, False, act_order=True), (24, 200), "static groups"),
        ("smooth_quant", AffineScheme(4, 64, False), (24, 200), "eight-bit weights"),
        ("fp8", EightBitScheme("float8_e4m3fn"), (24, 200), "in blocks"),
    ],
)
def test_what_a_layout_cannot_hold_is_said_before_anything_is_computed(tmp_path, layout, scheme, shape, reason):
    name = f"{MODULE}.weight"
    info = TensorInfo(name, shape, DenseFormat("float16"), tmp_path / "model.safetensors", 0)
    checkpoint = Checkpoint(tmp_path, {}, {}, [LogicalTensor(info, lambda: None)])
    with pytest.raises(UnsupportedFormatError, match=reason) as caught:
        check_layout(checkpoint, LAYOUTS[layout], scheme, [name])
    assert (caught.value.tensor, caught.value.file.name) == (name, "model.safetensors")


def test_a_zero_point_of_zero_needs_version_2_of_gptq(tmp_path):
    tensor = rounded(np.abs(weights()), Grid(4, 64))
    with pytest.raises(UnsupportedFormatError, match=r"down_proj.weight.*zero point is 0"):
        write(tmp_path, affine_checkpoint(tmp_path, tensor), "gptq", AffineScheme(4, 64, False))
    assert list(tmp_path.iterdir()) == []
