"""The canonical eight-bit tensor: int8 or e4m3 codes, with a float scale for each output channel or block of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np

BLOCK = 128  # outputs and inputs under one scale of a block-scaled tensor
CODES = (np.dtype(np.int8), np.dtype(ml_dtypes.float8_e4m3fn))
_ROWS_AT_ONCE = 1024  # a multiple of BLOCK; outputs that dequantize() expands at a time: bounds its temporaries


@dataclass(frozen=True, eq=False)
class EightBitTensor:
    """A linear's weight in codes of eight bits, N outputs by K inputs.

        value[n, k] = codes[n, k] * scale[n, 0]                    a scale for each channel
        value[n, k] = codes[n, k] * scale[n // 128, k // 128]      a scale for each block

    Blocks have K > 128: where one block holds all inputs, its scale is that of its channels.

    Attributes:
        codes: int8 or float8_e4m3fn [N, K]; blocks are float8_e4m3fn.
        scale: float32 [N, 1] or [ceil(N / 128), ceil(K / 128)].
    """

    codes: np.ndarray
    scale: np.ndarray

    def __post_init__(self) -> None:
        if self.codes.dtype not in CODES or self.codes.ndim != 2:
            raise ValueError(
                f"codes must be int8 or float8_e4m3fn [N, K], got {self.codes.dtype} {list(self.codes.shape)}"
            )
        expected = (self.shape[0], 1)
        if self.has_blocks and self.codes.dtype != np.int8:
            expected = blocks_of(self.shape)
        if self.scale.dtype != np.float32 or self.scale.shape != expected:
            raise ValueError(f"scale must be float32 {list(expected)}, got {self.scale.dtype} {list(self.scale.shape)}")

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K), which is the Hugging Face orientation."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def has_blocks(self) -> bool:
        return self.scale.ndim == 2 and self.scale.shape[1] > 1

    def dequantize(self) -> np.ndarray:
        """The weight as float32 [N, K]."""
        dense = np.empty(self.shape, np.float32)
        for start in range(0, self.shape[0], _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            dense[rows] = self.codes[rows]
            if self.has_blocks:
                scale = self.scale[start // BLOCK : (start + _ROWS_AT_ONCE) // BLOCK]
                num_rows, num_columns = dense[rows].shape
                dense[rows] *= scale.repeat(BLOCK, 0)[:num_rows].repeat(BLOCK, 1)[:, :num_columns]
            else:
                dense[rows] *= self.scale[rows]
        return dense


def blocks_of(shape: tuple[int, int]) -> tuple[int, int]:
    """Blocks along N and along K; the last of each may be cut off."""
    return -(-shape[0] // BLOCK), -(-shape[1] // BLOCK)


def one_scale_covers(
    shape: tuple[int, int], scale_shape: tuple[int, ...]
) -> Literal["matrix", "channel", "block"] | None:
    """What a scale of this shape covers of a weight [N, K]; None where the two do not belong together."""
    if scale_shape in ((), (1,), (1, 1)):
        return "matrix"
    if scale_shape in (shape[:1], (shape[0], 1)):
        return "channel"
    return "block" if scale_shape == blocks_of(shape) else None


def eight_bit_tensor(codes: np.ndarray, scale: np.ndarray) -> EightBitTensor:
    """An EightBitTensor from scales as files hold them.

    Args:
        codes: int8 or float8_e4m3fn [N, K].
        scale: any float, of a shape that `one_scale_covers` knows.

    Raises:
        ValueError: the scale has another shape.
    """
    num_rows, num_columns = codes.shape
    covered, scale = one_scale_covers((num_rows, num_columns), scale.shape), scale.astype(np.float32)
    if covered == "matrix":
        scale = np.broadcast_to(scale.reshape(1, 1), (num_rows, 1))
    elif covered == "channel":
        scale = scale.reshape(num_rows, 1)
    elif covered == "block" and num_columns <= BLOCK:
        scale = scale.repeat(BLOCK, 0)[:num_rows]
    return EightBitTensor(codes, scale)
