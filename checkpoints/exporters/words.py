"""Codes of a few bits into 32-bit words, the inverse of `checkpoints.words`."""

from __future__ import annotations

import numpy as np

from checkpoints.words import WORD_BITS

# AWQ's "gemm" order: nibble i of a word holds column _AWQ_COLUMNS[i] of its eight.
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes packed along the first axis, first code in the lowest bits, zeros behind the last.

    Args:
        codes: uint8 [K, N], below 2**bits.
        bits: 4 or 8.

    Returns:
        int32 [ceil(K * bits / 32), N].
    """
    per_word = WORD_BITS // bits
    padded = np.pad(codes, ((0, -len(codes) % per_word), (0, 0)))
    grouped = padded.reshape(-1, per_word, codes.shape[1])
    words = np.zeros((len(grouped), codes.shape[1]), np.uint32)
    for j in range(per_word):
        words |= grouped[:, j].astype(np.uint32) << np.uint32(j * bits)
    return words.view(np.int32)


def pack_awq(codes: np.ndarray) -> np.ndarray:
    """uint8 [R, N] of 4 bits, N a multiple of 8, in AWQ's order: int32 [R, N / 8]."""
    grouped = codes.reshape(len(codes), -1, len(_AWQ_COLUMNS))
    words = np.zeros(grouped.shape[:2], np.uint32)
    for nibble, column in enumerate(_AWQ_COLUMNS):
        words |= grouped[..., column].astype(np.uint32) << np.uint32(4 * nibble)
    return words.view(np.int32)
