"""Quantised folders to Weights: modules left out, fused projections in the file, parts of different formats."""

import jax
import numpy as np
import pytest

from pallas_kernels.affine_linear import AffineWeights, PackedAffine, unpack
from tests.checkpoints import layouts
from tests.checkpoints.layouts import folder, of
from turbojax.models.model import load_model
from turbojax.models.spec import Dense, GroupedAffine

D, F, HEADS, KV_HEADS, HEAD_DIM, VOCAB, GROUP = 64, 96, 4, 2, 16, 32, 32
CONFIG = {
    "vocab_size": VOCAB, "hidden_size": D, "intermediate_size": F, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "rope_theta": 1e4, "pad_token_id": 0,
}  # fmt: skip
AWQ = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": GROUP}
SIZES = {  # K and N
    "self_attn.q_proj": (D, HEADS * HEAD_DIM), "self_attn.k_proj": (D, KV_HEADS * HEAD_DIM),
    "self_attn.v_proj": (D, KV_HEADS * HEAD_DIM), "self_attn.o_proj": (HEADS * HEAD_DIM, D),
    "mlp.gate_proj": (D, F), "mlp.up_proj": (D, F), "mlp.down_proj": (F, D),
}  # fmt: skip


def arrays_of(layer, name):
    """Codes, zero points and scales of one linear."""
    (K, N), rng = SIZES[name], np.random.default_rng(10 * layer + list(SIZES).index(name))
    scale = rng.uniform(0.5, 2, (-(-K // GROUP), N)).astype(np.float16)
    return rng.integers(0, 16, (K, N)), rng.integers(0, 16, scale.shape), scale


def value_of(arrays):
    codes, zero, scale = arrays
    group = np.arange(len(codes)) // GROUP
    return ((codes - zero[group]) * scale.astype(np.float32)[group]).T


def model_tensors(linears):
    """The tensors of a model; linears(layer) gives those of a layer's linears by module."""
    rng = np.random.default_rng(99)
    table = lambda: rng.normal(size=(VOCAB, D)).astype(np.float16)
    norms = {"input_layernorm": np.ones(D, np.float16), "post_attention_layernorm": np.ones(D, np.float16)}
    tensors = {"model.embed_tokens.weight": table(), "lm_head.weight": table()}
    tensors["model.norm.weight"] = np.ones(D, np.float16)
    for i in range(2):
        layer = f"model.layers.{i}"
        tensors |= {f"{layer}.{name}.weight": norm for name, norm in norms.items()}
        for module, arrays in linears(i).items():
            tensors |= of(f"{layer}.{module}", arrays)
    return tensors


def apart(layer):
    return {name: layouts.awq(*arrays_of(layer, name)) for name in SIZES}


def fused(layer):
    """As Phi-3 stores them: q, k and v in one linear, gate and up in another."""
    joined = {"self_attn.qkv_proj": ("q", "k", "v"), "mlp.gate_up_proj": ("gate", "up")}
    found = {name: layouts.awq(*arrays_of(layer, name)) for name in ("self_attn.o_proj", "mlp.down_proj")}
    for name, parts in joined.items():
        block = name.split(".")[0]
        columns = zip(*(arrays_of(layer, f"{block}.{part}_proj") for part in parts), strict=True)
        found[name] = layouts.awq(*(np.concatenate(arrays, axis=1) for arrays in columns))
    return found


@pytest.mark.parametrize("pack", [False, True])
def test_a_fused_tensor_gives_the_weights_of_its_parts(tmp_path, pack):
    names = {"LlamaForCausalLM": apart, "Phi3ForCausalLM": fused}
    models = [
        load_model(folder(tmp_path / name, model_tensors(linears), AWQ, CONFIG | {"architectures": [name]}), pack=pack)
        for name, linears in names.items()
    ]
    layers = [model.weights.segments[0] for model in models]
    assert isinstance(layers[0].qkv[0].weight, PackedAffine if pack else AffineWeights)
    jax.tree.map(np.testing.assert_array_equal, *layers)


@pytest.mark.parametrize("pack", [False, True])
def test_parts_that_were_left_out_stay_dense_linears_of_their_own(tmp_path, pack):
    """k_proj everywhere and gate_proj of the last layer; the others keep their codes."""
    is_dense = lambda layer, name: "k_proj" in name or (layer == 1 and "gate" in name)

    def linears(layer):
        return apart(layer) | {
            name: {"weight": value_of(arrays_of(layer, name))} for name in SIZES if is_dense(layer, name)
        }

    config = CONFIG | {"architectures": ["LlamaForCausalLM"]}
    quantization = AWQ | {"modules_to_not_convert": ["k_proj", "layers.1.mlp.gate_proj"]}
    path = folder(tmp_path / "m", model_tensors(linears), quantization, config)
    model = load_model(path, dtype="float32", pack=pack)
    affine = GroupedAffine(4, GROUP, has_offset=True)
    first, last = (segment.layer for segment in model.spec.segments)
    assert [part.storage for part in first.qkv] == [affine, Dense(), affine]
    assert [len(first.gate_up), *(part.storage for part in last.gate_up)] == [1, Dense(), affine]
    for i, segment in enumerate(model.weights.segments):
        for name, w in zip("qkv", segment.qkv, strict=True):
            np.testing.assert_array_equal(dense(w.weight), value_of(arrays_of(i, f"self_attn.{name}_proj")))


def dense(w):
    """The values of one layer's linear, [N, K]."""
    if isinstance(w, PackedAffine):
        w = unpack(w)
    if not isinstance(w, AffineWeights):
        return np.asarray(w[0])
    scale, offset = (np.asarray(a[0], np.float32).repeat(GROUP, axis=1)[:, : w.K] for a in (w.scale, w.offset))
    return np.asarray(w.codes[0]) * scale + offset
