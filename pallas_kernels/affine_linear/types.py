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

        value[l, k, n] = codes[l, n, k] * scale[l, n, k // group_size] + offset[l, n, k // group_size]

    The arrays are stored with K contiguous, as checkpoints hold them: XLA's CPU dots of few rows run 1.3x faster
    than on [L, K, N], a row of an embedding is contiguous, and loading transposes nothing. `affine_weights` takes
    the canonical [L, K, N] orientation and transposes.

    Attributes:
        codes: uint8 [L, N, K], 0 .. 2**bits - 1.
        scale: float16, bfloat16 or float32 [L, N, ceil(K / group_size)].
        offset: as scale; None is symmetric, offset = -2**(bits - 1) * scale.
        perm: int32 [L, K], row k of the codes multiplies x[perm[k]] (act-order); None is the identity.
        bits: 4 or 8.
        group_size: rows of K that share a scale, K for one scale per column.
    """

    codes: jax.Array
    scale: jax.Array
    offset: jax.Array | None = None
    perm: jax.Array | None = None
    bits: int = field(default=4, metadata=STATIC)
    group_size: int = field(default=128, metadata=STATIC)

    @property
    def K(self) -> int:
        return self.codes.shape[2]

    @property
    def N(self) -> int:
        return self.codes.shape[1]

    @property
    def num_groups(self) -> int:
        return -(-self.K // self.group_size)


def affine_weights(
    codes: Any, scale: Any, offset: Any = None, perm: Any = None, *, bits: int, group_size: int
) -> AffineWeights:
    """Builds and checks an AffineWeights from canonical arrays; group_size -1 means K.

    Args:
        codes: uint8 [L, K, N].
        scale, offset: [L, ceil(K / group_size), N].
        perm: int32 [L, K].
        bits, group_size: see `AffineWeights`.

    Raises:
        ValueError: names the argument that does not fit.
    """
    arrays = {"codes": codes, "scale": scale, "offset": offset, "perm": perm}
    arrays = {name: None if a is None else jnp.asarray(a) for name, a in arrays.items()}
    if arrays["codes"].ndim != 3:
        raise ValueError(f"codes: shape {arrays['codes'].shape}, accepted: [L, K, N]")
    group_size = arrays["codes"].shape[1] if group_size == -1 else group_size
    check_arrays(arrays, bits, group_size)
    k_last = {name: None if a is None else jnp.swapaxes(a, 1, 2) for name, a in arrays.items() if name != "perm"}
    return AffineWeights(**k_last, perm=arrays["perm"], bits=bits, group_size=group_size)


def check_arrays(arrays: dict[str, jax.Array | None], bits: int, group_size: int) -> None:
    """Holds canonical arrays ([L, K, N]) against the format.

    Raises:
        ValueError: names the argument, what came and what is accepted.
    """
    L, K, N = arrays["codes"].shape
    if bits not in (4, 8):
        raise ValueError(f"bits: {bits}, accepted: 4 or 8")
    if not 1 <= group_size <= K:
        raise ValueError(f"group_size: {group_size}, accepted: -1 or 1 .. K ({K})")
    grouped, floats = (L, -(-K // group_size), N), ("float16", "bfloat16", "float32")
    accepted = {
        "codes": ((L, K, N), ("uint8",)),
        "scale": (grouped, floats),
        "offset": (grouped, floats),
        "perm": ((L, K), ("int32",)),
    }
    for name, (shape, dtypes) in accepted.items():
        array = arrays[name]
        if array is None:
            continue
        if array.shape != shape:
            raise ValueError(f"{name}: shape {array.shape}, accepted: {shape}")
        if str(array.dtype) not in dtypes:
            raise ValueError(f"{name}: dtype {array.dtype}, accepted: {', '.join(dtypes)}")
