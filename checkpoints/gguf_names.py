"""GGUF tensor names to Hugging Face names, and what a converter did to a tensor's values on the way."""

from __future__ import annotations

import re

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_COMMON = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA2 = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3 = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}

_LAYER_NAMES: dict[str, dict[str, str]] = {
    "llama": _COMMON,
    "qwen2": _COMMON,
    "qwen3": _COMMON | _QK_NORM,
    "gemma2": _COMMON | _GEMMA2,
    "phi3": _COMMON | _PHI3,
}
ARCHITECTURES = tuple(_LAYER_NAMES)

# Tables of rotary factors: they become config entries (gguf_rope.py), not tensors.
ROPE_FREQS = "rope_freqs.weight"
ROPE_FACTORS_SHORT = "rope_factors_short.weight"
ROPE_FACTORS_LONG = "rope_factors_long.weight"
_TABLES = (ROPE_FREQS, ROPE_FACTORS_SHORT, ROPE_FACTORS_LONG)

_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def is_table(name: str) -> bool:
    """Whether the tensor is derived from the config and not a weight."""
    return name in _TABLES or name.endswith(".attn_rot_embd")


def hf_name(architecture: str, name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor, or None if the architecture has no such tensor."""
    if name in _TOP:
        return _TOP[name]
    match = _LAYER.fullmatch(name)
    part = _LAYER_NAMES[architecture].get(match[2]) if match else None
    return f"model.layers.{match[1]}.{part}.{match[3]}" if match and part else None


def is_rotary_interleaved(architecture: str, hf: str) -> bool:
    """Whether the converter reordered the rows of q and k from half-split to interleaved rotary pairs."""
    return architecture == "llama" and re.search(r"self_attn\.[qk]_proj\.", hf) is not None


def is_norm_plus_one(architecture: str, hf: str) -> bool:
    """Whether the file holds 1 + w where Hugging Face holds w."""
    return architecture == "gemma2" and hf.endswith("norm.weight")
