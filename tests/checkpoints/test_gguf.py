"""GGUF tensors against the gguf package's own dequantiser, metadata against HF configs, and files cut short."""

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoints import AffineTensor, CheckpointError, UnsupportedFormatError, open_checkpoint
from turbojax.models.rope_config import rope_from_config

KINDS = gguf.GGMLQuantizationType
HEADS, KV_HEADS, D = 4, 2, 512
KEEPS_CODES = {  # bits, and whether there is an offset
    KINDS.Q4_0: (4, False), KINDS.Q4_1: (4, True), KINDS.Q8_0: (8, False), KINDS.Q4_K: (4, True),
    KINDS.Q5_0: (8, True), KINDS.Q5_1: (8, True), KINDS.Q5_K: (8, True),
}  # fmt: skip
DENSE = [KINDS.F32, KINDS.F16, KINDS.BF16]
DEQUANTISED = [KINDS.Q6_K, KINDS.Q3_K, KINDS.Q2_K, KINDS.IQ4_NL, KINDS.IQ4_XS]


def blocks(kind, shape, rng):
    """Data of a kind: quantised where the package can, else random blocks with sane float16 scales."""
    values = rng.normal(size=shape).astype(np.float32)
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        block_len, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        data = rng.integers(0, 256, (shape[0], shape[1] // block_len * block_bytes), dtype=np.uint8)
        # Any byte pattern is a block, except that random float16 scales may be infinite: clear their top exponent bit.
        words = data.reshape(-1, block_bytes)
        for at in {
            KINDS.Q4_K: (1, 3),
            KINDS.Q5_K: (1, 3),
            KINDS.Q6_K: (209,),
            KINDS.Q3_K: (109,),
            KINDS.Q2_K: (81, 83),
            KINDS.IQ4_NL: (1,),
            KINDS.IQ4_XS: (1,),
        }[kind]:
            words[:, at] &= 0xBF
        return data


def write(path, tensors, architecture="llama", extra=()):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(D)
    writer.add_block_count(1)
    writer.add_feed_forward_length(D)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(32)
    for method, *args in extra:
        getattr(writer, method)(*args)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", [*KEEPS_CODES, *DENSE, *DEQUANTISED], ids=lambda k: k.name)
def test_values_equal_the_packages_dequantiser(tmp_path, kind, caplog):
    data = blocks(kind, (96, D), np.random.default_rng(0))
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", {"blk.0.ffn_up.weight": (data, kind)}))
    assert (f"no kernel takes codes of {kind.name}: " in caplog.text) == (kind in DEQUANTISED)
    name = "model.layers.0.mlp.up_proj.weight"
    assert checkpoint.tensors[name].shape == (96, D)
    value, want = checkpoint.read(name), gguf.quants.dequantize(data, kind)
    if kind in KEEPS_CODES:
        bits, has_offset = KEEPS_CODES[kind]
        assert isinstance(value, AffineTensor)
        value.check()
        assert (value.bits, value.group_size, value.offset is not None) == (bits, 32, has_offset)
        form = checkpoint.tensors[name].format
        assert (form.bits, form.group_size, form.has_offset) == (bits, 32, has_offset)
        value = value.dequantize().T
    np.testing.assert_allclose(np.asarray(value, np.float32), want, rtol=1e-6, atol=1e-6 * np.abs(want).max())


def test_one_warning_names_what_becomes_dense_and_what_it_takes(tmp_path, caplog):
    rng = np.random.default_rng(0)
    tensors = {
        f"blk.{layer}.ffn_{name}.weight": (blocks(kind, (96, D), rng), kind)
        for layer, name, kind in [(0, "down", KINDS.Q6_K), (1, "up", KINDS.Q4_K), (1, "down", KINDS.Q6_K)]
    }
    tensors["output.weight"] = (blocks(KINDS.Q3_K, (32, D), rng), KINDS.Q3_K)
    open_checkpoint(write(tmp_path / "m.gguf", tensors))
    [record] = [r for r in caplog.records if r.name.startswith("checkpoints")]
    in_file = (2 * 96 * D * 210 / 256 + 32 * D * 110 / 256) / 1e6
    in_memory = (2 * 96 + 32) * D * 2 / 1e6
    assert record.getMessage().endswith(
        f"3 tensors become dense, since no kernel takes codes of Q3_K, Q6_K: {in_file:.1f} MB in the file, "
        f"{in_memory:.1f} MB in 16 bits (blk.0,1.ffn_down.weight, output.weight)"
    )


@pytest.mark.parametrize(("name", "heads"), [("q", HEADS), ("k", KV_HEADS), ("v", 0)])
@pytest.mark.parametrize("kind", [KINDS.F32, KINDS.Q4_1], ids=lambda k: k.name)
def test_llama_q_and_k_rows_are_unpermuted(tmp_path, name, heads, kind):
    """The converter stores row (h, i, half) where transformers has (h, half, i)."""
    rows, rng = 64, np.random.default_rng(0)
    hf = gguf.quants.quantize(rng.normal(size=(rows, D)).astype(np.float32), kind)
    stored = hf
    if heads:
        stored = np.ascontiguousarray(hf.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2)).reshape(hf.shape)
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", {f"blk.0.attn_{name}.weight": (stored, kind)}))
    value = checkpoint.read(f"model.layers.0.self_attn.{name}_proj.weight")
    value = value.dequantize().T if isinstance(value, AffineTensor) else value
    np.testing.assert_allclose(value, gguf.quants.dequantize(hf, kind), rtol=1e-6)


def test_metadata_becomes_a_hugging_face_config(tmp_path):
    extra = [("add_rope_freq_base", 5e5), ("add_key_length", 128)]
    tensors = {"token_embd.weight": (np.zeros((32, D), np.float32), KINDS.F32)}
    config = open_checkpoint(write(tmp_path / "m.gguf", tensors, extra=extra)).config
    wanted = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": D, "intermediate_size": D, "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": 128, "vocab_size": 32,
        "max_position_embeddings": 64, "tie_word_embeddings": True,
    }  # fmt: skip
    assert {key: config[key] for key in wanted} == wanted
    assert rope_from_config(config, 128).theta == 5e5


