"""`quant_method: fp8`: e4m3 weights in blocks of 128 x 128 (DeepSeek, Qwen) or with one scale each (AutoFP8)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from checkpoints.eight_bit import BLOCK
from checkpoints.importers.eight_bit import import_eight_bit
from checkpoints.importers.settings import expect
from checkpoints.safetensors_file import StoredTensor
from checkpoints.tensors import LogicalTensor


def import_fp8(path: Path, quantization: dict[str, Any], stored: Mapping[str, StoredTensor]) -> Iterable[LogicalTensor]:
    """See `checkpoints.importers.Importer`."""
    expect(path, "fmt", quantization.get("fmt", "e4m3"), ("e4m3",))
    expect(path, "weight_block_size", quantization.get("weight_block_size"), (None, [BLOCK, BLOCK]))
    expect(path, "activation_scheme", quantization.get("activation_scheme", "dynamic"), ("dynamic", "static"))
    return import_eight_bit(path, quantization, stored)
