"""Well-known models as their public config.json describes them, for weights that need no download."""

from __future__ import annotations

from typing import Any

from turbojax.errors import TurbojaxError
from turbojax.models.families import Config

_LLAMA_3_1: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_QWEN: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

SHAPES: dict[str, Config] = {
    "llama-3.1-8b": _LLAMA_3_1
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "llama-3.1-70b": _LLAMA_3_1
    | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "qwen2.5-7b": _QWEN
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "qwen3-8b": _QWEN
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    # No model of anybody's: small enough for a CPU, with every dimension a multiple of the group size 128.
    "tiny": _LLAMA_3_1
    | {
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}


class UnknownShapeError(TurbojaxError):
    """No shape has this name."""


def shape_config(name: str) -> Config:
    """The config.json of a named shape.

    Raises:
        UnknownShapeError: there is none of this name; lists those there are.
    """
    if name not in SHAPES:
        raise UnknownShapeError(f"shape '{name}' is unknown; known are " + ", ".join(SHAPES))
    return SHAPES[name]
