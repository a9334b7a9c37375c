"""One step that scores a candidate against the float32 model: the precision of each layer's K and V is an input."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from pallas_kernels.kv_cache import KVPages, write_kv
from pallas_kernels.kv_cache.pages import BITS
from pallas_kernels.kv_cache.quantise import quantise
from pallas_kernels.rope_write.reference import attention_inputs, turn_keys
from turbojax.core.decoder import forward, logits_of
from turbojax.core.scoring import ROWS_PER_BLOCK
from turbojax.core.state import EngineState, KVPool
from turbojax.core.steps import PrefillBatch, chunk_rows
from turbojax.core.weights import Weights


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RoundedPages(KVPages):
    """Pages of 16 bits whose K and V are rounded as pages of fewer bits would round them.

    One compiled step serves every policy: the precision of a layer is data, where the engine's is static.

    Attributes:
        modes: int32 [L, 2], for K and V an index into `BITS`.
        hadamard: bool [L], queries and keys are turned first.
        k_scale: float32 [L, K, H], see `rope_write`.
    """

    modes: jax.Array
    hadamard: jax.Array
    k_scale: jax.Array


@struct.dataclass
class Comparison:
    """Of every row, `[R]` each.

    Attributes:
        logprobs: float32, of the target.
        kl: float32, KL(oracle || candidate) of the next token's distribution, in nats.
        agrees: bool, both have the same likeliest token.
    """

    logprobs: jax.Array
    kl: jax.Array
    agrees: jax.Array


def rounded(x: jax.Array, mode: jax.Array) -> jax.Array:
    """Each vector along the last axis as the KV cache would give it back at `BITS[mode]` bits."""

    def at(bits: int) -> Any:
        def back(x: jax.Array) -> jax.Array:
            if bits == 16:
                return x
            codes, params = quantise(x, bits)
            scale, offset = (params[..., i : i + 1].astype(jnp.float32) for i in (0, 1))
            return (codes.astype(jnp.float32) * scale + offset).astype(x.dtype)

        return back

    return lax.switch(mode, [at(bits) for bits in BITS], x)


def rounding_write(
    pages: RoundedPages, qkv: jax.Array, layer: jax.Array, page_ids: jax.Array, page_offsets: jax.Array,
    cos: jax.Array, sin: jax.Array, *, bias: Any, norm: Any, dtype: jnp.dtype, hadamard: bool,
    k_scale: jax.Array | None,
) -> tuple[KVPages, jax.Array]:  # fmt: skip
    """`rope_write` for `RoundedPages`."""
    assert not hadamard, "the spec of an audited model leaves its keys as they are"
    del k_scale  # the pages' own
    heads = pages.num_kv_heads, pages.head_dim
    q, k, v = attention_inputs(qkv, *heads, layer, cos, sin, bias, norm, dtype)
    turned = pages.hadamard[layer]
    q, k = (jnp.where(turned, *pair) for pair in zip(turn_keys(q, k, pages.k_scale[layer]), (q, k), strict=True))
    k, v = rounded(k, pages.modes[layer, 0]), rounded(v, pages.modes[layer, 1])
    return write_kv(pages, k, v, layer, page_ids, page_offsets), q


def rounding_pool(pool: KVPool, modes: jax.Array, hadamard: jax.Array, k_scale: jax.Array) -> KVPool:
    """The pool with a precision for each layer of the model: int32 [L, 2], bool [L], float32 [L, K, H]."""
    segments, first = [], 0
    for pages in pool.segments:
        of_segment = slice(first, first + pages.k.shape[0])
        first = of_segment.stop
        segments.append(
            RoundedPages(
                pages.k, pages.v, None, None, pages.k_bits, pages.v_bits, pages.head_dim,
                modes[of_segment], hadamard[of_segment], k_scale[of_segment],
            )
        )  # fmt: skip
    return KVPool(tuple(segments))


def plain_pool(pool: KVPool) -> KVPool:
    """The pool without them."""
    return KVPool(tuple(KVPages(p.k, p.v, None, None, p.k_bits, p.v_bits, p.head_dim) for p in pool.segments))


def hidden_of(weights: Weights, state: EngineState, batch: PrefillBatch) -> tuple[EngineState, jax.Array]:
    """The state, and the hidden states [R, D] that the oracle's logits come from: they are kept instead of those."""
    pool, hidden = forward(weights, state.pool, chunk_rows(state.slots, batch, state.pool.page_len))
    return replace(state, pool=pool), hidden


def compare(
    weights: Weights,
    oracle: Weights,
    oracle_hidden: jax.Array,
    state: EngineState,
    batch: PrefillBatch,
    targets: jax.Array,
    modes: jax.Array,
    hadamard: jax.Array,
    k_scale: jax.Array,
) -> tuple[EngineState, Comparison]:
    """Scores chunks with a candidate, and holds its next-token distributions against the oracle's.

    Logits of both exist for `ROWS_PER_BLOCK` rows at a time, in float32.

    Args:
        weights: the candidate's; its spec keeps 16 bits for K and V.
        oracle: the reference's, of which only the head runs.
        oracle_hidden: [R, D], of `hidden_of`.
        state: donated where the caller jits it so.
        batch, targets: see `scoring.score`.
        modes, hadamard, k_scale: see `rounding_pool`.
    """
    rows = chunk_rows(state.slots, batch, state.pool.page_len)
    pool, hidden = forward(weights, rounding_pool(state.pool, modes, hadamard, k_scale), rows, rounding_write)
    num_rows = targets.shape[0]
    block = min(ROWS_PER_BLOCK, num_rows)

    def blocks(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, -num_rows % block), *[(0, 0)] * (x.ndim - 1))).reshape(-1, block, *x.shape[1:])

    def of_block(args: tuple[jax.Array, jax.Array, jax.Array]) -> Comparison:
        hidden, reference, targets = args
        got = jax.nn.log_softmax(logits_of(weights, hidden), axis=-1)
        want = jax.nn.log_softmax(logits_of(oracle, reference), axis=-1)
        return Comparison(
            logprobs=jnp.take_along_axis(got, targets[:, None], axis=-1)[:, 0],
            kl=jnp.sum(jnp.exp(want) * (want - got), axis=-1),
            agrees=jnp.argmax(got, axis=-1) == jnp.argmax(want, axis=-1),
        )

    found = lax.map(of_block, (blocks(hidden), blocks(oracle_hidden), blocks(targets)))
    return replace(state, pool=plain_pool(pool)), jax.tree.map(lambda x: x.reshape(-1)[:num_rows], found)
