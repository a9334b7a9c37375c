"""The forward pass: one shared decoder that runs every family, one loop per segment of equal layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from pallas_kernels.kv_cache import KVPages, write_kv
from pallas_kernels.paged_attention import paged_decode_attention, paged_prefill_attention
from turbojax.core.linear import at_layer, embed, linear
from turbojax.core.state import KVPool
from turbojax.core.weights import LayerWeights, Weights
from turbojax.models.rope import apply_rope, rope_angles
from turbojax.models.spec import LayerSpec, ModelSpec, SegmentSpec


@struct.dataclass
class DecodeRows:
    """The first B rows: one query each.

    Attributes:
        block_tables: int32 [B, groups, pages].
        lengths: int32 [B], keys each row sees, its own included; 0 for padding.
    """

    block_tables: jax.Array
    lengths: jax.Array


@struct.dataclass
class ChunkRows:
    """The rows behind them: C chunks of consecutive tokens, one sequence each.

    Attributes:
        block_tables: int32 [C, groups, pages].
        starts: int32 [C + 1], row (counted from the first chunk row) where each chunk starts; the last entry ends them.
        history_lens: int32 [C], tokens of the sequence that the pool held before.
    """

    block_tables: jax.Array
    starts: jax.Array
    history_lens: jax.Array


@struct.dataclass
class Rows:
    """Tokens of one forward pass, `[M]` each; decode rows first.

    Attributes:
        tokens, positions: int32.
        admitted_lens: int32, see `Slots.admitted_len`.
        page_ids: int32 [groups, M], page that takes the row's K and V (0 for padding).
        page_offsets: int32, token within the page.
        decode, chunks: who attends to what.
    """

    tokens: jax.Array
    positions: jax.Array
    admitted_lens: jax.Array
    page_ids: jax.Array
    page_offsets: jax.Array
    decode: DecodeRows | None
    chunks: ChunkRows | None


def rms_norm(x: jax.Array, weight: jax.Array, spec: ModelSpec) -> jax.Array:
    """x / rms(x) * (norm_offset + weight) over the last axis, in float32, back in x.dtype."""
    x32 = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + spec.norm_eps)
    gain = spec.norm_offset + weight.astype(jnp.float32)
    return (x32 * scale * jnp.expand_dims(gain, range(x.ndim - 1))).astype(x.dtype)


def project_qkv(
    x: jax.Array, w: LayerWeights, layer: jax.Array, spec: LayerSpec
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q [M, N, H], k and v [M, K, H] from the normed input [M, D]."""
    num_rows, num_kv, head_dim = x.shape[0], spec.num_kv_heads, spec.head_dim
    outs = [linear(x, part, layer) for part in w.qkv]
    if len(outs) == 3:
        q, k, v = (y.reshape(num_rows, -1, head_dim) for y in outs)
        return q, k, v
    group = spec.num_heads // num_kv
    y = outs[0].reshape(num_rows, num_kv, group + 2, head_dim)
    return y[:, :, :group].reshape(num_rows, spec.num_heads, head_dim), y[:, :, group], y[:, :, group + 1]


def gated_ffw(x: jax.Array, w: LayerWeights, layer: jax.Array, spec: LayerSpec) -> jax.Array:
    """down(act(gate(x)) * up(x)), [M, D] -> [M, D]; the product in float32."""
    outs = [linear(x, part, layer) for part in w.gate_up]
    if len(outs) == 2:
        gate, up = outs
    else:
        y = outs[0].reshape(x.shape[0], -1, 2, spec.gate_up_tile)
        gate, up = y[:, :, 0], y[:, :, 1]
    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    act = jax.nn.silu(gate) if spec.activation == "silu" else jax.nn.gelu(gate, approximate=True)
    return linear((act * up).astype(x.dtype).reshape(x.shape[0], -1), w.down, layer)


