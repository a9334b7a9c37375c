"""Affine-quantised weights of a stack of linears: the plain form, a code a byte, and the kernels' packed form."""

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

    The arrays are stored with K contiguous, as checkpoints hold them: a row of an embedding is contiguous, and
    loading transposes nothing. `affine_weights` takes the canonical [L, K, N] orientation and transposes.

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
    arrays: dict[str, Any] = {"codes": codes, "scale": scale, "offset": offset, "perm": perm}
    arrays = {name: None if a is None else jnp.asarray(a) for name, a in arrays.items()}
    if arrays["codes"].ndim != 3:
        raise ValueError(f"codes: shape {arrays['codes'].shape}, accepted: [L, K, N]")
    group_size = arrays["codes"].shape[1] if group_size == -1 else group_size
    check_arrays(arrays, bits, group_size)
    k_last: dict[str, Any] = {
        name: None if a is None else jnp.swapaxes(a, 1, 2) for name, a in arrays.items() if name != "perm"
    }
    return AffineWeights(**k_last, perm=arrays["perm"], bits=bits, group_size=group_size)


def check_arrays(arrays: dict[str, Any], bits: int, group_size: int) -> None:
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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedAffine:
    """AffineWeights as the kernels read them; `packing.pack` makes one, `packing.unpack` is its exact inverse.

        codes[k, n] = words[tile, n, r] >> (bits * plane) & (2**bits - 1),  k = (tile * num_planes + plane) * W + r
        value = (code - 2**(bits-1)) * scale            kind "symmetric"
              = (code - shift) * scale                  kind "zero"
              = (code - 2**(bits-1)) * scale + shift    kind "offset"

    Attributes:
        words: uint16 [L, num_tiles, N padded, W]; a tile of K is num_planes * W rows.
        scale: [L, groups, N padded] in the dtype that came.
        shift: uint8 zero points or float32 offsets, shaped as scale; None where symmetric.
        perm: int32 [L, K] or None, as in AffineWeights.
        kind: "symmetric", "zero" or "offset".
        bits, group_size, K, N: as in AffineWeights, N without padding.
        offset_dtype: dtype of the offsets that were packed, for `unpack`.
    """

    words: jax.Array
    scale: jax.Array
    shift: jax.Array | None = None
    perm: jax.Array | None = None
    kind: str = field(default="symmetric", metadata=STATIC)
    bits: int = field(default=4, metadata=STATIC)
    group_size: int = field(default=128, metadata=STATIC)
    K: int = field(default=0, metadata=STATIC)
    N: int = field(default=0, metadata=STATIC)
    offset_dtype: str = field(default="float16", metadata=STATIC)

    @property
    def layout(self) -> PackedLayout:
        return PackedLayout(
            self.kind, self.bits, self.group_size, self.K, self.words.shape[3], self.words.shape[1], self.scale.shape[1]
        )


@dataclass(frozen=True)
class PackedLayout:
    """The static half of a PackedAffine: what a kernel knows of the weights at trace time."""

    kind: str
    bits: int
    group_size: int
    K: int
    plane_width: int
    num_tiles: int
    num_groups: int

    @property
    def num_planes(self) -> int:
        return 16 // self.bits

    @property
    def tile_k(self) -> int:
        return self.num_planes * self.plane_width

    @property
    def planes_per_group(self) -> int:
        """Planes of a tile under one scale; all of them where a group spans tiles."""
        if self.num_groups == 1:
            return self.num_planes
        return min(self.num_planes, self.group_size // self.plane_width)

    @property
    def groups_per_tile(self) -> int:
        return self.num_planes // self.planes_per_group

    def group_of_plane(self, tile: Any, plane: int) -> Any:
        """Row of scale and shift for plane `plane` of K tile `tile`."""
        if self.num_groups == 1:
            return 0
        if self.group_size >= self.tile_k:
            return tile // (self.group_size // self.tile_k)
        return tile * (self.tile_k // self.group_size) + plane * self.plane_width // self.group_size
