"""The forward pass: one shared decoder that runs every family, one loop per segment of equal layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from pallas_kernels.affine_linear import sum_partial
from pallas_kernels.kv_cache import KVPages
from pallas_kernels.paged_attention import paged_decode_attention, paged_prefill_attention
from pallas_kernels.residual_norm import add_rms_norm, rms_norm
from pallas_kernels.rope_write import HeadNorm, rope_write
from turbojax.core.linear import at_layer, linear, partial_product
from turbojax.core.shards import embed_rows, joined_columns, row_parallel
from turbojax.core.state import KVPool
from turbojax.core.weights import LayerWeights, Weights
from turbojax.models.rope import rope_angles
from turbojax.models.spec import LayerSpec, ModelSpec, SegmentSpec

RopeWrite = Callable[..., tuple[KVPages, jax.Array]]
"""`rope_write`, or what has its arguments."""


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


def project_qkv(x: jax.Array, w: LayerWeights, layer: jax.Array, spec: LayerSpec) -> jax.Array:
    """Partial sums [S, M, K * (G + 2) * H] of q, k and v from the normed input [M, D], as `rope_write` takes them.

    The bias of a fused projection is left to it; separate ones are interleaved by kv head here.
    """
    if len(w.qkv) == 1:
        return partial_product(x, w.qkv[0], layer, x.dtype)
    by_head = [linear(x, part, layer).reshape(x.shape[0], spec.num_kv_heads, -1) for part in w.qkv]
    return jnp.concatenate(by_head, axis=-1).reshape(1, x.shape[0], -1)


def gated(x: jax.Array, w: LayerWeights, layer: jax.Array, spec: LayerSpec) -> jax.Array:
    """act(gate(x)) * up(x), [M, D] -> [M, F]; the product in float32."""
    outs = [linear(x, part, layer) for part in w.gate_up]
    if len(outs) == 2:
        gate, up = outs
    else:
        y = outs[0].reshape(x.shape[0], -1, 2, spec.gate_up_tile)
        gate, up = y[:, :, 0], y[:, :, 1]
    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    act = jax.nn.silu(gate) if spec.activation == "silu" else jax.nn.gelu(gate, approximate=True)
    return (act * up).astype(x.dtype).reshape(x.shape[0], -1)


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
    x: jax.Array, pages: KVPages, w: LayerWeights, segment: SegmentSpec, rows: Rows, spec: ModelSpec, write: RopeWrite
) -> tuple[jax.Array, KVPages]:
    """The layers of one segment; weights and pages stay whole, each op reads its layer by index.

    Slicing them per layer would copy them: twice the time of a decode step on a GPU.
    """
    layer_spec, last = segment.layer, segment.num_layers - 1
    group = 0  # one page group today; windowed layers will get their own
    cos, sin = rope_angles(layer_spec.rope, rows.positions, rows.admitted_lens)
    norm: dict[str, Any] = {"eps": spec.norm_eps, "offset": spec.norm_offset}
    head_norm = None if w.q_norm is None or w.k_norm is None else HeadNorm(w.q_norm, w.k_norm, **norm)
    bias = w.qkv[0].bias if len(w.qkv) == 1 else None

    def add(
        x: jax.Array, y: jax.Array, post: jax.Array | None, layer: jax.Array, weight: jax.Array, next_layer: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The stream plus partial sums y, and its norm for the next linear."""
        if post is not None:
            y = rms_norm(sum_partial(y, x.dtype), at_layer(post, layer), **norm)[None]
        return add_rms_norm(x, y, weight, next_layer, **norm)

    def body(layer: jax.Array, carry: tuple[jax.Array, jax.Array, KVPages]) -> tuple[jax.Array, jax.Array, KVPages]:
        x, y, pages = carry
        pages, q = write(
            pages, project_qkv(y, w, layer, layer_spec), layer, rows.page_ids[group], rows.page_offsets, cos, sin,
            bias=bias, norm=head_norm, dtype=x.dtype, hadamard=layer_spec.k_hadamard,
            k_scale=w.k_scale if layer_spec.k_hadamard else None,
        )  # fmt: skip
        attn = attend(q, pages, layer, rows, layer_spec, group).reshape(x.shape[0], -1)
        y = row_parallel(attn, w.o, layer, spec.num_shards)
        x, y = add(x, y, w.post_attn_norm, layer, w.ffw_norm, layer)
        y = row_parallel(gated(y, w, layer, layer_spec), w.down, layer, spec.num_shards)
        # The stream is normed for the next layer at once; behind the last one nobody reads that.
        x, y = add(x, y, w.post_ffw_norm, layer, w.attn_norm, jnp.minimum(layer + 1, last))
        return x, y, pages

    y = rms_norm(x, w.attn_norm[0], **norm)
    x, _, pages = lax.fori_loop(0, segment.num_layers, body, (x, y, pages))
    return x, pages


def forward(weights: Weights, pool: KVPool, rows: Rows, write: RopeWrite = rope_write) -> tuple[KVPool, jax.Array]:
    """Runs the rows through all layers; their K and V land in the pool.

    Args:
        weights: the model.
        pool: donated by the steps that call this.
        rows: M tokens.
        write: what takes K and V into the pool; for whoever measures another way.

    Returns:
        The pool, and the hidden states [M, D] before the final norm.
    """
    spec = weights.spec
    x = embed_rows(weights.embedding, rows.tokens, jnp.dtype(spec.dtype), spec.num_shards)
    x = x * jnp.asarray(spec.embed_scale, x.dtype) if spec.embed_scale != 1 else x
    pages_out = []
    for segment, w, pages in zip(spec.segments, weights.segments, pool.segments, strict=True):
        x, pages = run_segment(x, pages, w, segment, rows, spec, write)
        pages_out.append(pages)
    return KVPool(tuple(pages_out)), x


def final_norm(weights: Weights, hidden: jax.Array) -> jax.Array:
    """Last hidden states [M, D] as the output projection reads them."""
    spec = weights.spec
    return rms_norm(hidden, weights.final_norm[0], eps=spec.norm_eps, offset=spec.norm_offset)


def logits_of(weights: Weights, hidden: jax.Array) -> jax.Array:
    """float32 logits [M, V] of hidden states [M, D] (before the final norm)."""
    return head_of(weights, final_norm(weights, hidden))


def head_of(weights: Weights, x: jax.Array) -> jax.Array:
    """float32 logits [M, V] of normed hidden states [M, D]."""
    spec = weights.spec
    head = weights.embedding if weights.head is None else weights.head  # tied: the embedding's
    logits = linear(x, head, jnp.int32(0), out_dtype=jnp.dtype(jnp.float32))
    logits = joined_columns(logits, spec.num_shards)[:, : spec.vocab_size]
    if spec.logit_softcap is not None:
        logits = spec.logit_softcap * jnp.tanh(logits / spec.logit_softcap)
    return logits
