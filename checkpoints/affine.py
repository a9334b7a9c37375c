"""The canonical quantised tensor: integer codes with a float scale and offset for each group of inputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_FLOATS = (np.dtype(np.float16), np.dtype(np.float32))
_ROWS_AT_ONCE = 1024  # rows of K that dequantize() expands at a time: bounds its float32 temporaries


@dataclass(frozen=True, eq=False)
class AffineTensor:
    """A linear's weight in codes, K inputs by N outputs.

        value[k, n] = codes[k, n] * scale[k // group_size, n] + offset[k // group_size, n]

    `offset` None means symmetric: offset = -(2**(bits - 1)) * scale. Row k of codes multiplies x[perm[k]];
    `perm` None means x[k]. The arrays may be views of any strides (those of GGUF have K contiguous).

    Attributes:
        codes: uint8 [K, N], 0 .. 2**bits - 1.
        scale: float16 or float32 [ceil(K / group_size), N].
        offset: of scale's dtype and shape, or None.
        bits: 1 .. 8.
        group_size: inputs that share a scale; the last group may be shorter.
        perm: int32 [K], a permutation of 0 .. K - 1 (act-order), or None.
    """

    codes: np.ndarray
    scale: np.ndarray
    offset: np.ndarray | None
    bits: int
    group_size: int
    perm: np.ndarray | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            raise ValueError(f"bits must be 1 .. 8, got {self.bits}")
        if self.group_size < 1:
            raise ValueError(f"group_size must be positive, got {self.group_size}")
        if self.codes.dtype != np.uint8 or self.codes.ndim != 2:
            raise ValueError(f"codes must be uint8 [K, N], got {self.codes.dtype} {list(self.codes.shape)}")
        expected = (self.num_groups, self.codes.shape[1])
        if self.scale.dtype not in _FLOATS or self.scale.shape != expected:
            raise ValueError(
                f"scale must be float16 or float32 {list(expected)}, got {self.scale.dtype} {list(self.scale.shape)}"
            )
        if self.offset is not None and (self.offset.dtype, self.offset.shape) != (self.scale.dtype, expected):
            raise ValueError(
                f"offset must be {self.scale.dtype} {list(expected)} like scale, "
                f"got {self.offset.dtype} {list(self.offset.shape)}"
            )
        if self.perm is not None and (self.perm.dtype != np.int32 or self.perm.shape != self.codes.shape[:1]):
            raise ValueError(f"perm must be int32 [{len(self.codes)}], got {self.perm.dtype} {list(self.perm.shape)}")

    @property
    def num_groups(self) -> int:
        return -(-self.codes.shape[0] // self.group_size)

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N), the shape of codes; the Hugging Face orientation is (N, K)."""
        return self.codes.shape[0], self.codes.shape[1]

    def check(self) -> None:
        """Checks the invariants that need a pass over the data.

        Raises:
            ValueError: a code out of range, a scale or offset that is not finite, or a perm that is none.
        """
        if self.bits < 8 and self.codes.size and int(self.codes.max()) >> self.bits:
            raise ValueError(f"codes must be below {1 << self.bits}, found {int(self.codes.max())}")
        if not np.isfinite(self.scale).all():
            raise ValueError("scale holds values that are not finite")
        if self.offset is not None and not np.isfinite(self.offset).all():
            raise ValueError("offset holds values that are not finite")
        if self.perm is not None and not np.array_equal(np.sort(self.perm), np.arange(self.perm.size)):
            raise ValueError("perm is not a permutation")

    def dequantize(self) -> np.ndarray:
        """The weight as float32 [K, N] in the order of x (perm undone): y = x @ dequantize()."""
        dense = np.empty(self.codes.shape, np.float32)
        scale = self.scale.astype(np.float32)
        offset = -(2.0 ** (self.bits - 1)) * scale if self.offset is None else self.offset.astype(np.float32)
        for start in range(0, self.codes.shape[0], _ROWS_AT_ONCE):
            rows = np.arange(start, min(start + _ROWS_AT_ONCE, self.codes.shape[0]))
            groups = rows // self.group_size
            value = self.codes[rows] * scale[groups] + offset[groups]
            dense[rows if self.perm is None else self.perm[rows]] = value
        return dense


@dataclass(frozen=True, eq=False)
class WordTensor:
    """An AffineTensor of 4 bits whose codes are still eight to a word, for packers that need not see single ones.

    Attributes:
        words: int32 [K, N / 8] in AWQ's order; `checkpoints.words` unpacks and merges them.
        scale, offset: as in AffineTensor.
    """

    words: np.ndarray
    scale: np.ndarray
    offset: np.ndarray | None
