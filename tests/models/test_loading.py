"""Models whose checkpoints arrange or store their tensors in other ways, and broken ones."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints import CheckpointError
from pallas_kernels.affine_linear import AffineWeights
from tests.core.harness import all_logits, chunks, fresh
from turbojax.core.weights import Linear
from turbojax.errors import ModelConfigError, TurbojaxError, UnknownArchitectureError
from turbojax.models.model import load_model, resolve_dtype
from turbojax.models.packing import pack_linear, pack_weights

PROMPT = np.arange(3, 43, dtype=np.int32)


def logits_of(model):
    state = fresh(model.spec, page_len=16)
    return np.asarray(all_logits(model.weights, state, chunks((0, PROMPT, 0, True), sink=2), 16)[1])


def test_internlm2_is_a_llama_renamed_and_interleaved(goldens, tmp_path):
    """A Llama golden under InternLM2's names with its q, k and v interleaved by kv head gives the same logits."""
    source = goldens / "llama_plain"
    config = json.loads((source / "config.json").read_text())
    heads, kv_heads, head_dim = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    tensors, renamed = load_file(source / "model.safetensors"), {}
    names = {
        "model.embed_tokens": "model.tok_embeddings", "lm_head": "output", "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
    }  # fmt: skip
    for name, tensor in tensors.items():
        if "q_proj" in name:
            q, k, v = (tensors[name.replace("q_proj", p + "_proj")] for p in "qkv")
            parts = [x.reshape(kv_heads, -1, head_dim, x.shape[1]) for x in (q, k, v)]
            fused = np.concatenate(parts, axis=1)
            assert fused.shape[1] == heads // kv_heads + 2
            renamed[name.replace("self_attn.q_proj", "attention.wqkv")] = fused.reshape(-1, q.shape[1])
        elif "k_proj" not in name and "v_proj" not in name:
            for old, new in names.items():
                name = name.replace(old, new)
            renamed[name] = tensor
    save_file(renamed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"architectures": ["InternLM2ForCausalLM"], "bias": False})
    )
    np.testing.assert_array_equal(logits_of(load_model(tmp_path)), logits_of(load_model(source)))


