"""Runs one layer over the calibration tokens, and gathers what its linears read on the way."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from pallas_kernels.kv_cache import empty_pages
from pallas_kernels.residual_norm import add_rms_norm, rms_norm
from pallas_kernels.rope_write import HeadNorm, rope_write
from turbojax.core.decoder import ChunkRows, Rows, attend, gated, project_qkv
from turbojax.core.linear import at_layer, linear
from turbojax.core.weights import LayerWeights
from turbojax.lite.floats import FloatLayer, FloatModel, layer_weights
from turbojax.lite.statistics import InputStats
from turbojax.models.rope import rope_angles
from turbojax.models.spec import LayerSpec, ModelSpec

PAGE_LEN = 64
NUM_ROWS = 512  # tokens that are kept as they are
FIRST = jnp.int32(0)


@struct.dataclass
class LayerInputs:
    """What each group of linears read, [M, K] each; see `input_groups`."""

    qkv: jax.Array
    o: jax.Array
    gate_up: jax.Array
    down: jax.Array


def sequence_rows(num_seqs: int, seq_len: int) -> Rows:
    """Whole sequences side by side, each with pages of its own."""
    pages_per_seq = -(-seq_len // PAGE_LEN)
    tables = 1 + jnp.arange(num_seqs * pages_per_seq, dtype=jnp.int32).reshape(num_seqs, 1, pages_per_seq)
    positions = jnp.tile(jnp.arange(seq_len, dtype=jnp.int32), num_seqs)
    page_ids = jnp.repeat(tables[:, 0], PAGE_LEN, axis=1)[:, :seq_len].reshape(1, -1)
    starts = jnp.arange(num_seqs + 1, dtype=jnp.int32) * seq_len
    return Rows(
        tokens=jnp.zeros_like(positions),  # embedded already
        positions=positions,
        admitted_lens=jnp.full_like(positions, seq_len),
        page_ids=page_ids,
        page_offsets=positions % PAGE_LEN,
        decode=None,
        chunks=ChunkRows(tables, starts, jnp.zeros(num_seqs, jnp.int32)),
    )


def run_layer(
    x: jax.Array, w: LayerWeights, rows: Rows, layer_spec: LayerSpec, spec: ModelSpec
) -> tuple[jax.Array, LayerInputs]:
    """One decoder layer, [M, D] -> [M, D], by the decoder's own ops, with the inputs of its linears beside."""
    assert rows.chunks is not None
    num_pages = 1 + rows.chunks.block_tables.size
    pages = empty_pages(1, num_pages, layer_spec.num_kv_heads, PAGE_LEN, layer_spec.head_dim, dtype=x.dtype)
    norm: dict[str, Any] = {"eps": spec.norm_eps, "offset": spec.norm_offset}
    head_norm = None if w.q_norm is None or w.k_norm is None else HeadNorm(w.q_norm, w.k_norm, **norm)
    cos, sin = rope_angles(layer_spec.rope, rows.positions, rows.admitted_lens)
    attn_in = rms_norm(x, w.attn_norm[0], **norm)
    qkv = project_qkv(attn_in, w, FIRST, layer_spec)
    pages, q = rope_write(
        pages, qkv, FIRST, rows.page_ids[0], rows.page_offsets, cos, sin, norm=head_norm, dtype=x.dtype
    )
    attn = attend(q, pages, FIRST, rows, layer_spec, 0).reshape(x.shape[0], -1)

    def post(y: jax.Array, weight: jax.Array | None) -> jax.Array:
        return y if weight is None else rms_norm(y, at_layer(weight, FIRST), **norm)

    y = post(linear(attn, w.o, FIRST), w.post_attn_norm)
    x, ffw_in = add_rms_norm(x, y[None], w.ffw_norm, FIRST, **norm)
    hidden = gated(ffw_in, w, FIRST, layer_spec)
    x = x + post(linear(hidden, w.down, FIRST), w.post_ffw_norm)
    return x, LayerInputs(attn_in, attn, ffw_in, hidden)


