"""The exporters: from logical tensors to the arrays and the config that other programs read, one module a layout."""

from __future__ import annotations

from checkpoints.exporters.awq import Awq
from checkpoints.exporters.compressed_tensors import CompressedTensors
from checkpoints.exporters.eight_bit import Fp8Blocks, SmoothQuant
from checkpoints.exporters.folder import export_folder, staged
from checkpoints.exporters.gptq import Gptq
from checkpoints.exporters.layout import AffineScheme, EightBitScheme, Layout, Scheme

LAYOUTS: dict[str, Layout] = {
    "awq": Awq(),
    "gptq": Gptq(version=1),
    "gptq_v2": Gptq(version=2),
    "compressed-tensors": CompressedTensors(),
    "smooth_quant": SmoothQuant(),
    "fp8": Fp8Blocks(),
}

__all__ = ["LAYOUTS", "AffineScheme", "EightBitScheme", "Layout", "Scheme", "export_folder", "staged"]
