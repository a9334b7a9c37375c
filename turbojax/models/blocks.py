"""Stacks of layers that come to the device in blocks, so that the host never holds a whole one."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from turbojax.models.packing import agreed
from turbojax.models.spec import Dense, GroupedAffine, LinearSpec


def layers_per_block(spec: LinearSpec, itemsize: int, block_bytes: int | None) -> int:
    """How many layers of a linear, one at least, take no more than `block_bytes`; `itemsize` is of dense ones."""
    if block_bytes is None:
        return 1 << 31
    storage = spec.storage
    bits = 8 * itemsize if isinstance(storage, Dense) else storage.bits if isinstance(storage, GroupedAffine) else 8
    return max(1, block_bytes * 8 // (spec.in_dim * spec.out_dim * bits))


def joined_blocks(blocks: Iterable[Any], num_layers: int) -> Any:
    """One tree of stacks [num_layers, ...] from trees of some layers each; beside it there is one block at a time."""
    joined, start = None, 0
    for block in blocks:
        size = jax.tree.leaves(block)[0].shape[0]
        if size == num_layers:
            return block
        if joined is None:
            joined = jax.tree.map(lambda leaf: jnp.zeros((num_layers, *leaf.shape[1:]), leaf.dtype), block)
        joined, block = agreed([joined, block])
        joined = jax.tree.map(functools.partial(_put, start=start), joined, block)
        start += size
    assert start == num_layers, f"{start} of {num_layers} layers"
    return joined


@functools.partial(jax.jit, donate_argnames="stack")
def _put(stack: jax.Array, block: jax.Array, start: int) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(stack, block, start, 0)
