"""The model families: small mappings from a Hugging Face config and its tensor names to one shared decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from turbojax.errors import ModelConfigError, UnknownArchitectureError
from turbojax.models.rope import RopeSpec
from turbojax.models.rope_config import rope_from_config

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Source:
    """Where a part comes from: a tensor, and the rows of it (None: all). `{i}` stands for the layer."""

    name: str
    rows: tuple[int, ...] | None = None

    def at(self, layer: int) -> str:
        return self.name.format(i=layer)


@dataclass(frozen=True)
class Architecture:
    """A model as its config describes it, before the checkpoint says how its linears are stored.

    `windows` has one entry a layer. `sources` maps parts (q, k, v, o, gate, up, down, attn_norm, ...) to tensors;
    a bias of part p is the source's name with `.bias` for `.weight`.
    """

    name: str
    vocab_size: int
    embed_dim: int
    ffw_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_len: int
    rope: RopeSpec
    norm_eps: float
    tied: bool
    windows: tuple[int | None, ...]
    attn_scale: float
    sources: Mapping[str, Source]
    biased: frozenset[str] = frozenset()
    norm_offset: float = 0.0
    embed_scale: float = 1.0
    attn_softcap: float | None = None
    logit_softcap: float | None = None
    has_qk_norm: bool = False
    has_post_norms: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    out_dims: Mapping[str, int] = field(default_factory=dict)
    in_dims: Mapping[str, int] = field(default_factory=dict)


ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}

LLAMA_SOURCES = {
    "embedding": Source("model.embed_tokens.weight"),
    "final_norm": Source("model.norm.weight"),
    "head": Source("lm_head.weight"),
    "attn_norm": Source("model.layers.{i}.input_layernorm.weight"),
    "q": Source("model.layers.{i}.self_attn.q_proj.weight"),
    "k": Source("model.layers.{i}.self_attn.k_proj.weight"),
    "v": Source("model.layers.{i}.self_attn.v_proj.weight"),
    "o": Source("model.layers.{i}.self_attn.o_proj.weight"),
    "q_norm": Source("model.layers.{i}.self_attn.q_norm.weight"),
    "k_norm": Source("model.layers.{i}.self_attn.k_norm.weight"),
    "ffw_norm": Source("model.layers.{i}.post_attention_layernorm.weight"),
    "gate": Source("model.layers.{i}.mlp.gate_proj.weight"),
    "up": Source("model.layers.{i}.mlp.up_proj.weight"),
    "down": Source("model.layers.{i}.mlp.down_proj.weight"),
}

GEMMA2_SOURCES = LLAMA_SOURCES | {
    "post_attn_norm": Source("model.layers.{i}.post_attention_layernorm.weight"),
    "ffw_norm": Source("model.layers.{i}.pre_feedforward_layernorm.weight"),
    "post_ffw_norm": Source("model.layers.{i}.post_feedforward_layernorm.weight"),
}


def want(config: Config, key: str, kind: type = int) -> Any:
    """A required field of the config, checked."""
    value = config.get(key)
    if value is None:
        raise ModelConfigError(f"config.json: field '{key}' is missing; the architecture needs it")
    if not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool):
        raise ModelConfigError(f"config.json: field '{key}' is {value!r}; a {kind.__name__} is expected")
    if isinstance(value, int | float) and value <= 0:
        raise ModelConfigError(f"config.json: field '{key}' is {value}; it must be positive")
    return kind(value)


def windows_of(config: Config, sliding: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Window of each layer: `layer_types` where the config has them, else by the family's rule."""
    num_layers, window = want(config, "num_hidden_layers"), config.get("sliding_window")
    kinds = config.get("layer_types")
    if kinds is not None and len(kinds) != num_layers:
        raise ModelConfigError(f"config.json: 'layer_types' has {len(kinds)} entries for {num_layers} layers")
    slides = [kinds[i] == "sliding_attention" if kinds else sliding(i) for i in range(num_layers)]
    return tuple(int(window) if window and s else None for s in slides)


