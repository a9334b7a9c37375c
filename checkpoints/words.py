"""Codes of a few bits out of 32-bit words, as quantised checkpoints pack them: first code in the lowest bits."""

from __future__ import annotations

import math

import numpy as np

WORD_BITS = 32
# AWQ's "gemm" order: nibble i of a word holds column _AWQ_COLUMNS[i] of its eight.
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
# Masks of a word: the low nibble of each byte, and every second byte.
_LOW, _EVEN = np.uint32(0x0F0F0F0F), np.uint32(0x00FF00FF)
_ROWS_AT_ONCE, _PERIODS_AT_ONCE = 64, 8  # input and output of a pass over 10,000 columns stay in a core's cache


def num_words(count: int, bits: int, *, cut: bool = False) -> int:
    """Words that hold `count` codes; `cut` is whether a code may go on in the next word."""
    return -(-count * bits // WORD_BITS) if cut else -(-count // (WORD_BITS // bits))


def unpack(words: np.ndarray, bits: int, count: int, *, cut: bool = False) -> np.ndarray:
    """Codes packed along the first axis.

    Args:
        words: int32 [W, N].
        bits: of a code, 1 .. 8.
        count: codes to take; the words hold at least as many.
        cut: where 32 is no multiple of `bits`, a code goes on in the next word (GPTQ) instead of starting there.

    Returns:
        uint8 [count, N].
    """
    period = WORD_BITS // math.gcd(WORD_BITS, bits) if cut else WORD_BITS // bits
    step = max(1, period * bits // WORD_BITS)  # words after which a code starts with a word again, `period` codes later
    num_periods, mask = -(-words.shape[0] // step), np.uint32((1 << bits) - 1)
    if words.shape[0] % step:
        words = np.pad(words, ((0, num_periods * step - words.shape[0]), (0, 0)))
    grouped = words.view(np.uint32).reshape(num_periods, step, -1)
    codes = np.empty((num_periods, period, words.shape[1]), np.uint8)
    for start in range(0, num_periods, _PERIODS_AT_ONCE):
        some = slice(start, start + _PERIODS_AT_ONCE)
        for j in range(period):
            word, shift = divmod(j * bits, WORD_BITS)
            found = grouped[some, word] >> np.uint32(shift)
            if shift + bits > WORD_BITS:
                found |= grouped[some, word + 1] << np.uint32(WORD_BITS - shift)
            np.bitwise_and(found, mask, out=codes[some, j], casting="unsafe")
    return codes.reshape(num_periods * period, -1)[:count]


def unpack_rows(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Codes packed along the last axis, none of them cut: int32 [R, W] -> uint8 [R, count]."""
    if 8 % bits:
        return np.ascontiguousarray(unpack(np.ascontiguousarray(words.T), bits, count).T)
    raw, mask = np.ascontiguousarray(words).view(np.uint8), np.uint8((1 << bits) - 1)
    if bits == 8:
        return raw[:, :count]
    codes = np.empty((*raw.shape, 8 // bits), np.uint8)
    for j in range(8 // bits):
        shifted = raw >> np.uint8(j * bits) if j else raw
        np.bitwise_and(shifted, mask, out=codes[..., j])
    return codes.reshape(words.shape[0], -1)[:, :count]


def unpack_awq(words: np.ndarray) -> np.ndarray:
    """int32 [R, W] in AWQ's order -> uint8 codes [R, 8 W] of 4 bits."""
    num_rows, num_row_words = words.shape
    codes = np.empty((num_rows, num_row_words, 8), np.uint8)
    raw = np.ascontiguousarray(words).view(np.uint8).reshape(num_rows, num_row_words, 4)
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        for j in range(4):
            np.bitwise_and(raw[rows, :, j], 0x0F, out=codes[rows, :, _AWQ_COLUMNS[2 * j]])
            np.right_shift(raw[rows, :, j], 4, out=codes[rows, :, _AWQ_COLUMNS[2 * j + 1]])
    return codes.reshape(num_rows, -1)


def merge_awq(words: np.ndarray) -> np.ndarray:
    """Codes of four runs of rows together, run j in bits 4 * j, without a code on its own.

    A word is eight codes; four of them, one of each run, are transposed as a 4 x 4 matrix of nibbles is: pairs of runs
    to a byte of two codes each, then pairs of those to two bytes, which stand in AWQ's order as columns 0 and 1, 4 and
    5 (from even nibbles), 2 and 3, 6 and 7 (from odd ones).

    Args:
        words: int32 [4, R, W] in AWQ's order.

    Returns:
        uint16 [R, 8 W].
    """
    a, b, c, d = words.view(np.uint32)
    merged = np.empty((*a.shape, 4), np.uint32)
    even = (a & _LOW) | (b & _LOW) << np.uint32(4), (c & _LOW) | (d & _LOW) << np.uint32(4)
    odd = (a >> np.uint32(4) & _LOW) | (b & ~_LOW), (c >> np.uint32(4) & _LOW) | (d & ~_LOW)
    for j, (first, second) in enumerate((even, odd)):
        merged[..., j] = (first & _EVEN) | (second & _EVEN) << np.uint32(8)
        merged[..., 2 + j] = (first >> np.uint32(8) & _EVEN) | (second & ~_EVEN)
    return merged.view(np.uint16).reshape(a.shape[0], -1)
