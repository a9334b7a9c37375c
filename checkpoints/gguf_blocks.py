"""GGUF blocks to canonical tensors: codes stay codes, with nothing large beside the result.

Layouts of 32 values: Q4_0 = f16 d, 16 bytes; Q4_1 = f16 d, f16 m, 16 bytes; Q8_0 = f16 d, 32 int8. Byte j
of 16 holds value j in its low nibble, value j + 16 in its high one. Q4_K: 256 values in 8 groups of 32.
Q5_0, Q5_1 and Q5_K are the same with a fifth bit of each value apart, and are kept in codes of 8 bits.
"""

from __future__ import annotations

import gguf
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType as Kind

from checkpoints.affine import AffineTensor
from checkpoints.tensors import AffineFormat, DenseFormat, TensorFormat

GROUP_LEN = 32

_DENSE = {
    Kind.F32: np.dtype(np.float32),
    Kind.F16: np.dtype(np.float16),
    Kind.BF16: np.dtype(ml_dtypes.bfloat16),
    Kind.F64: np.dtype(np.float64),
}
_AFFINE = {
    Kind.Q4_0: AffineFormat(4, GROUP_LEN, has_offset=False),
    Kind.Q4_1: AffineFormat(4, GROUP_LEN, has_offset=True),
    Kind.Q8_0: AffineFormat(8, GROUP_LEN, has_offset=False),
    Kind.Q4_K: AffineFormat(4, GROUP_LEN, has_offset=True),
    Kind.Q5_0: AffineFormat(8, GROUP_LEN, has_offset=True),
    Kind.Q5_1: AffineFormat(8, GROUP_LEN, has_offset=True),
    Kind.Q5_K: AffineFormat(8, GROUP_LEN, has_offset=True),
}


def format_of(kind: Kind, num_dims: int) -> TensorFormat:
    """What `decode` makes of a tensor: only matrices keep their codes."""
    if num_dims == 2 and kind in _AFFINE:
        return _AFFINE[kind]
    return DenseFormat(_DENSE[kind].name if kind in _DENSE else "float32")


def is_dequantised(kind: Kind, num_dims: int) -> bool:
    """Whether a tensor's codes become floats because they have no canonical form: groups of 16, or values by table."""
    return num_dims == 2 and kind not in _DENSE and kind not in _AFFINE


def can_decode(kind: Kind) -> bool:
    """Whether this module or the gguf package's dequantiser reads the kind."""
    if kind in _DENSE or kind in _AFFINE:
        return True
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    try:
        gguf.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def decode(raw: np.ndarray, kind: Kind) -> np.ndarray | AffineTensor:
    """Decodes a tensor.

    Args:
        raw: uint8 [..., bytes of a row of K], as in the file.
        kind: the file's encoding.

    Returns:
        Dense [..., K], or for matrices of the kinds in `_AFFINE` an AffineTensor of K x N.
    """
    if kind in _DENSE:
        return np.ascontiguousarray(raw).view(_DENSE[kind])
    if raw.ndim != 2 or kind not in _AFFINE:
        return gguf.dequantize(raw, kind)
    blocks = raw.reshape(raw.shape[0], -1, gguf.GGML_QUANT_SIZES[kind][1])
    return _READERS[kind](blocks)


def _affine(codes: np.ndarray, scale: np.ndarray, offset: np.ndarray | None, bits: int) -> AffineTensor:
    """From rows of N to the canonical [K, N] by transposed views: K stays contiguous, as packers want it."""
    return AffineTensor(codes.T, scale.T, None if offset is None else offset.T, bits, GROUP_LEN)


