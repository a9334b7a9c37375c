"""GGUF metadata to a Hugging Face style config.json and generation_config.json."""

from __future__ import annotations

from typing import Any

import numpy as np

from checkpoints.errors import ConfigError, UnsupportedFormatError
from checkpoints.gguf_file import GgufFile
from checkpoints.gguf_names import ARCHITECTURES
from checkpoints.gguf_rope import rope_config

_HF_CLASSES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
}
# Control tokens that end an assistant's turn, where the file names fewer ends than the model uses.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|eom_id|>")
_CONTROL = 3
_GEMMA2_27B_LAYERS = 46


class Metadata:
    """The keys of one architecture, with errors that name file and key."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        architecture = file.metadata.get("general.architecture")
        if architecture not in ARCHITECTURES:
            reason = f"architecture {architecture!r} is not supported"
            raise UnsupportedFormatError(file.path, reason, hint=f"supported: {', '.join(ARCHITECTURES)}")
        self.architecture: str = architecture

    def get(self, key: str, default: Any = None) -> Any:
        """`{architecture}.key`; an array with one value for each layer must have them all equal."""
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, np.ndarray):
            if np.unique(value).size != 1:
                hint = "models whose layers differ in size are not supported"
                raise UnsupportedFormatError(self.file.path, f"{key!r} varies by layer", hint=hint)
            return value[0].item()
        return value

    def number(self, key: str, default: int | float | None = None) -> Any:
        """A number that must be there unless there is a default."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            reason = f"metadata key '{self.architecture}.{key}' is {value!r}, a number is expected"
            raise ConfigError(self.file.path, reason, hint="convert the model again")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A positive whole number."""
        value = self.number(key, default)
        if not isinstance(value, int) or value <= 0:
            reason = f"metadata key '{self.architecture}.{key}' is {value!r}, a positive size is expected"
            raise ConfigError(self.file.path, reason, hint="convert the model again")
        return value


def hf_config(meta: Metadata) -> dict[str, Any]:
    """The config.json that transformers would have for the model."""
    file = meta.file
    name, model_type = _HF_CLASSES[meta.architecture]
    hidden, heads = meta.size("embedding_length"), meta.size("attention.head_count")
    head_dim = meta.size("attention.key_length", meta.size("rope.dimension_count", hidden // heads))
    if meta.architecture == "phi3":
        head_dim = meta.size("attention.key_length", hidden // heads)  # phi3 may rotate a part of the head
    config = {
        "architectures": [name],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": meta.size("feed_forward_length"),
        "num_hidden_layers": meta.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": meta.size("context_length"),
        "rms_norm_eps": meta.number("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "vocab_size": _vocab_size(meta),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }
    return config | rope_config(meta, head_dim) | _family(meta, config) | _token_ids(file)


def generation_config(file: GgufFile) -> dict[str, Any]:
    """Start and end tokens; further control tokens that end a turn are ends too."""
    ids = _token_ids(file)
    ends = [file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, kinds = file.metadata.get("tokenizer.ggml.tokens"), file.metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(kinds, np.ndarray) and kinds.size == len(tokens):
        control = np.flatnonzero(kinds == _CONTROL).tolist()
        ends += [index for index in control if tokens[index] in _TURN_ENDS]
    unique = list(dict.fromkeys(end for end in ends if end is not None))
    if unique:
        ids["eos_token_id"] = unique[0] if len(unique) == 1 else unique
    return ids


def _token_ids(file: GgufFile) -> dict[str, Any]:
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {name: file.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: value for name, value in found.items() if value is not None}


def _vocab_size(meta: Metadata) -> int:
    embedding = meta.file.tensors.get("token_embd.weight")
    if embedding is None:
        return meta.size("vocab_size", len(meta.file.metadata.get("tokenizer.ggml.tokens", ())))
    return embedding.shape[0]


def _family(meta: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """What one architecture has beyond the common keys."""
    window = meta.get("attention.sliding_window") or None
    if meta.architecture == "llama" and window:
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    if meta.architecture == "phi3":
        return {"sliding_window": window}
    if meta.architecture == "qwen2":
        return {"attention_bias": True, "use_sliding_window": False}
    if meta.architecture == "qwen3":
        return {"use_sliding_window": False}
    if meta.architecture != "gemma2":
        return {}
    # The file does not keep query_pre_attn_scalar: of the published sizes only 27B departs from the head dim.
    is_27b = config["num_hidden_layers"] == _GEMMA2_27B_LAYERS
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": window,
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": meta.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": meta.number("final_logit_softcapping", 30.0),
    }
