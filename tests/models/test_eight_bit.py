"""Eight-bit linears from a checkpoint to the engine: fused without touching a code, each scale with its rows."""

import json
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints import UnsupportedFormatError
from pallas_kernels.eight_bit_linear import EightBitWeights
from tests.core.harness import all_logits, chunks, fresh
from turbojax.assembly import tree_bytes
from turbojax.core.linear import linear
from turbojax.models.abstract import abstract_weights
from turbojax.models.model import load_model
from turbojax.models.native import load_native_model, save_model
from turbojax.models.packing import pack_weights
from turbojax.models.planning import blocks_of_rows, fused
from turbojax.models.spec import Dense, EightBit, GroupedAffine, LinearSpec

PROMPT = np.arange(3, 33, dtype=np.int32)
D, F, VOCAB = 256, 384, 64
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "hidden_size": D, "intermediate_size": F,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
}  # fmt: skip
FORMATS = ("int8 channel", "e4m3 matrix", "e4m3 channel", "e4m3 blocks")
QUANTIZATION = {"quant_method": "fp8"}  # the stored dtypes and scales say the rest


def quantised(value, form):
    """Codes and scales of a [N, K] weight, by plain numpy, and the value that they stand for."""
    kind, _, covered = form.partition(" ")
    dtype, code_max = {"int8": (np.int8, 127), "e4m3": (ml_dtypes.float8_e4m3fn, 448)}[kind]
    wide = np.empty_like(value)
    rows, columns = {"matrix": value.shape, "channel": (1, value.shape[1]), "blocks": (128, 128)}[covered]
    for n in range(0, value.shape[0], rows):
        for k in range(0, value.shape[1], columns):
            part = np.s_[n : n + rows, k : k + columns]
            wide[part] = np.abs(value[part]).max() / code_max
    codes = value / wide
    codes = (np.rint(codes) if kind == "int8" else codes).astype(dtype)
    scale = wide[::rows, ::columns].reshape([1] if covered == "matrix" else [-(-value.shape[0] // rows), -1])
    return codes, scale, codes.astype(np.float32) * wide


def random_llama(head_dim=128):
    """Names, and float32 values of a small llama's tensors."""
    rng, q_dim, kv_dim = np.random.default_rng(0), 4 * head_dim, 2 * head_dim
    shapes = {
        "self_attn.q_proj": (q_dim, D), "self_attn.k_proj": (kv_dim, D), "self_attn.v_proj": (kv_dim, D),
        "self_attn.o_proj": (D, q_dim), "mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "mlp.down_proj": (D, F),
    }  # fmt: skip
    tensors = {"model.embed_tokens": rng.normal(size=(VOCAB, D)), "model.norm": np.ones(D)}
    tensors["lm_head"] = rng.normal(size=(VOCAB, D)) * 0.1
    for i in range(2):
        layer = f"model.layers.{i}."
        tensors |= {layer + name: rng.normal(size=shape) * 0.08 for name, shape in shapes.items()}
        tensors |= {layer + norm: np.ones(D) for norm in ("input_layernorm", "post_attention_layernorm")}
    return {name + ".weight": value.astype(np.float32) for name, value in tensors.items()}


def write(path, tensors, form_of, config=CONFIG):
    """A checkpoint with the weights that `form_of` names quantised, and beside it the dense one of their values."""
    stored, dense = {}, {}
    for name, value in tensors.items():
        stored[name] = dense[name] = value
        if form := form_of(name):
            stored[name], scale, dense[name] = quantised(value, form)
            stored[name.replace("weight", "weight_scale_inv" if form.endswith("blocks") else "weight_scale")] = scale
    for folder, arrays, more in ((path / "8", stored, {"quantization_config": QUANTIZATION}), (path / "16", dense, {})):
        folder.mkdir()
        save_file({name: np.ascontiguousarray(a) for name, a in arrays.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config | more))
    return load_model(path / "8", dtype="float32"), load_model(path / "16", dtype="float32")


def in_layers(form):
    return lambda name: form if "proj" in name else None


def values(model):
    """The model with the numbers that its eight-bit weights stand for, computed apart from their kernel."""

    def dense(w):
        if not isinstance(w, EightBitWeights):
            return w
        scale = np.asarray(w.scale)
        if w.has_blocks:
            scale = scale.repeat(128, 1)[:, : w.N].repeat(128, 2)[:, :, : w.K]
        return jnp.asarray(np.asarray(w.codes).astype(np.float32) * scale)

    is_leaf = lambda w: isinstance(w, EightBitWeights)
    return replace(model, weights=jax.tree.map(dense, model.weights, is_leaf=is_leaf))


def logits_of(model):
    state = fresh(model.spec, page_len=16)
    return np.asarray(all_logits(model.weights, state, chunks((0, PROMPT, 0, True), sink=2), 16)[1])


def num_linears(model):
    layer = model.spec.segments[0].layer
    return len(layer.qkv), len(layer.gate_up)


@pytest.mark.parametrize("form", FORMATS)
def test_fused_linears_keep_every_value(tmp_path, form):
    eight, dense = write(tmp_path, random_llama(), in_layers(form))
    assert num_linears(eight) == (1, 1), "head_dim and tiles of gate and up are whole blocks"
    w = eight.weights.segments[0].qkv[0].weight
    assert w.codes.dtype == (jnp.int8 if form.startswith("int8") else jnp.float8_e4m3fn), "codes stay codes"
    assert w.scale.shape == ((2, 8, 2) if form == "e4m3 blocks" else (2, 1024, 1))
    np.testing.assert_allclose(logits_of(values(eight)), logits_of(dense), atol=1e-4, rtol=0)
    error = logits_of(eight) - logits_of(dense)
    assert 1e-4 < np.sqrt(np.mean(error**2)) < (0.1 if form.startswith("int8") else 0.2), "x is quantised as well"


def test_blocks_that_would_mix_stay_apart(tmp_path):
    config = CONFIG | {"head_dim": 64}
    eight, dense = write(tmp_path, random_llama(head_dim=64), in_layers("e4m3 blocks"), config)
    assert num_linears(eight) == (3, 1)
    np.testing.assert_allclose(logits_of(values(eight)), logits_of(dense), atol=1e-4, rtol=0)


def test_modules_left_out_stay_dense_and_heads_may_be_codes(tmp_path):
    forms = {"k_proj": None, "down_proj": "int8 channel", "lm_head": "e4m3 blocks"}
    part = lambda name: name.split(".")[-2]
    form_of = lambda name: forms.get(part(name), "e4m3 matrix") if "proj" in name or "lm_head" in name else None
    eight, dense = write(tmp_path, random_llama(), form_of)
    layer = eight.spec.segments[0].layer
    e4m3 = EightBit("float8_e4m3fn")
    assert [p.storage for p in layer.qkv] == [e4m3, Dense(), e4m3]
    assert (layer.down.storage, eight.spec.head.storage) == (EightBit("int8"), EightBit("float8_e4m3fn", True))
    np.testing.assert_allclose(logits_of(values(eight)), logits_of(dense), atol=1e-4, rtol=0)
    packed = pack_weights(eight.weights)
    assert packed.head is eight.weights.head, "kernels read eight-bit codes as they are"
    assert packed.segments[0].o.weight is eight.weights.segments[0].o.weight


def fused_like_phi3(tensors):
    """The same model with its q, k and v in one tensor, its gate and up in another."""
    for i in range(2):
        layer = f"model.layers.{i}."
        for new, parts in (("self_attn.qkv_proj", ("q", "k", "v")), ("mlp.gate_up_proj", ("gate", "up"))):
            block = new.split(".")[0]
            rows = [tensors.pop(f"{layer}{block}.{p}_proj.weight") for p in parts]
            tensors[f"{layer}{new}.weight"] = np.concatenate(rows)
    return tensors


@pytest.mark.parametrize("form", ["int8 channel", "e4m3 matrix", "e4m3 blocks"])
def test_rows_of_a_fused_tensor_take_their_scales_along(tmp_path, form):
    config = CONFIG | {"architectures": ["Phi3ForCausalLM"]}
    eight, dense = write(tmp_path, fused_like_phi3(random_llama()), in_layers(form), config)
    assert num_linears(eight) == (1, 1)
    np.testing.assert_allclose(logits_of(values(eight)), logits_of(dense), atol=1e-4, rtol=0)


def test_a_fused_tensor_whose_parts_cut_blocks_apart(tmp_path):
    config = CONFIG | {"architectures": ["Phi3ForCausalLM"], "head_dim": 32}
    with pytest.raises(UnsupportedFormatError, match=r"layers\.0\.self_attn\.qkv_proj\.weight.*blocks.*part 'v'"):
        write(tmp_path, fused_like_phi3(random_llama(head_dim=32)), in_layers("e4m3 blocks"), config)


def test_blocks_of_rows():
    rows = lambda *starts: [r for start in starts for r in range(start, start + 128)]
    assert blocks_of_rows(rows(0, 128)) == (0, 1)
    assert blocks_of_rows(rows(512, 0, 256)[:300]) == (4, 0, 2), "the last may be cut off"
    assert blocks_of_rows(range(64, 192)) is None
    assert blocks_of_rows([*range(100), *range(128, 256)]) is None


def test_what_fuses():
    blocks = LinearSpec(256, 128, EightBit("float8_e4m3fn", has_blocks=True))
    assert fused([blocks, blocks], 128) == (replace(blocks, out_dim=256),)
    assert fused([blocks, blocks], 64) == (blocks, blocks)
    channels, other = replace(blocks, storage=EightBit("float8_e4m3fn")), replace(blocks, storage=EightBit("int8"))
    assert fused([channels, channels], 64) == (replace(channels, out_dim=256),)
    assert fused([channels, other], 64) == (channels, other)
    permuted = replace(blocks, storage=GroupedAffine(4, 128, has_perm=True))
    assert fused([permuted, permuted], 128) == (permuted, permuted)


@pytest.mark.parametrize("form", ["int8 channel", "e4m3 blocks"])
def test_the_abstract_tree_and_native_checkpoints(tmp_path, form):
    shapes = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), tree)
    eight, dense = write(tmp_path, random_llama(), in_layers(form))
    assert shapes(abstract_weights(eight.spec)) == shapes(eight.weights)
    num_codes = Counter(str(leaf.dtype) for leaf in jax.tree.leaves(eight.weights))
    assert num_codes["int8"] + num_codes["float8_e4m3fn"] == 4
    assert tree_bytes(eight.weights.segments) < 0.27 * tree_bytes(dense.weights.segments), "codes take a byte"
    shares = []
    load_model(tmp_path / "8", progress=shares.append)
    assert sum(shares) == pytest.approx(1)
    save_model(eight, tmp_path / "native")
    again = load_native_model(tmp_path / "native")
    assert (again.spec, hash(again.spec)) == (eight.spec, hash(eight.spec))
    jax.tree.map(np.testing.assert_array_equal, again.weights, eight.weights)


def test_a_linear_reads_its_layer_alone(tmp_path):
    """No temporary of the compiled CPU path is as large as the stack."""
    eight, _ = write(tmp_path, random_llama(), in_layers("e4m3 blocks"))
    w = eight.weights.segments[0].gate_up[0]
    stack = jax.tree.map(lambda a: jax.ShapeDtypeStruct((64, *a.shape[1:]), a.dtype), w)
    x, layer = jax.ShapeDtypeStruct((4, D), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    compiled = jax.jit(linear).lower(x, stack, layer).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * w.weight.K * w.weight.N
