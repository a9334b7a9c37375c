"""`quant_method: compressed-tensors`: pack-quantized groups of 4 or 8 bits, int8 and e4m3 with a scale an output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from checkpoints.affine import AffineTensor
from checkpoints.eight_bit import EightBitTensor
from checkpoints.exporters.layout import AffineScheme, EightBitScheme, Scheme, half, zero_points
from checkpoints.exporters.words import pack


class CompressedTensors:
    """See `Layout`."""

    name = "compressed-tensors"

    def problem(self, scheme: Scheme, shape: tuple[int, int]) -> str | None:
        if isinstance(scheme, AffineScheme):
            if scheme.act_order:  # its `weight_g_idx` and actorder "group" have been removed from the package
                return "compressed-tensors holds groups of neighbouring inputs: act-order needs static groups"
            return "compressed-tensors holds whole zero points, no float offsets" if scheme.float_offset else None
        return "blocks of scales are written as 'fp8'" if scheme.has_blocks else None

    def arrays(self, module: str, tensor: AffineTensor | EightBitTensor) -> dict[str, np.ndarray]:
        if isinstance(tensor, EightBitTensor):
            return {f"{module}.weight": tensor.codes, f"{module}.weight_scale": tensor.scale}
        stored = {
            "weight_packed": np.ascontiguousarray(pack(tensor.codes, tensor.bits).T),
            "weight_scale": np.ascontiguousarray(half(tensor.scale).T),
            "weight_shape": np.array(tensor.shape[::-1], np.int64),
        }
        if tensor.offset is not None:
            stored["weight_zero_point"] = pack(np.ascontiguousarray(zero_points(tensor).T), tensor.bits)
        return {f"{module}.{leaf}": array for leaf, array in stored.items()}

    def quantization_config(self, scheme: Scheme, left_dense: Sequence[str]) -> dict[str, Any]:
        if isinstance(scheme, AffineScheme):
            form, inputs = "pack-quantized", None
            weights = _numbers(scheme.bits, "int", "group", symmetric=scheme.symmetric, group_size=scheme.group_size)
        else:
            form, inputs = _eight_bit(scheme)
            weights = _numbers(8, inputs["type"], "channel")
        group = {
            "targets": ["Linear"],
            "format": form,
            "weights": weights,
            "input_activations": inputs,
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(left_dense),
            "kv_cache_scheme": None,
        }


def _eight_bit(scheme: EightBitScheme) -> tuple[str, dict[str, Any]]:
    kind = "int" if scheme.dtype == "int8" else "float"
    return f"{kind}-quantized", _numbers(8, kind, "token", dynamic=True)


def _numbers(
    bits: int, kind: str, strategy: str, *, symmetric: bool = True, group_size: int | None = None, dynamic: bool = False
) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "strategy": strategy,
        "symmetric": symmetric,
        "group_size": group_size,
        "dynamic": dynamic,
    }
