"""The importers: from arrays as stored in a Hugging Face folder to logical tensors, one module a method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from checkpoints.importers import awq, compressed_tensors, dense, fp8, gptq, mxfp4, smooth_quant
from checkpoints.safetensors_file import StoredTensor
from checkpoints.tensors import LogicalTensor

# (the folder's path, its quantization config, the stored arrays) -> logical tensors
Importer = Callable[[Path, dict[str, Any], Mapping[str, StoredTensor]], Iterable[LogicalTensor]]

IMPORTERS: dict[str, Importer] = {
    "awq": awq.import_awq,
    "gptq": gptq.import_gptq,
    "compressed-tensors": compressed_tensors.import_compressed_tensors,
    "fp8": fp8.import_fp8,
    "smooth_quant": smooth_quant.import_smooth_quant,
    "mxfp4": mxfp4.import_mxfp4,
}


def import_tensors(
    path: Path, quantization: dict[str, Any] | None, stored: Mapping[str, StoredTensor]
) -> Iterable[LogicalTensor]:
    """Maps stored arrays to logical tensors by the checkpoint's quantisation method (None: dense), one of IMPORTERS."""
    if quantization is None:
        return dense.import_dense(path, {}, stored)
    return IMPORTERS[str(quantization["quant_method"]).lower()](path, quantization, stored)