def attend(q: jax.Array, pages: KVPages, layer: jax.Array, rows: Rows, spec: LayerSpec, group: int) -> jax.Array:
    """Attention of all rows over the pool: decode rows and chunk rows apart. [M, N, H] -> [M, N, H]."""
    options: dict[str, Any] = {"scale": spec.attn_scale, "window": spec.window, "softcap": spec.attn_softcap}
    num_decode = 0 if rows.decode is None else rows.decode.lengths.shape[0]
    outs = []
    if rows.decode is not None:
        tables = rows.decode.block_tables[:, group]
        outs.append(paged_decode_attention(q[:num_decode], pages, layer, tables, rows.decode.lengths, **options))
    if rows.chunks is not None:
        c = rows.chunks
        outs.append(
            paged_prefill_attention(
                q[num_decode:], pages, layer, c.block_tables[:, group], c.starts, c.history_lens, **options
            )
        )
    return outs[0] if len(outs) == 1 else jnp.concatenate(outs)


def run_segment(
    x: jax.Array, pages: KVPages, w: LayerWeights, segment: SegmentSpec, rows: Rows, spec: ModelSpec
) -> tuple[jax.Array, KVPages]:
    """The layers of one segment; weights and pages stay whole, each op reads its layer by index.

    Slicing them per layer would copy them: twice the time of a decode step on a GPU.
    """
    layer_spec = segment.layer
    group = 0  # one page group today; windowed layers will get their own
    cos, sin = rope_angles(layer_spec.rope, rows.positions, rows.admitted_lens)

    def normed(y: jax.Array, weight: jax.Array, layer: jax.Array) -> jax.Array:
        return rms_norm(y, at_layer(weight, layer), spec)

    def body(layer: jax.Array, carry: tuple[jax.Array, KVPages]) -> tuple[jax.Array, KVPages]:
        x, pages = carry
        q, k, v = project_qkv(normed(x, w.attn_norm, layer), w, layer, layer_spec)
        if w.q_norm is not None and w.k_norm is not None:
            q, k = normed(q, w.q_norm, layer), normed(k, w.k_norm, layer)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        pages = write_kv(pages, k, v, layer, rows.page_ids[group], rows.page_offsets)
        attn = attend(q, pages, layer, rows, layer_spec, group).reshape(x.shape[0], -1)
        y = linear(attn, w.o, layer)
        x = x + (y if w.post_attn_norm is None else normed(y, w.post_attn_norm, layer))
        y = gated_ffw(normed(x, w.ffw_norm, layer), w, layer, layer_spec)
        return x + (y if w.post_ffw_norm is None else normed(y, w.post_ffw_norm, layer)), pages

    return lax.fori_loop(0, segment.num_layers, body, (x, pages))


def forward(weights: Weights, pool: KVPool, rows: Rows) -> tuple[KVPool, jax.Array]:
    """Runs the rows through all layers; their K and V land in the pool.

    Args:
        weights: the model.
        pool: donated by the steps that call this.
        rows: M tokens.

    Returns:
        The pool, and the hidden states [M, D] before the final norm.
    """
    spec = weights.spec
    x = embed(weights.embedding, rows.tokens, jnp.dtype(spec.dtype))
    x = x * jnp.asarray(spec.embed_scale, x.dtype) if spec.embed_scale != 1 else x
    pages_out = []
    for segment, w, pages in zip(spec.segments, weights.segments, pool.segments, strict=True):
        x, pages = run_segment(x, pages, w, segment, rows, spec)
        pages_out.append(pages)
    return KVPool(tuple(pages_out)), x


def logits_of(weights: Weights, hidden: jax.Array) -> jax.Array:
    """float32 logits [M, V] of hidden states [M, D] (before the final norm)."""
    spec = weights.spec
    x = rms_norm(hidden, weights.final_norm[0], spec)
    head = weights.embedding if weights.head is None else weights.head  # tied: the embedding's
    logits = linear(x, head, jnp.int32(0), out_dtype=jnp.dtype(jnp.float32))[:, : spec.vocab_size]
    if spec.logit_softcap is not None:
        logits = spec.logit_softcap * jnp.tanh(logits / spec.logit_softcap)
    return logits
