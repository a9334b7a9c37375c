"""Eight-bit layouts beside compressed-tensors: LMDeploy's `smooth_quant`, and `fp8` in blocks of 128 x 128."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from checkpoints.affine import AffineTensor
from checkpoints.eight_bit import BLOCK, EightBitTensor
from checkpoints.exporters.layout import EightBitScheme, Scheme


class SmoothQuant:
    """See `Layout`: what LMDeploy reads."""

    name = "smooth_quant"

    def problem(self, scheme: Scheme, shape: tuple[int, int]) -> str | None:
        if not isinstance(scheme, EightBitScheme):
            return "smooth_quant holds eight-bit weights whose inputs are rounded too"
        return "smooth_quant holds a scale an output, no blocks" if scheme.has_blocks else None

    def arrays(self, module: str, tensor: AffineTensor | EightBitTensor) -> dict[str, np.ndarray]:
        assert isinstance(tensor, EightBitTensor), module
        return {f"{module}.weight": tensor.codes, f"{module}.scale": tensor.scale}

    def quantization_config(self, scheme: Scheme, left_dense: Sequence[str]) -> dict[str, Any]:
        assert isinstance(scheme, EightBitScheme)
        return {"quant_method": "smooth_quant", "quant_dtype": "int8" if scheme.dtype == "int8" else "float8_e4m3fn"}


class Fp8Blocks:
    """See `Layout`: e4m3 with a scale for each block, as DeepSeek and Qwen publish them."""

    name = "fp8"

    def problem(self, scheme: Scheme, shape: tuple[int, int]) -> str | None:
        is_blocks = isinstance(scheme, EightBitScheme) and scheme.has_blocks
        return None if is_blocks else "fp8 is written in blocks; e4m3 with a scale an output is 'compressed-tensors'"

    def arrays(self, module: str, tensor: AffineTensor | EightBitTensor) -> dict[str, np.ndarray]:
        assert isinstance(tensor, EightBitTensor), module
        scale = tensor.scale if tensor.has_blocks else tensor.scale[::BLOCK]  # K <= 128: repeated for its outputs
        return {f"{module}.weight": tensor.codes, f"{module}.weight_scale_inv": np.ascontiguousarray(scale)}

    def quantization_config(self, scheme: Scheme, left_dense: Sequence[str]) -> dict[str, Any]:
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": list(left_dense) or None,
        }
