"""Room for stacks of arrays, and rows of a linear's parts put where the fused linear has them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import DTypeLike

ALIGNMENT = 64  # bytes
STRIP = 64  # bytes of a cache line: a transposed array is written line by line


def room(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Zeros at an address that JAX on a CPU takes over; any other array it copies, and a copy of a stack is 1 GB."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.zeros(num_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


def fill(out: np.ndarray, parts: Sequence[np.ndarray], num_runs: int) -> None:
    """Joins parts along N: in each of `num_runs` runs of the result, so many rows of the first part, of the second, ...

    qkv has a run for each kv head (its query heads, its key, its value), gate and up one for each tile, so that any
    tensor-parallel slice is contiguous.

    Args:
        out: [N, ...].
        parts: [N of the part, ...], with N (or N / 128 blocks of it) leading.
        num_runs: divides the rows of every part.
    """
    for place, part in zip(places(out, [len(part) for part in parts], num_runs), parts, strict=True):
        if part.ndim > 1 and part.strides[0] < part.strides[-1]:  # transposed: in strips that stay in a core's cache
            for start in range(0, part.shape[-1], STRIP):
                strip = np.s_[..., start : start + STRIP]
                place[strip] = part[strip].reshape(place[strip].shape)
        else:
            place[...] = part.reshape(place.shape)


def places(out: np.ndarray, sizes: Sequence[int], num_runs: int, axis: int = 0) -> list[np.ndarray]:
    """Views of `out` for parts of so many rows each along `axis`, which becomes (num_runs, rows in a run)."""
    before, after = out.shape[:axis], out.shape[axis + 1 :]
    runs = out.reshape(*before, num_runs, -1, *after)
    assert np.shares_memory(runs, out), "rows are written in place"
    ends = np.cumsum([0, *sizes]) // num_runs
    every = (slice(None),) * (axis + 1)
    return [runs[(*every, slice(start, end))] for start, end in pairwise(ends)]


def pick(x: np.ndarray, rows: tuple[int, ...] | None) -> np.ndarray:
    """Rows of a source; a contiguous run is a view."""
    if rows is None:
        return x
    if rows[-1] - rows[0] == len(rows) - 1:
        return x[rows[0] : rows[-1] + 1]
    return x[np.asarray(rows)]