def base(config: Config, sources: Mapping[str, Source] = LLAMA_SOURCES) -> Architecture:
    """What all families read alike."""
    num_heads, embed_dim = want(config, "num_attention_heads"), want(config, "hidden_size")
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    head_dim = config.get("head_dim") or embed_dim // num_heads
    if num_heads % num_kv_heads:
        raise ModelConfigError(
            f"config.json: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
        )
    act = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    if act not in ACTIVATIONS:
        raise ModelConfigError(f"config.json: activation '{act}' is not one of {sorted(ACTIVATIONS)}")
    ffw_dim, q_dim, kv_dim = want(config, "intermediate_size"), num_heads * head_dim, num_kv_heads * head_dim
    return Architecture(
        name=config["architectures"][0],
        vocab_size=want(config, "vocab_size"),
        embed_dim=embed_dim,
        ffw_dim=ffw_dim,
        num_layers=want(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_len=want(config, "max_position_embeddings"),
        rope=rope_from_config(config, head_dim),
        norm_eps=want(config, "rms_norm_eps", float),
        tied=bool(config.get("tie_word_embeddings", False)),
        windows=(None,) * want(config, "num_hidden_layers"),
        attn_scale=head_dim**-0.5,
        sources=sources,
        activation=ACTIVATIONS[act],
        out_dims={"q": q_dim, "k": kv_dim, "v": kv_dim, "o": embed_dim}
        | {"gate": ffw_dim, "up": ffw_dim, "down": embed_dim},
        in_dims={"o": q_dim, "down": ffw_dim},
    )  # fmt: skip


def llama(config: Config) -> Architecture:
    biased = {"q", "k", "v", "o"} if config.get("attention_bias") else set()
    biased |= {"gate", "up", "down"} if config.get("mlp_bias") else set()
    return replace(base(config), biased=frozenset(biased))


def mistral(config: Config) -> Architecture:
    return replace(base(config), windows=windows_of(config, lambda i: True))


def qwen_windows(config: Config) -> tuple[int | None, ...]:
    """Qwen slides only when told to, and only from layer `max_window_layers` on."""
    if not config.get("use_sliding_window"):
        return (None,) * want(config, "num_hidden_layers")
    first = config.get("max_window_layers", 28)
    return windows_of(config, lambda i: i >= first)


def qwen2(config: Config) -> Architecture:
    return replace(base(config), biased=frozenset("qkv"), windows=qwen_windows(config))


def qwen3(config: Config) -> Architecture:
    biased = frozenset({"q", "k", "v", "o"} if config.get("attention_bias") else ())
    return replace(base(config), biased=biased, has_qk_norm=True, windows=qwen_windows(config))


def gemma2(config: Config) -> Architecture:
    arch = base(config, GEMMA2_SOURCES)
    cap, final_cap = config.get("attn_logit_softcapping"), config.get("final_logit_softcapping")
    return replace(
        arch,
        tied=bool(config.get("tie_word_embeddings", True)),
        windows=windows_of(config, lambda i: i % 2 == 0),
        attn_scale=want(config, "query_pre_attn_scalar", float) ** -0.5,
        norm_offset=1.0,
        embed_scale=arch.embed_dim**0.5,
        attn_softcap=float(cap) if cap else None,
        logit_softcap=float(final_cap) if final_cap else None,
        has_post_norms=True,
    )


def rows(start: int, count: int) -> tuple[int, ...]:
    return tuple(range(start, start + count))


def phi3(config: Config) -> Architecture:
    """qkv and gate_up are fused in the checkpoint: q rows, k rows, v rows; gate rows, up rows."""
    arch = base(config)
    q_dim, kv_dim, ffw_dim = arch.out_dims["q"], arch.out_dims["k"], arch.ffw_dim
    qkv, gate_up = "model.layers.{i}.self_attn.qkv_proj.weight", "model.layers.{i}.mlp.gate_up_proj.weight"
    fused = {
        "q": Source(qkv, rows(0, q_dim)),
        "k": Source(qkv, rows(q_dim, kv_dim)),
        "v": Source(qkv, rows(q_dim + kv_dim, kv_dim)),
        "gate": Source(gate_up, rows(0, ffw_dim)),
        "up": Source(gate_up, rows(ffw_dim, ffw_dim)),
    }
    return replace(arch, sources=LLAMA_SOURCES | fused, windows=windows_of(config, lambda i: True))


def internlm2(config: Config) -> Architecture:
    """wqkv is interleaved by kv head: its query heads, its key, its value."""
    arch = base(config)
    group = arch.num_heads // arch.num_kv_heads
    index = np.arange(arch.num_kv_heads * (group + 2) * arch.head_dim).reshape(arch.num_kv_heads, group + 2, -1)
    pick = lambda part: tuple(int(r) for r in part.reshape(-1))  # noqa: E731
    layer, wqkv = "model.layers.{i}.", "model.layers.{i}.attention.wqkv.weight"
    sources = {
        "embedding": Source("model.tok_embeddings.weight"),
        "final_norm": Source("model.norm.weight"),
        "head": Source("output.weight"),
        "attn_norm": Source(layer + "attention_norm.weight"),
        "q": Source(wqkv, pick(index[:, :group])),
        "k": Source(wqkv, pick(index[:, group])),
        "v": Source(wqkv, pick(index[:, group + 1])),
        "o": Source(layer + "attention.wo.weight"),
        "ffw_norm": Source(layer + "ffn_norm.weight"),
        "gate": Source(layer + "feed_forward.w1.weight"),
        "up": Source(layer + "feed_forward.w3.weight"),
        "down": Source(layer + "feed_forward.w2.weight"),
    }
    biased = frozenset({"q", "k", "v", "o"} if config.get("bias") else ())
    return replace(arch, sources=sources, biased=biased)


FAMILIES: dict[str, Callable[[Config], Architecture]] = {
    "LlamaForCausalLM": llama,
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
    "InternLM2ForCausalLM": internlm2,
    "Gemma2ForCausalLM": gemma2,
    "Phi3ForCausalLM": phi3,
}


def architecture_of(config: Config) -> Architecture:
    """Reads a Hugging Face config.

    Raises:
        UnknownArchitectureError: no family describes it; lists the known ones.
        ModelConfigError: a field is missing or cannot be honoured.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise ModelConfigError(f"config.json: field 'architectures' is missing; known: {', '.join(FAMILIES)}")
    if names[0] not in FAMILIES:
        raise UnknownArchitectureError(
            f"config.json: architecture '{names[0]}' is unknown; known are " + ", ".join(sorted(FAMILIES))
        )
    return FAMILIES[names[0]](config)