def _f16(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte `at` of each block: [N, B, bytes] -> [N, B]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def _codes8(packed: np.ndarray) -> np.ndarray:
    """int8 [N, B, 32] -> uint8 codes [N, 32 B]: q + 128, which is flipping the top bit."""
    return (packed ^ np.uint8(0x80)).reshape(packed.shape[0], -1)


def _codes4(packed: np.ndarray) -> np.ndarray:
    """Nibbles [N, B, J] -> codes [N, 2 J B]: in each block J low nibbles, then J high ones."""
    num_rows, num_blocks, num_bytes = packed.shape
    codes = np.empty((num_rows, num_blocks, 2, num_bytes), np.uint8)
    np.bitwise_and(packed, 0x0F, out=codes[:, :, 0])
    np.right_shift(packed, 4, out=codes[:, :, 1])
    return codes.reshape(num_rows, -1)


def _fifth_bits(packed: np.ndarray) -> np.ndarray:
    """Bits [N, B, 4], value j at bit j -> uint8 [N, 32 B] of 0 or 16."""
    return np.unpackbits(packed, axis=-1, bitorder="little").reshape(packed.shape[0], -1) << np.uint8(4)


def _q4_0(blocks: np.ndarray) -> AffineTensor:
    return _affine(_codes4(blocks[..., 2:]), _f16(blocks, 0), None, 4)


def _q4_1(blocks: np.ndarray) -> AffineTensor:
    return _affine(_codes4(blocks[..., 4:]), _f16(blocks, 0), _f16(blocks, 2), 4)


def _q8_0(blocks: np.ndarray) -> AffineTensor:
    return _affine(_codes8(blocks[..., 2:]), _f16(blocks, 0), None, 8)


def _q5_0(blocks: np.ndarray) -> AffineTensor:
    """f16 d, 4 bytes of fifth bits, 16 bytes: d (q - 16), whose offset float16 holds too: a change of the exponent."""
    scale = _f16(blocks, 0).astype(np.float32)
    return _affine(_codes4(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6]), scale, -16 * scale, 8)


def _q5_1(blocks: np.ndarray) -> AffineTensor:
    """f16 d, f16 m, 4 bytes of fifth bits, 16 bytes: d q + m."""
    return _affine(_codes4(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8]), _f16(blocks, 0), _f16(blocks, 2), 8)


def _q4_k(blocks: np.ndarray) -> AffineTensor:
    """`_k_params`, then 128 bytes, of which 32 hold two groups: the first in their low nibbles."""
    quarters = blocks[..., 16:].reshape(blocks.shape[0], -1, 32)
    return _affine(_codes4(quarters), *_k_params(blocks), 4)


def _q5_k(blocks: np.ndarray) -> AffineTensor:
    """As Q4_K with 32 bytes before the nibbles: bit g of byte j is the fifth bit of value j of group g."""
    num_rows, num_blocks, _ = blocks.shape
    nibbles = _codes4(blocks[..., 48:].reshape(num_rows, num_blocks * 4, 32))
    groups = np.arange(8, dtype=np.uint8)[:, None]
    fifth = (blocks[..., None, 16:48] >> groups & np.uint8(1)) << np.uint8(4)  # [N, B, group, value]
    return _affine(nibbles | fifth.reshape(num_rows, -1), *_k_params(blocks), 8)


def _k_params(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """f16 d, f16 dmin, 12 bytes of eight 6-bit (sc, m): scale d sc and offset -dmin m of groups of 32.

    The products are exact in float32.
    """
    num_rows = blocks.shape[0]
    low, high, mixed = (blocks[..., at : at + 4] for at in (4, 8, 12))
    sc = np.concatenate([low & 0x3F, (mixed & 0x0F) | ((low >> 2) & 0x30)], axis=-1)
    m = np.concatenate([high & 0x3F, (mixed >> 4) | ((high >> 2) & 0x30)], axis=-1)
    d, dmin = (_f16(blocks, at).astype(np.float32)[..., None] for at in (0, 2))
    return (d * sc).reshape(num_rows, -1), (-dmin * m).reshape(num_rows, -1)


_READERS = {
    Kind.Q4_0: _q4_0,
    Kind.Q4_1: _q4_1,
    Kind.Q8_0: _q8_0,
    Kind.Q4_K: _q4_k,
    Kind.Q5_0: _q5_0,
    Kind.Q5_1: _q5_1,
    Kind.Q5_K: _q5_k,
}
