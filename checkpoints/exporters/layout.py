"""What every layout offers: whether it can hold a scheme, the arrays of a linear, and the config that explains them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from checkpoints.affine import AffineTensor
from checkpoints.eight_bit import EightBitTensor


@dataclass(frozen=True)
class AffineScheme:
    """How all linears of a model were rounded to groups of codes.

    Attributes:
        bits: of a code.
        group_size: inputs under one scale.
        symmetric: zero points are all 2**(bits - 1).
        float_offset: offsets are no multiples of their scales, so there are no zero points.
        act_order: groups are runs of inputs in an order of their own.
    """

    bits: int
    group_size: int
    symmetric: bool
    float_offset: bool = False
    act_order: bool = False


@dataclass(frozen=True)
class EightBitScheme:
    """How all linears of a model were rounded to eight-bit codes, whose inputs are rounded too.

    Attributes:
        dtype: of the codes.
        has_blocks: a scale covers 128 x 128 weights, else an output.
    """

    dtype: Literal["int8", "float8_e4m3fn"]
    has_blocks: bool = False


Scheme = AffineScheme | EightBitScheme


class Layout(Protocol):
    """A way to write quantised linears."""

    @property
    def name(self) -> str:
        """What `--format` calls it."""

    def problem(self, scheme: Scheme, shape: tuple[int, int]) -> str | None:
        """Why a linear [N, K] of this scheme cannot be written; None where it can."""

    def arrays(self, module: str, tensor: AffineTensor | EightBitTensor) -> dict[str, np.ndarray]:
        """The stored arrays of a module, by their full names."""

    def quantization_config(self, scheme: Scheme, left_dense: Sequence[str]) -> dict[str, Any]:
        """`quantization_config` of config.json; `left_dense` are the modules that are no codes."""


def zero_points(tensor: AffineTensor) -> np.ndarray:
    """uint8 [G, N] with value = (code - zero) * scale.

    Raises:
        ValueError: offsets are no whole multiples of their scales.
    """
    if tensor.offset is None:
        return np.full(tensor.scale.shape, 1 << (tensor.bits - 1), np.uint8)
    scale, offset = tensor.scale.astype(np.float32), tensor.offset.astype(np.float32)
    zero = np.rint(-offset / scale)
    if (zero * scale != -offset).any() or (zero < 0).any() or (zero >= 1 << tensor.bits).any():
        raise ValueError("offsets are no whole multiples of their scales: only the native form holds them")
    return zero.astype(np.uint8)


def half(scale: np.ndarray) -> np.ndarray:
    """Scales as float16, which they must be already.

    Raises:
        ValueError: that would round them.
    """
    narrow = scale.astype(np.float16)
    if (narrow.astype(scale.dtype) != scale).any():
        raise ValueError("scales are finer than float16, in which they are stored")
    return narrow


def in_file_order(tensor: AffineTensor) -> tuple[np.ndarray, np.ndarray]:
    """codes [K, N] in the order of the inputs, and the group of each input, int32 [K]."""
    groups = (np.arange(tensor.shape[0]) // tensor.group_size).astype(np.int32)
    if tensor.perm is None:
        return tensor.codes, groups
    codes, g_idx = np.empty_like(tensor.codes), np.empty_like(groups)
    codes[tensor.perm], g_idx[tensor.perm] = tensor.codes, groups
    return codes, g_idx
