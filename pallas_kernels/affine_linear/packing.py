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

import jax
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
    words = np.zeros(words_shape(w, width), np.uint16)
    for layer in range(w.codes.shape[0]):
        pack_codes(words[layer, :, : w.N], np.asarray(w.codes[layer]), w.bits)
    return with_words(w, words)


def words_shape(w: AffineWeights, width: int | None = None) -> tuple[int, int, int, int]:
    """(L, tiles, N padded, W) of the packed codes of `w`, which start as zeros; only the shape of its codes matters."""
    L, N, K = w.codes.shape
    width = width or plane_width(w)
    return L, -(-K // (16 // w.bits * width)), -(-N // COLUMN_MULTIPLE) * COLUMN_MULTIPLE, width


def with_words(w: AffineWeights, words: np.ndarray) -> PackedAffine:
    """`w` with words that `pack_codes` has filled in place of its codes, of which only the shape is looked at."""
    _, tiles, padded, width = words.shape
    groups = 1 if w.num_groups == 1 else -(-tiles * (16 // w.bits) * width // w.group_size)
    spare = ((0, 0), (0, groups - w.num_groups), (0, padded - w.N))
    kind, shift = _shift(w)
    return PackedAffine(  # put, not converted: jnp.asarray compiles a program for each shape
        jax.device_put(words),
        jax.device_put(np.pad(np.asarray(w.scale).swapaxes(1, 2), spare)),
        None if shift is None else jax.device_put(np.pad(shift.swapaxes(1, 2), spare)),
        w.perm, kind, w.bits, w.group_size, w.K, w.N,
        offset_dtype="float16" if w.offset is None else str(w.offset.dtype),
    )  # fmt: skip


def pack_codes(words: np.ndarray, codes: np.ndarray, bits: int) -> None:
    """Packs one linear, or some of its columns.

    Args:
        words: uint16 [tiles, ..., W] to fill; the axes between are N together.
        codes: uint8 [N, K], fastest where either axis is contiguous; codes past K count as 0.
        bits: of a code.
    """
    N, planes, width = codes.shape[0], 16 // bits, words.shape[-1]
    for tile, place in enumerate(words):
        some = codes[:, tile * planes * width : (tile + 1) * planes * width]
        if some.shape[1] < planes * width:
            some = np.pad(some, ((0, 0), (0, planes * width - some.shape[1])))
        if some.strides[0] < some.strides[1]:  # columns lie together: one transposition, of words, at the end
            merged = _merged(some.T.reshape(planes, width, N), bits).T
        else:
            merged = _merged(np.moveaxis(some.reshape(N, planes, width), 1, 0), bits)
        place[...] = merged.reshape(place.shape)


def _merged(planes: np.ndarray, bits: int) -> np.ndarray:
    """uint8 codes [planes, ...] -> uint16 [...], plane j in bits j * bits."""
    if bits == 4:
        planes = planes[1::2] << np.uint8(4) | planes[0::2]
    return planes[1].astype(np.uint16) << np.uint16(8) | planes[0]


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
