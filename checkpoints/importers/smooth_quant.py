"""`quant_method: smooth_quant`, as LMDeploy writes it: int8 or e4m3 weights with a `scale` for each channel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from checkpoints.importers.eight_bit import import_eight_bit
from checkpoints.importers.settings import expect
from checkpoints.safetensors_file import StoredTensor
from checkpoints.tensors import LogicalTensor


def import_smooth_quant(
    path: Path, quantization: dict[str, Any], stored: Mapping[str, StoredTensor]
) -> Iterable[LogicalTensor]:
    """See `checkpoints.importers.Importer`."""
    expect(path, "quant_dtype", quantization.get("quant_dtype", "int8"), ("int8", "fp8", "float8_e4m3fn"))
    return import_eight_bit(path, quantization, stored, scales=("scale",))
