"""The matrix that spreads a head's few large dims over all of them before K is rounded to few levels."""

from __future__ import annotations

import functools

import numpy as np


def block_of(head_dim: int) -> int:
    """The largest power of two that divides H: dims that one block of the matrix mixes."""
    return head_dim & -head_dim


@functools.cache
def hadamard_signs(head_dim: int) -> np.ndarray:
    """float32 [H, H], symmetric, of -1, 0 and 1: blocks of Sylvester's Hadamard matrix on the diagonal.

    Times `hadamard_scale(head_dim)` it is orthogonal, and its own inverse. Its entries are exact in every dtype.
    """
    block = np.ones((1, 1), np.float32)
    while block.shape[0] < block_of(head_dim):
        block = np.block([[block, block], [block, -block]])
    return np.kron(np.eye(head_dim // block.shape[0], dtype=np.float32), block)


def hadamard_scale(head_dim: int) -> float:
    """What makes the rows of `hadamard_signs` unit vectors."""
    return float(block_of(head_dim) ** -0.5)
