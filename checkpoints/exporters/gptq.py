"""`quant_method: gptq`, versions 1 and 2: codes packed along the inputs, zero points along the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from checkpoints.affine import AffineTensor
from checkpoints.eight_bit import EightBitTensor
from checkpoints.exporters.layout import AffineScheme, Scheme, half, in_file_order, zero_points
from checkpoints.exporters.words import pack
from checkpoints.words import WORD_BITS


@dataclass(frozen=True)
class Gptq:
    """See `Layout`. Version 1 stores zero points less one, and so has no place for zero."""

    version: int

    @property
    def name(self) -> str:
        return "gptq" if self.version == 1 else "gptq_v2"

    def problem(self, scheme: Scheme, shape: tuple[int, int]) -> str | None:
        if not isinstance(scheme, AffineScheme):
            return "GPTQ holds codes in groups alone"
        if scheme.float_offset:
            return "GPTQ holds whole zero points, no float offsets"
        per_word = WORD_BITS // scheme.bits
        for size, what in zip(shape, ("outputs", "inputs"), strict=True):
            if size % per_word:
                return f"GPTQ packs {per_word} {what} of {scheme.bits} bits a word, and it has {size}"
        return None

    def arrays(self, module: str, tensor: AffineTensor | EightBitTensor) -> dict[str, np.ndarray]:
        assert isinstance(tensor, AffineTensor), module
        zero, (codes, g_idx) = zero_points(tensor), in_file_order(tensor)
        if self.version == 1:
            if (zero == 0).any():
                raise ValueError("a zero point is 0, which version 1 of GPTQ cannot hold: write version 2")
            zero = zero - np.uint8(1)
        return {
            f"{module}.qweight": pack(codes, tensor.bits),
            f"{module}.qzeros": np.ascontiguousarray(pack(np.ascontiguousarray(zero.T), tensor.bits).T),
            f"{module}.scales": half(tensor.scale),
            f"{module}.g_idx": g_idx,
        }

    def quantization_config(self, scheme: Scheme, left_dense: Sequence[str]) -> dict[str, Any]:
        assert isinstance(scheme, AffineScheme)
        return {
            "quant_method": "gptq",
            "checkpoint_format": self.name,
            "bits": scheme.bits,
            "group_size": scheme.group_size,
            "sym": scheme.symmetric,
            "desc_act": scheme.act_order,
            "lm_head": False,
            "modules_to_not_convert": list(left_dense) or None,
        }
