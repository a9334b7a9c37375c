"""Codes to packed words and back, offline, on the host.

The four steps of offline packing, restated for a compiler that owns the register layout:
  1. extend: a code counts as 16 bits wide, so that ldmatrix, which moves 16-bit elements, can carry it;
  2. redistribute: the 16/bits codes that will share a word come from rows W apart, so each plane of a tile of words
     is a contiguous run of K and x needs no permutation;
  3. compress: plane j goes to bits j*bits of the word;
  4. coalesce: the words of a (K tile, column) lie together, [tile, column, W], so a program's tile is one run.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from pallas_kernels.affine_linear.types import AffineWeights, PackedAffine

COLUMN_MULTIPLE = 64  # N is padded to it: the narrowest tile of columns that fills wgmma


def packing_problem(w: AffineWeights) -> str | None:
    """Why the packed form cannot hold `w`; None where it can."""
    if w.num_groups > 1 and (w.group_size % 32 or not math.log2(w.group_size).is_integer()):
        return f"group_size: {w.group_size}, accepted: 32, 64, 128, ... or K"
    return None


def plane_width(w: AffineWeights) -> int:
    """Words of a column in a K tile: 64 where groups and K allow it (half the loop iterations), else 32."""
    wide = (w.num_groups == 1 or w.group_size % 64 == 0) and w.K % (64 * 16 // w.bits) == 0
    return 64 if wide else 32


def pack(w: AffineWeights, width: int | None = None) -> PackedAffine:
    """Packs a stack of linears; a layer at a time, so memory stays at the result plus one layer.

    Args:
        w: the weights, on the host or a device.
        width: words of a column in a K tile, 32 or 64; None picks by `plane_width`.

    Raises:
        ValueError: the group size has no packed form (`packing_problem`).
    """
    if problem := packing_problem(w):
        raise ValueError(problem)
    width = width or plane_width(w)
    planes = 16 // w.bits
    L, tiles, padded = w.codes.shape[0], -(-w.K // (planes * width)), -(-w.N // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
    words = np.zeros((L, tiles, padded, width), np.uint16)
    for layer in range(L):
        _pack_layer(words[layer, :, : w.N], np.asarray(w.codes[layer]), planes)
    groups = 1 if w.num_groups == 1 else -(-tiles * planes * width // w.group_size)
    spare = ((0, 0), (0, groups - w.num_groups), (0, padded - w.N))
    kind, shift = _shift(w)
    return PackedAffine(
        jnp.asarray(words),
        jnp.asarray(np.pad(np.asarray(w.scale).swapaxes(1, 2), spare)),
        None if shift is None else jnp.asarray(np.pad(shift.swapaxes(1, 2), spare)),
        w.perm, kind, w.bits, w.group_size, w.K, w.N,
        offset_dtype="float16" if w.offset is None else str(w.offset.dtype),
    )  # fmt: skip


def _pack_layer(words: np.ndarray, codes: np.ndarray, planes: int) -> None:
    """Fills words uint16 [tiles, N, W], zeros at first, from codes uint8 [N, K]; rows past K count as code 0."""
    width = words.shape[2]
    for start in range(0, codes.shape[1], width):
        tile, plane = divmod(start // width, planes)
        rows = codes[:, start : start + width]
        words[tile, :, : rows.shape[1]] |= rows.astype(np.uint16) << (16 // planes * plane)


def _zero_points(scale: np.ndarray, offset: np.ndarray, bits: int) -> np.ndarray | None:
    """uint8 z with offset == -z * scale to the last bit of the offset's dtype, or None."""
    scale32 = scale.astype(np.float32)
    if bits == 8 and offset.dtype != np.float32:  # z * scale needs 19 bits: what 16 kept of it is a free offset
        return None
    zero = np.rint(np.divide(-offset.astype(np.float32), scale32, out=np.zeros_like(scale32), where=scale32 != 0))
    if zero.min() < 0 or zero.max() >= 2**bits or np.any(_offset_of(scale, zero, offset.dtype) != offset):
        return None
    return zero.astype(np.uint8)


def _offset_of(scale: np.ndarray, zero: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return (-zero.astype(np.float32) * scale.astype(np.float32)).astype(dtype)


def _shift(w: AffineWeights) -> tuple[str, np.ndarray | None]:
    """The kind of `w` and the shifts it needs."""
    if w.offset is None:
        return "symmetric", None
    scale, offset = np.asarray(w.scale), np.asarray(w.offset)
    zero = _zero_points(scale, offset, w.bits)
    if zero is not None:
        return "zero", zero
    return "offset", offset.astype(np.float32) + 2.0 ** (w.bits - 1) * scale.astype(np.float32)


def unpack(p: PackedAffine) -> AffineWeights:
    """The weights that were packed: codes, scale and zero points bit by bit, free offsets to float32 rounding."""
    words = np.asarray(p.words)[:, :, : p.N]
    L, tiles, _, width = words.shape
    planes = 16 // p.bits
    codes = np.empty((L, p.N, tiles, planes, width), np.uint8)
    for plane in range(planes):
        codes[:, :, :, plane] = (words >> (p.bits * plane) & (2**p.bits - 1)).swapaxes(1, 2)
    groups = -(-p.K // p.group_size)
    scale = np.asarray(p.scale)[:, :groups, : p.N].swapaxes(1, 2)
    offset = None
    if p.shift is not None:
        shift = np.asarray(p.shift)[:, :groups, : p.N].swapaxes(1, 2)
        dtype = jnp.dtype(p.offset_dtype)
        if p.kind == "zero":
            offset = _offset_of(scale, shift, dtype)
        else:
            offset = (shift - 2.0 ** (p.bits - 1) * scale.astype(np.float32)).astype(dtype)
    return AffineWeights(
        jnp.asarray(codes.reshape(L, p.N, -1)[:, :, : p.K]),
        jnp.asarray(scale),
        None if offset is None else jnp.asarray(offset),
        p.perm, p.bits, p.group_size,
    )  # fmt: skip
