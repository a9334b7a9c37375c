"""A two-layer model on disk with a byte tokenizer, small enough to quantise in a second, awkward in its shapes."""

import json

import numpy as np
from safetensors.numpy import save_file

from turbojax.lite.calibration import Calibration

VOCAB, EMBED, FFW, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 256, 96, 160, 6, 2, 16, 2
CALIBRATION = Calibration(calib_samples=8, calib_seqlen=32, batch_size=4)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": EMBED,
    "intermediate_size": FFW,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
FAMILIES = {
    "llama": {},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "phi3": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "sliding_window": 16,
    },
    "internlm2": {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": False},
}  # fmt: skip


def tiny_model(folder, family="llama", seed=0, with_tokenizer=True, **changes):
    """Writes the model; input channels differ in size, so that it matters which are rounded well."""
    config = CONFIG | FAMILIES[family] | changes
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    save_file(tensors_of(config, np.random.default_rng(seed)), folder / "model.safetensors")
    if with_tokenizer:
        byte_tokenizer().save(str(folder / "tokenizer.json"))
        kind = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    return folder


def byte_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def tensors_of(config, rng):
    from turbojax.models.families import architecture_of
    from turbojax.models.planning import bias_of

    arch, tensors = architecture_of(config), {}

    def random(*shape):
        columns = np.exp(rng.normal(0, 0.5, shape[-1]))
        return (rng.standard_normal(shape) * columns / shape[-1] ** 0.5).astype(np.float16)

    for part, source in arch.sources.items():
        for layer in range(arch.num_layers if "{i}" in source.name else 1):
            name = source.at(layer)
            if part in ("embedding", "head"):
                tensors[name] = random(arch.vocab_size, arch.embed_dim) * np.float16(4 if part == "embedding" else 1)
            elif part.endswith("norm"):
                width = arch.head_dim if part in ("q_norm", "k_norm") else arch.embed_dim
                tensors[name] = np.exp(rng.normal(0, 0.7, width)).astype(np.float16) - np.float16(arch.norm_offset)
            else:
                out_dim, in_dim = arch.out_dims[part], arch.in_dims.get(part, arch.embed_dim)
                num_rows = out_dim if source.rows is None else fused_rows(arch, name, layer)
                tensors.setdefault(name, random(num_rows, in_dim))
                if part in arch.biased:
                    tensors[bias_of(source).at(layer)] = (0.1 * rng.standard_normal(out_dim)).astype(np.float16)
    if arch.tied:
        del tensors[arch.sources["head"].name]
    return tensors


def fused_rows(arch, name, layer):
    return 1 + max(max(s.rows) for s in arch.sources.values() if s.rows is not None and s.at(layer) == name)
