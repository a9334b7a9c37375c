"""`quant_method: awq`, version "gemm": codes of 4 bits and zero points packed along the outputs in AWQ's order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from checkpoints.affine import AffineTensor
from checkpoints.eight_bit import EightBitTensor
from checkpoints.exporters.layout import AffineScheme, Scheme, half, zero_points
from checkpoints.exporters.words import pack_awq

BITS, PER_WORD = 4, 8


class Awq:
    """See `Layout`. Symmetric codes are written with their zero points, which every reader takes."""

    name = "awq"

    def problem(self, scheme: Scheme, shape: tuple[int, int]) -> str | None:
        if not isinstance(scheme, AffineScheme) or scheme.bits != BITS:
            return "AWQ holds codes of 4 bits alone"
        if scheme.float_offset:
            return "AWQ holds whole zero points, no float offsets"
        if scheme.act_order:
            return "AWQ holds groups of neighbouring inputs: act-order needs static groups"
        return None if shape[0] % PER_WORD == 0 else f"AWQ packs {PER_WORD} outputs a word, and it has {shape[0]}"

    def arrays(self, module: str, tensor: AffineTensor | EightBitTensor) -> dict[str, np.ndarray]:
        assert isinstance(tensor, AffineTensor), module
        return {
            f"{module}.qweight": pack_awq(tensor.codes),
            f"{module}.qzeros": pack_awq(zero_points(tensor)),
            f"{module}.scales": half(tensor.scale),
        }

    def quantization_config(self, scheme: Scheme, left_dense: Sequence[str]) -> dict[str, Any]:
        assert isinstance(scheme, AffineScheme)
        return {
            "quant_method": "awq",
            "version": "gemm",
            "bits": scheme.bits,
            "group_size": scheme.group_size,
            "zero_point": True,
            "modules_to_not_convert": list(left_dense) or None,
        }
