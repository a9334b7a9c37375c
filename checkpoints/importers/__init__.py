"""The importers: from arrays as stored in a Hugging Face folder to logical tensors, one module a method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from checkpoints.errors import UnsupportedFormatError
from checkpoints.importers import compressed_tensors, dense, fp8, smooth_quant
from checkpoints.safetensors_file import StoredTensor
from checkpoints.tensors import LogicalTensor

# (the folder's path, its quantization config, the stored arrays) -> logical tensors
Importer = Callable[[Path, dict[str, Any], Mapping[str, StoredTensor]], Iterable[LogicalTensor]]

IMPORTERS: dict[str, Importer] = {
    "compressed-tensors": compressed_tensors.import_compressed_tensors,
    "fp8": fp8.import_fp8,
    "smooth_quant": smooth_quant.import_smooth_quant,
}


def import_tensors(
    path: Path, quantization: dict[str, Any] | None, stored: Mapping[str, StoredTensor]
) -> Iterable[LogicalTensor]:
    """Maps stored arrays to logical tensors by the checkpoint's quantisation method (None: dense).

    Raises:
        UnsupportedFormatError: there is no importer for the method.
    """
    if quantization is None:
        return dense.import_dense(path, {}, stored)
    importer = IMPORTERS.get(method_of(quantization))
    if importer is None:
        raise unsupported(path, quantization)
    return importer(path, quantization, stored)


def method_of(quantization: dict[str, Any]) -> str:
    """The name of the method in a `quantization_config`."""
    return str(quantization.get("quant_method", "unnamed")).lower()


def unsupported(path: Path, quantization: dict[str, Any]) -> UnsupportedFormatError:
    """The error for a method without an importer."""
    supported = ", ".join(["unquantised safetensors", "GGUF", *IMPORTERS])
    reason = f"quantization method {method_of(quantization)!r} is not supported"
    return UnsupportedFormatError(path, reason, hint=f"supported: {supported}")
