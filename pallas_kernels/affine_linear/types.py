"""Affine-quantised weights of a stack of linears: the plain form, a code a byte."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AffineWeights:
    """Weights of L linears of one shape and format.

        value[l, k, n] = codes[l, k, n] * scale[l, k // group_size, n] + offset[l, k // group_size, n]

    Attributes:
        codes: uint8 [L, K, N], 0 .. 2**bits - 1.
        scale: float16, bfloat16 or float32 [L, ceil(K / group_size), N].
        offset: as scale; None is symmetric, offset = -2**(bits - 1) * scale.
        perm: int32 [L, K], row k of the codes multiplies x[perm[k]] (act-order); None is the identity.
        bits: 4 or 8.
        group_size: rows that share a scale, K for one scale per column.
        K: input width.
        N: output width.
    """

    codes: jax.Array
    scale: jax.Array
    offset: jax.Array | None = None
    perm: jax.Array | None = None
    bits: int = field(default=4, metadata=STATIC)
    group_size: int = field(default=128, metadata=STATIC)
    K: int = field(default=0, metadata=STATIC)
    N: int = field(default=0, metadata=STATIC)

    @property
    def num_groups(self) -> int:
        return -(-self.K // self.group_size)


def affine_weights(
    codes: Any, scale: Any, offset: Any = None, perm: Any = None, *, bits: int, group_size: int
) -> AffineWeights:
    """Builds and checks an AffineWeights (its attributes say the shapes); group_size -1 means K.

    Raises:
        ValueError: names the argument that does not fit.
    """
    codes, scale = jnp.asarray(codes), jnp.asarray(scale)
    if codes.ndim != 3:
        raise ValueError(f"codes: shape {codes.shape}, accepted: [L, K, N]")
    _, K, N = codes.shape
    offset = None if offset is None else jnp.asarray(offset)
    perm = None if perm is None else jnp.asarray(perm)
    w = AffineWeights(codes, scale, offset, perm, bits, K if group_size == -1 else group_size, K, N)
    check_weights(w)
    return w


def check_weights(w: AffineWeights) -> None:
    """Holds the arrays of `w` against its static fields.

    Raises:
        ValueError: names the argument, what came and what is accepted.
    """
    if w.bits not in (4, 8):
        raise ValueError(f"bits: {w.bits}, accepted: 4 or 8")
    if not 1 <= w.group_size <= w.K:
        raise ValueError(f"group_size: {w.group_size}, accepted: -1 or 1 .. K ({w.K})")
    L = w.codes.shape[0]
    grouped = (L, w.num_groups, w.N)
    floats = ("float16", "bfloat16", "float32")
    for name, array, shape, dtypes in (
        ("codes", w.codes, (L, w.K, w.N), ("uint8",)),
        ("scale", w.scale, grouped, floats),
        ("offset", w.offset, grouped, floats),
        ("perm", w.perm, (L, w.K), ("int32",)),
    ):
        if array is None:
            continue
        if array.shape != shape:
            raise ValueError(f"{name}: shape {array.shape}, accepted: {shape}")
        if str(array.dtype) not in dtypes:
            raise ValueError(f"{name}: dtype {array.dtype}, accepted: {', '.join(dtypes)}")
