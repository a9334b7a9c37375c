"""Rotary scaling of a GGUF, kept in metadata keys and factor tables, as Hugging Face config entries."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from checkpoints.errors import ConfigError, UnsupportedFormatError
from checkpoints.gguf_names import ROPE_FACTORS_LONG, ROPE_FACTORS_SHORT, ROPE_FREQS

if TYPE_CHECKING:
    from checkpoints.gguf_config import Metadata

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope_config(meta: Metadata, head_dim: int) -> dict[str, Any]:
    """`rope_theta`, `rope_scaling` (None: default) and, where a part of the head rotates, its share."""
    theta = float(meta.number("rope.freq_base", 10000.0))
    num_rotary = meta.size("rope.dimension_count", head_dim)
    config: dict[str, Any] = {"rope_theta": theta, "rope_scaling": _scaling(meta, theta)}
    if num_rotary != head_dim:
        config["partial_rotary_factor"] = num_rotary / head_dim
    if meta.get("rope.scaling.type") == "longrope" or ROPE_FACTORS_LONG in meta.file.tensors:
        config["original_max_position_embeddings"] = config["rope_scaling"]["original_max_position_embeddings"]
    return config


def _scaling(meta: Metadata, theta: float) -> dict[str, Any] | None:
    if ROPE_FACTORS_LONG in meta.file.tensors:
        return _longrope(meta)
    if ROPE_FREQS in meta.file.tensors:
        return _from_table(meta, _table(meta, ROPE_FREQS), theta)
    kind = meta.get("rope.scaling.type")
    if kind is None and meta.get("rope.scale_linear") is not None:
        return {"rope_type": "linear", "factor": float(meta.number("rope.scale_linear"))}
    if kind in (None, "none"):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(meta.number("rope.scaling.factor"))}
    if kind == "yarn":
        return _yarn(meta)
    hint = "supported: none, linear, yarn, and longrope with its factor tables"
    raise UnsupportedFormatError(meta.file.path, f"rope scaling type {kind!r} is not supported", hint=hint)


def _yarn(meta: Metadata) -> dict[str, Any]:
    factor = float(meta.number("rope.scaling.factor"))
    if factor <= 0:
        raise ConfigError(meta.file.path, f"yarn's rope.scaling.factor is {factor}", hint="convert the model again")
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": meta.size("rope.scaling.original_context_length"),
    }
    for name in ("beta_fast", "beta_slow"):
        if meta.get(f"rope.scaling.yarn_{name}") is not None:
            scaling[name] = float(meta.number(f"rope.scaling.yarn_{name}"))
    # GGUF's factor multiplies the usual 0.1 ln(factor) + 1, Hugging Face's replaces it.
    multiplier = meta.number("rope.scaling.yarn_attn_factor", meta.number("rope.scaling.attn_factor", 1.0))
    if multiplier != 1.0:
        scaling["attention_factor"] = float(multiplier) * (0.1 * math.log(factor) + 1.0)
    return scaling


def _longrope(meta: Metadata) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": _table(meta, ROPE_FACTORS_SHORT).tolist(),
        "long_factor": _table(meta, ROPE_FACTORS_LONG).tolist(),
        "original_max_position_embeddings": meta.size("rope.scaling.original_context_length"),
    }
    if meta.get("rope.scaling.attn_factor") is not None:
        scaling["attention_factor"] = float(meta.number("rope.scaling.attn_factor"))
    return scaling


def _from_table(meta: Metadata, table: np.ndarray, theta: float) -> dict[str, Any]:
    """The table divides the inverse frequencies. Llama 3's is recognised; any other is kept as it is."""
    llama3 = {"rope_type": "llama3", "factor": round(float(table.max()), 4), **_LLAMA3}
    if np.allclose(table, llama3_factors(2 * table.size, theta, llama3), rtol=1e-4):
        return llama3
    factors = table.tolist()
    original_len = meta.size("context_length")
    return {
        "rope_type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": original_len,
    }


def llama3_factors(num_rotary: int, theta: float, scaling: dict[str, Any]) -> np.ndarray:
    """The divisors of the inverse frequencies [num_rotary / 2] that a llama3 rope_scaling means."""
    wave_lens = 2 * np.pi * theta ** (np.arange(0, num_rotary, 2) / num_rotary)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = (scaling["original_max_position_embeddings"] / wave_lens - low) / (high - low)
    smooth = np.clip(smooth, 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / scaling["factor"] + smooth)


def _table(meta: Metadata, name: str) -> np.ndarray:
    """A small float32 table of the file."""
    tensor = meta.file.tensors.get(name)
    if tensor is None or tensor.kind.name != "F32" or len(tensor.shape) != 1:
        raise ConfigError(meta.file.path, "must be a float32 vector", tensor=name, hint="convert the model again")
    return meta.file.raw(tensor).view(np.float32)
