"""Reads RoPE settings from a Hugging Face config, in its old keys and its new ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from turbojax.errors import ModelConfigError
from turbojax.models.rope import (
    RopeSpec,
    default_inv_freq,
    llama3_inv_freq,
    yarn_attention_factor,
    yarn_inv_freq,
)

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


def scaling_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The scaling fields: `rope_parameters` (transformers 5) over `rope_scaling` (`rope_type` or the older `type`)."""
    merged = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    merged["rope_type"] = merged.get("rope_type") or merged.get("type") or "default"
    merged["rope_theta"] = merged.get("rope_theta") or config.get("rope_theta") or 10000.0
    rotary = merged.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    trained = config.get("original_max_position_embeddings") or merged.get("original_max_position_embeddings")
    merged["partial_rotary_factor"] = float(rotary)
    merged["original_max_position_embeddings"] = trained or config.get("max_position_embeddings")
    if merged["rope_type"] == "su":  # Phi-3's first name for longrope
        merged["rope_type"] = "longrope"
    if merged["rope_type"] not in KINDS:
        raise ModelConfigError(f"config.json: rope type '{merged['rope_type']}' is not one of {', '.join(KINDS)}")
    if merged["rope_type"] in ("linear", "dynamic", "llama3", "yarn") and not merged.get("factor"):
        raise ModelConfigError(f"config.json: rope type '{merged['rope_type']}' needs a 'factor'")
    return merged


def longrope(rotary_dim: int, theta: float, scaling: dict[str, Any], max_len: int) -> RopeSpec:
    """LongRoPE (arXiv 2402.13753): a factor per frequency, one set for short and one for long sequences."""
    trained_len = int(scaling["original_max_position_embeddings"])
    freq = default_inv_freq(theta, rotary_dim)
    for key in ("short_factor", "long_factor"):
        if len(scaling.get(key) or ()) != len(freq):
            raise ModelConfigError(f"config.json: longrope needs {len(freq)} values in '{key}'")
    factor = float(scaling.get("factor") or max_len / trained_len)
    attention = scaling.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained_len))
    short, long = (freq / np.asarray(scaling[key], np.float64) for key in ("short_factor", "long_factor"))
    return RopeSpec(
        rotary_dim, theta, tuple(map(float, short)), kind="longrope", attention_factor=float(attention),
        long_inv_freq=tuple(map(float, long)), original_max_len=trained_len,
    )  # fmt: skip


def rope_from_config(config: Mapping[str, Any], head_dim: int) -> RopeSpec:
    """The rope of a model.

    Raises:
        ModelConfigError: an unknown type, or a field it needs is missing.
    """
    scaling = scaling_of(config)
    theta, kind = float(scaling["rope_theta"]), scaling["rope_type"]
    rotary_dim = int(head_dim * scaling["partial_rotary_factor"])
    freq, attention_factor = default_inv_freq(theta, rotary_dim), 1.0
    max_len = int(config.get("max_position_embeddings") or 0)
    if kind == "longrope":
        return longrope(rotary_dim, theta, scaling, max_len)
    if kind == "dynamic":
        return RopeSpec(
            rotary_dim, theta, tuple(map(float, freq)), kind="dynamic",
            factor=float(scaling["factor"]), original_max_len=max_len,
        )  # fmt: skip
    if kind == "linear":
        freq = freq / float(scaling["factor"])
    elif kind == "llama3":
        freq = llama3_inv_freq(freq, scaling)
    elif kind == "yarn":
        freq, attention_factor = yarn_inv_freq(freq, theta, scaling), yarn_attention_factor(scaling)
    return RopeSpec(rotary_dim, theta, tuple(map(float, freq)), attention_factor=attention_factor)