def test_a_sliding_window_makes_a_mistral(tmp_path):
    tensors = {"token_embd.weight": (np.zeros((32, D), np.float32), KINDS.F32)}
    config = open_checkpoint(write(tmp_path / "m.gguf", tensors, extra=[("add_sliding_window", 16)])).config
    assert (config["architectures"], config["sliding_window"]) == (["MistralForCausalLM"], 16)


def test_unknown_architectures_and_tensors_are_named(tmp_path):
    with pytest.raises(UnsupportedFormatError, match=r"m\.gguf.*'mamba'.*supported: .*llama"):
        open_checkpoint(write(tmp_path / "m.gguf", {}, architecture="mamba"))
    tensors = {"blk.0.ffn_gate_exps.weight": (np.zeros((4, D), np.float32), KINDS.F32)}
    with pytest.raises(UnsupportedFormatError, match="ffn_gate_exps"):
        open_checkpoint(write(tmp_path / "n.gguf", tensors))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    rng = np.random.default_rng(0)
    return write(
        path, {f"blk.0.{n}.weight": (blocks(KINDS.Q4_1, (32, D), rng), KINDS.Q4_1) for n in ("ffn_up", "ffn_gate")}
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_refused_before_it_is_read(whole, tmp_path, share):
    data = whole.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(CheckpointError, match=r"cut\.gguf") as error:
        open_checkpoint(path)
    assert "\n" not in str(error.value)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 400), value=st.integers(0, 255))
def test_a_damaged_header_gives_a_typed_error_or_reads(whole, tmp_path, at, value):
    data = bytearray(whole.read_bytes())
    data[at] = value
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    try:
        open_checkpoint(path)
        message = path.name
    except CheckpointError as error:
        message = str(error)
    assert path.name in message


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ([("add_string", "split.count", "two")], "split.count is 'two'"),
        ([("add_rope_scaling_type", gguf.RopeScalingType.YARN), ("add_rope_scaling_factor", 0.0),
          ("add_rope_scaling_orig_ctx_len", 32)], "factor is 0.0"),
    ],
    ids=["split count", "yarn factor"],
)  # fmt: skip
def test_keys_of_a_wrong_kind_or_value_are_named(tmp_path, extra, says):
    tensors = {"token_embd.weight": (np.zeros((32, D), np.float32), KINDS.F32)}
    with pytest.raises(CheckpointError, match=rf"m\.gguf.*{says}"):
        open_checkpoint(write(tmp_path / "m.gguf", tensors, extra=extra))
