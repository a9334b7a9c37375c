"""What a model is, statically: frozen, hashable specs that every jitted step is keyed by. No arrays here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from turbojax.models.rope import RopeSpec


@dataclass(frozen=True)
class Dense:
    """Numbers in the model's dtype."""


@dataclass(frozen=True)
class GroupedAffine:
    """Codes of 8 or 4 bits with float scales; x stays in 16 bits.

    Attributes:
        bits: of a code.
        group_size: rows of K that share a scale.
        has_offset: the codes carry a float offset (else they are symmetric around 2**(bits - 1)).
        has_perm: rows of the codes are permuted (act-order): x is gathered first.
    """

    bits: int
    group_size: int
    has_offset: bool = False
    has_perm: bool = False


@dataclass(frozen=True)
class EightBit:
    """Signed codes of eight bits, multiplied by x quantised to the same dtype.

    Attributes:
        dtype: of the codes.
        has_blocks: a scale covers a block of 128 x 128, else an output channel.
    """

    dtype: Literal["int8", "float8_e4m3fn"]
    has_blocks: bool = False


Storage = Dense | GroupedAffine | EightBit
"""What a weight is stored as; each kind has fields of its own, by which a saved one is known again."""


@dataclass(frozen=True)
class LinearSpec:
    """y = x @ W + bias.

    Attributes:
        in_dim, out_dim: K and N.
        storage: of W.
        has_bias: a bias is added.
    """

    in_dim: int
    out_dim: int
    storage: Storage = Dense()
    has_bias: bool = False


def gate_up_tile(ffw_dim: int) -> int:
    """The largest power of two up to 128 that divides F."""
    return min(128, ffw_dim & -ffw_dim)


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer. Equal neighbours form a segment.

    Attributes:
        num_heads, num_kv_heads, head_dim: N, K and H.
        attn_scale: factor on q.k before softmax.
        window: a token sees itself and the window - 1 before it; None sees all.
        attn_softcap: scores become cap * tanh(scores / cap).
        has_qk_norm: RMSNorm over each head of q and k, before RoPE.
        has_post_norms: a second norm after attention and one after the ffw, before the residual (Gemma 2).
        activation: of the gate.
        rope: the rotation.
        qkv: one fused linear, columns interleaved by kv head (its G q heads, k, v), or three: q, k, v.
        o, down: the linears back to the residual stream.
        gate_up: one fused linear, gate and up interleaved by tiles of `gate_up_tile` columns, or two: gate, up.
        k_bits, v_bits: precision of the KV cache (16, 8 or 4).
        k_hadamard: q and k are multiplied by a Hadamard matrix behind RoPE, so that K rounds well to few levels.
        has_k_scale: keys are scaled before that, by what a calibration found.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    attn_scale: float
    window: int | None
    attn_softcap: float | None
    has_qk_norm: bool
    has_post_norms: bool
    activation: Literal["silu", "gelu_tanh"]
    rope: RopeSpec
    qkv: tuple[LinearSpec, ...]
    o: LinearSpec
    gate_up: tuple[LinearSpec, ...]
    down: LinearSpec
    k_bits: int = 16
    v_bits: int = 16
    k_hadamard: bool = False
    has_k_scale: bool = False

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """All of them."""
        return (*self.qkv, self.o, *self.gate_up, self.down)

    @property
    def gate_up_tile(self) -> int:
        """Columns of gate that stand together before as many of up."""
        return gate_up_tile(self.down.in_dim)


@dataclass(frozen=True)
class SegmentSpec:
    """A run of `num_layers` layers with one spec, stacked on a leading axis."""

    layer: LayerSpec
    first_layer: int
    num_layers: int


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only model.

    Attributes:
        architecture: the HF architecture it came from.
        vocab_size, embed_dim: V and D.
        segments: the layers, in order.
        norm_eps: of every RMSNorm.
        norm_offset: norms multiply by (norm_offset + weight): 1 for Gemma, else 0.
        embed_scale: factor on the embedding (Gemma: sqrt(D)).
        embedding: storage of the [V, D] table, as a linear from D to V.
        head: the output projection; None uses the embedding (tied).
        logit_softcap: logits become cap * tanh(logits / cap).
        max_len: the context length the checkpoint states.
        dtype: of activations and dense weights, "float32" | "bfloat16" | "float16".
        num_shards: of more than one, this spec is what each of them has (see `models.cutting`): its heads, its columns
            of the MLP, its rows of the tables; V, D and the norms stay whole.
    """

    architecture: str
    vocab_size: int
    embed_dim: int
    segments: tuple[SegmentSpec, ...]
    norm_eps: float
    norm_offset: float
    embed_scale: float
    embedding: LinearSpec
    head: LinearSpec | None
    logit_softcap: float | None
    max_len: int
    dtype: str
    num_shards: int = 1

    @property
    def num_layers(self) -> int:
        return sum(segment.num_layers for segment in self.segments)

    @property
    def parity_len(self) -> float:
        """Tokens that one more must see for its attention to cost the FLOPs of its linears; without end where windows
        hide those far back from all layers."""
        layers = [(segment.num_layers, segment.layer) for segment in self.segments]
        num_weights = sum(n * linear.in_dim * linear.out_dim for n, layer in layers for linear in layer.linears)
        width = sum(n * layer.num_heads * layer.head_dim for n, layer in layers if layer.window is None)
        return num_weights / (2 * width) if width else math.inf

    def rope_regime(self, admitted_len: int) -> tuple[int, ...]:
        """Sequences share keys only where it is the same for the lengths that they were admitted with."""
        return tuple(segment.layer.rope.regime(admitted_len) for segment in self.segments)
