"""The public functions of paged attention: checks, and the choice between kernel and reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.kv_cache.pages import KVPages, check_page_ids
from pallas_kernels.paged_attention import scratch
from pallas_kernels.paged_attention.decode_kernel import decode_attention
from pallas_kernels.paged_attention.prefill_kernel import prefill_attention
from pallas_kernels.paged_attention.reference import reference_decode, reference_prefill
from pallas_kernels.paged_attention.tiles import ScoreFunction
from pallas_kernels.paged_attention.tuning import decode_config, kernel_problem, prefill_config


def check(
    q: jax.Array, pages: KVPages, tables: jax.Array, lens: jax.Array, sinks: jax.Array | None, function: ScoreFunction
) -> None:
    """Raises ValueError that names the argument which does not fit."""
    for name, number in zip(ScoreFunction._fields, function, strict=True):
        if number is not None and not number > 0:
            raise ValueError(f"{name}: {number}, accepted: above 0")
    if q.ndim != 3 or q.shape[2] != pages.head_dim or q.shape[1] % pages.num_kv_heads:
        raise ValueError(f"q: shape {q.shape}, accepted: [rows, G * {pages.num_kv_heads}, {pages.head_dim}]")
    if tables.ndim != 2 or tables.shape[0] != lens.shape[0]:
        raise ValueError(f"block_tables: shape {tables.shape}, accepted: [{lens.shape[0]}, pages]")
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(f"sinks: shape {sinks.shape}, accepted: ({q.shape[1]},)")


def paged_decode_attention(
    q: jax.Array,
    pages: KVPages,
    layer: jax.Array,
    block_tables: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    implementation: backend.Implementation | None = None,
    debug: bool = False,
) -> jax.Array:
    """One query per sequence over its keys in the pool.

    Args:
        q: [B, N, H], after RoPE; query head n reads kv head n // G.
        pages: the cache; the query's own key and value are in it.
        layer: int32 scalar.
        block_tables: int32 [B, S], pages of each sequence in order.
        lengths: int32 [B], keys each row sees, its own included; 0 gives zeros.
        scale: factor on q.k.
        window: a row sees its last `window` keys only.
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: float32 [N], a logit per head that takes part in the softmax and has no value.
        implementation: None takes the kernel on a GPU and the reference elsewhere.
        debug: check that the page numbers lie in the pool; needs concrete arrays. Unchecked ones read anywhere.

    Returns:
        [B, N, H] in q.dtype. A row's result does not depend on the other rows of its batch size.

    Raises:
        ValueError: names the argument that does not fit.
    """
    if debug:
        check_page_ids("block_tables", block_tables, pages)
    function = ScoreFunction(scale, window, softcap)
    check(q, pages, block_tables, lengths, sinks, function)
    if q.shape[0] == 0:  # no work to cut
        return q
    chosen = backend.choose("paged_decode_attention", implementation, kernel_problem(q, pages))
    if chosen == "reference":
        return reference_decode(q, pages, layer, block_tables, lengths, scale, window, softcap, sinks)
    config = decode_config(q, pages, block_tables.shape[1])
    return decode_attention(q, pages, layer, block_tables, lengths, function, sinks, config, chosen == "interpret")


def paged_prefill_attention(
    q: jax.Array,
    pages: KVPages,
    layer: jax.Array,
    block_tables: jax.Array,
    chunk_starts: jax.Array,
    history_lens: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    implementation: backend.Implementation | None = None,
    debug: bool = False,
) -> jax.Array:
    """Causal attention of ragged chunks over the pool, which holds their history and the chunks themselves.

    Args:
        q: [R, N, H]; row r of chunk c sits at position history_lens[c] + r - chunk_starts[c] and sees keys up to it.
        pages, layer: the cache and the layer.
        block_tables: int32 [C, S].
        chunk_starts: int32 [C + 1]; rows from chunk_starts[C] on are padding and give zeros.
        history_lens: int32 [C].
        scale, window, softcap, sinks, implementation, debug: see `paged_decode_attention`.

    Returns:
        [R, N, H] in q.dtype.

    Raises:
        ValueError: names the argument that does not fit.
    """
    if debug:
        check_page_ids("block_tables", block_tables, pages)
    function = ScoreFunction(scale, window, softcap)
    check(q, pages, block_tables, history_lens, sinks, function)
    if chunk_starts.shape != (history_lens.shape[0] + 1,):
        raise ValueError(f"chunk_starts: shape {chunk_starts.shape}, accepted: ({history_lens.shape[0] + 1},)")
    if q.shape[0] == 0 or history_lens.shape[0] == 0:
        return jnp.zeros_like(q)
    chosen = backend.choose("paged_prefill_attention", implementation, kernel_problem(q, pages))
    if chosen == "reference":
        return reference_prefill(
            q, pages, layer, block_tables, chunk_starts, history_lens, scale, window, softcap, sinks
        )
    config = prefill_config(q, pages)
    if scratch.pays(pages, block_tables):
        dtype = jnp.bfloat16 if q.dtype == jnp.bfloat16 else jnp.float16
        pages, block_tables = scratch.dequantised_pages(
            pages, layer, block_tables, chunk_starts, history_lens, dtype, config.pages_per_step, chosen == "interpret"
        )
        layer, config = jnp.int32(0), prefill_config(q, pages)
    return prefill_attention(
        q, pages, layer, block_tables, chunk_starts, history_lens, function, sinks, config, chosen == "interpret"
    )
