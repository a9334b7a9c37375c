"""What the shards of a model tell one another: sums and joined columns; nothing where there is one shard.

Each shard runs the same step on its own slices, inside `jax.shard_map` over the mesh axis `AXIS`.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.affine_linear import AffineWeights, PackedAffine, sum_partial
from turbojax.core.linear import at_layer, embed, linear_partial
from turbojax.core.weights import Linear

AXIS = "tp"


def row_parallel(x: jax.Array, w: Linear, layer: jax.Array, num_shards: int) -> jax.Array:
    """A linear whose inputs are cut between the shards: the one all-reduce behind attention, and behind the MLP.

    Args:
        x: [M, K of the shard].
        w: the shard's part; a bias is the first shard's alone.
        layer: int32 scalar.
        num_shards: how many there are.

    Returns:
        Partial sums [S, M, N] where there is one shard, else the sum over the shards [1, M, N] in x.dtype.
    """
    if num_shards == 1:
        return linear_partial(x, w, layer)
    if isinstance(w.weight, AffineWeights | PackedAffine) and w.weight.perm is not None:
        # Rows of one group come from inputs anywhere, so shards hold whole groups, and look their inputs up in all.
        everywhere = lax.all_gather(x, AXIS, axis=1, tiled=True)
        x = jnp.take(everywhere, at_layer(w.weight.perm, layer), axis=1)
        w = replace(w, weight=replace(w.weight, perm=None))
    return lax.psum(sum_partial(linear_partial(x, w, layer), x.dtype), AXIS)[None]


def joined_columns(y: jax.Array, num_shards: int) -> jax.Array:
    """[M, N of a shard] of all shards side by side: [M, num_shards * N]."""
    return y if num_shards == 1 else lax.all_gather(y, AXIS, axis=1, tiled=True)


def embed_rows(table: Linear, token_ids: jax.Array, dtype: jnp.dtype, num_shards: int) -> jax.Array:
    """`linear.embed` where each shard has a run of the vocabulary: the one that has a token gives its row, exactly."""
    if num_shards == 1:
        return embed(table, token_ids, dtype)
    weight = table.weight if isinstance(table.weight, jax.Array) else table.weight.codes  # type: ignore[union-attr]
    num_tokens = weight.shape[1]
    at = token_ids - lax.axis_index(AXIS) * num_tokens
    is_here = (at >= 0) & (at < num_tokens)
    rows = embed(table, jnp.where(is_here, at, 0), dtype)
    return lax.psum(jnp.where(is_here[:, None], rows, jnp.zeros_like(rows)), AXIS)