@struct.dataclass
class Sums:
    """What is added up over batches: the Gram matrix, |x|, and its maximum."""

    gram: jax.Array
    total: jax.Array
    largest: jax.Array


@functools.partial(jax.jit, donate_argnames="totals")
def add(totals: LayerInputs, sums: LayerInputs) -> LayerInputs:
    """Sums over more tokens."""

    def join(a: Sums, b: Sums) -> Sums:
        return Sums(a.gram + b.gram, a.total + b.total, jnp.maximum(a.largest, b.largest))

    return jax.tree.map(join, totals, sums, is_leaf=lambda part: isinstance(part, Sums))


@functools.partial(jax.jit, static_argnames=("layer_spec", "spec"))
def forward_batch(x: jax.Array, w: LayerWeights, layer_spec: LayerSpec, spec: ModelSpec) -> jax.Array:
    """x [B, T, D] behind one layer."""
    flat, rows = x.reshape(-1, x.shape[-1]), sequence_rows(x.shape[0], x.shape[1])
    return run_layer(flat, w, rows, layer_spec, spec)[0].reshape(x.shape)


@functools.partial(jax.jit, static_argnames=("layer_spec", "spec", "stride"))
def observe_batch(
    x: jax.Array, w: LayerWeights, layer_spec: LayerSpec, spec: ModelSpec, stride: int
) -> tuple[LayerInputs, LayerInputs]:
    """Sums over a batch [B, T, D], and every `stride`-th token of each input; the down projection is left out."""
    flat, rows = x.reshape(-1, x.shape[-1]), sequence_rows(x.shape[0], x.shape[1])
    _, inputs = run_layer(flat, w, rows, layer_spec, spec)

    def sums(x: jax.Array) -> Sums:
        gram = jnp.matmul(x.T, x, precision=lax.Precision.HIGHEST)
        return Sums(gram, jnp.sum(jnp.abs(x), axis=0), jnp.max(jnp.abs(x), axis=0))

    return jax.tree.map(sums, inputs), jax.tree.map(lambda x: x[::stride], inputs)


def batches(num_seqs: int, batch_size: int) -> Iterator[slice]:
    """Equal batches, as shapes are compiled, and what is left."""
    for start in range(0, num_seqs, batch_size):
        yield slice(start, min(start + batch_size, num_seqs))


def advance(model: FloatModel, layer: FloatLayer, hidden: np.ndarray, batch_size: int) -> np.ndarray:
    """The stream float32 [B, T, D] behind a layer."""
    w, spec = layer_weights(model, layer), model.layer_spec(layer.index)
    out = np.empty_like(hidden)
    for some in batches(len(hidden), batch_size):
        out[some] = np.asarray(forward_batch(jnp.asarray(hidden[some]), w, spec, model.spec))
    return out


def observe(model: FloatModel, layer: FloatLayer, hidden: np.ndarray, batch_size: int) -> dict[str, InputStats]:
    """What the linears of a layer read, by the name of their group, from the stream [B, T, D] before it."""
    w, spec = layer_weights(model, layer), model.layer_spec(layer.index)
    num_tokens = hidden.shape[0] * hidden.shape[1]
    stride, totals, kept = -(-num_tokens // NUM_ROWS), None, []
    for some in batches(len(hidden), batch_size):
        sums, rows = observe_batch(jnp.asarray(hidden[some]), w, spec, model.spec, stride)
        totals = sums if totals is None else add(totals, sums)
        kept.append(rows)
    stats = {}
    for group in model.groups:
        found: Sums = getattr(totals, group.name)
        stats[group.name] = InputStats(
            gram=np.asarray(found.gram) / num_tokens,
            mean_abs=np.asarray(found.total) / num_tokens,
            max_abs=np.asarray(found.largest),
            rows=np.concatenate([np.asarray(getattr(rows, group.name)) for rows in kept]),
        )
    return stats