D, F, HEADS, KV_HEADS, VOCAB = 128, 160, 4, 2, 64
SHAPES = {
    "attn_q": (D, D), "attn_k": (D // 2, D), "attn_v": (D // 2, D), "attn_output": (D, D),
    "ffn_gate": (F, D), "ffn_up": (F, D), "ffn_down": (D, F),
}  # fmt: skip
KINDS = gguf.GGMLQuantizationType
MIXED = [  # kinds of (attn_q, attn_k, attn_v, attn_output, ffn_gate, ffn_up, ffn_down) in each layer
    [KINDS.Q4_1] * 7,
    [KINDS.Q4_1] * 7,
    [KINDS.F16] * 7,
    [KINDS.Q8_0, KINDS.F16, KINDS.Q4_0, KINDS.Q4_1, KINDS.Q8_0, KINDS.Q4_0, KINDS.F32],
]


def write_gguf(path, values, kinds):
    """A llama GGUF whose linears have the given kinds in each layer, and what those linears decode to."""
    writer, decoded = gguf.GGUFWriter(path, "llama"), {}
    writer.add_context_length(128)
    writer.add_embedding_length(D)
    writer.add_block_count(len(kinds))
    writer.add_feed_forward_length(F)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(D // HEADS)
    for name, value in values.items():
        kind = KINDS.F32
        if name.startswith("blk.") and "norm" not in name:
            _, layer, part, _ = name.split(".")
            kind = kinds[int(layer)][list(SHAPES).index(part)]
        data = gguf.quants.quantize(value, kind)
        decoded[name] = gguf.quants.dequantize(data, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return decoded


def random_llama(num_layers):
    rng = np.random.default_rng(0)
    values = {"token_embd.weight": rng.normal(size=(VOCAB, D)), "output_norm.weight": np.ones(D)}
    values["output.weight"] = rng.normal(size=(VOCAB, D)) * 0.1
    for i in range(num_layers):
        values |= {f"blk.{i}.{part}.weight": rng.normal(size=shape) * 0.08 for part, shape in SHAPES.items()}
        values |= {f"blk.{i}.{norm}.weight": np.ones(D) for norm in ("attn_norm", "ffn_norm")}
    return {name: value.astype(np.float32) for name, value in values.items()}


def test_a_checkpoint_of_mixed_formats_runs_in_segments(tmp_path):
    decoded = write_gguf(tmp_path / "mixed.gguf", random_llama(4), MIXED)
    write_gguf(tmp_path / "dense.gguf", decoded, [[KINDS.F32] * 7] * 4)
    mixed, dense = load_model(tmp_path / "mixed.gguf"), load_model(tmp_path / "dense.gguf")
    assert [s.num_layers for s in mixed.spec.segments] == [2, 1, 1]
    assert [s.num_layers for s in dense.spec.segments] == [4]
    last = mixed.spec.segments[2].layer
    stored = lambda parts: [getattr(p.storage, "bits", 16) for p in parts]
    assert stored(last.qkv) == [8, 16, 4], "parts of different formats stay apart"
    assert stored(last.gate_up) == [8, 4]
    assert mixed.weights.segments[0].down.weight.codes.dtype == np.uint8, "codes stay codes"
    np.testing.assert_allclose(logits_of(mixed), logits_of(dense), atol=2e-4, rtol=0)


def test_packed_weights_give_the_same_logits(tmp_path):
    """Codes of every format through the packed form's reference; a quantised embedding becomes a packed head too."""
    write_gguf(tmp_path / "mixed.gguf", random_llama(4), MIXED)
    model = load_model(tmp_path / "mixed.gguf")
    packed = replace(model, weights=pack_weights(load_model(tmp_path / "mixed.gguf", place=np.asarray).weights))
    last = packed.weights.segments[2]
    assert [type(part.weight).__name__ for part in last.gate_up] == ["PackedAffine"] * 2
    assert last.qkv[1].weight.dtype == np.float32, "dense parts stay"
    np.testing.assert_allclose(logits_of(packed), logits_of(model), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("factor", "kind", "dtype"), [(1.0, "zero", np.float16), (1 + 2**-20, "offset", np.float32)])
def test_zero_points_and_half_scales_are_found_again(factor, kind, dtype):
    """The loader widens a checkpoint's float16 parameters; packing sees through that, and keeps wider ones."""
    rng = np.random.default_rng(0)
    scale = rng.uniform(0.5, 2, (1, 64, 2)).astype(np.float16)
    offset = (-rng.integers(0, 16, scale.shape) * scale.astype(np.float32)).astype(np.float16)
    codes = rng.integers(0, 16, (1, 64, 256)).astype(np.uint8)
    wide = [(a.astype(np.float32) * np.float32(factor)) for a in (scale, offset)]
    packed = pack_linear(Linear(AffineWeights(codes, *wide, bits=4, group_size=128))).weight
    assert (packed.kind, packed.scale.dtype) == (kind, dtype)


def test_a_quantised_tied_embedding_gets_a_packed_head(smollm2):
    weights = load_model(smollm2, place=np.asarray).weights
    packed = pack_weights(weights)
    assert packed.embedding is weights.embedding
    assert (packed.head.weight.N, packed.head.weight.bits) == (weights.spec.vocab_size, 8)


def test_kv_precision_may_differ_by_layer(goldens):
    policy = lambda layer: [(16, 16), (8, 4)][layer]
    model = load_model(goldens / "llama_plain", kv_bits=policy)
    assert [(s.layer.k_bits, s.layer.v_bits) for s in model.spec.segments] == [(16, 16), (8, 4)]
    exact = logits_of(load_model(goldens / "llama_plain"))
    error = np.abs(logits_of(model) - exact).max()
    assert 1e-4 < error < 1.0, "V at 4 bits moves logits, but not far"


def test_every_dtype_loads_and_stays_near_float32(goldens):
    exact = logits_of(load_model(goldens / "llama_plain", dtype="float32"))
    for dtype, rms in (("bfloat16", 0.16), ("float16", 0.02)):
        model = load_model(goldens / "llama_plain", dtype=dtype)
        assert model.weights.segments[0].o.weight.dtype == dtype
        assert np.sqrt(np.mean((logits_of(model) - exact) ** 2)) < rms


def test_auto_dtype_is_float32_on_cpu():
    assert jax.default_backend() == "cpu"
    assert resolve_dtype("auto", {"dtype": "bfloat16"}) == "float32"
    with pytest.raises(ModelConfigError, match="int8"):
        resolve_dtype("int8", {})


def broken_cases():
    manifest = Path(__file__).parents[3] / "shared" / "goldens" / "manifest.json"
    if not manifest.is_file():
        return []
    return [c for c in json.loads(manifest.read_text())["cases"] if c["kind"] == "broken"]


@pytest.mark.parametrize("case", broken_cases(), ids=lambda c: c["name"])
def test_broken_checkpoints_say_what_is_wrong_in_one_line(goldens, case):
    with pytest.raises((CheckpointError, TurbojaxError)) as error:
        load_model(goldens / case["name"])
    message = str(error.value)
    assert "\n" not in message
    for name in case["message_should_name"]:
        assert name in message


def test_an_unknown_architecture_lists_the_known_ones(goldens, tmp_path):
    shutil.copytree(goldens / "llama_plain", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["MambaForCausalLM"]}))
    with pytest.raises(UnknownArchitectureError, match=r"MambaForCausalLM.*LlamaForCausalLM"):
        load_model(tmp_path / "model")


def test_bfloat16_to_float32_is_exact():
    from turbojax.models.loading import cast

    x = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    x = x[np.isfinite(x.astype(np.float32))]
    np.testing.assert_array_equal(cast(x, np.dtype(np.float32)), x.astype(np.float32))
