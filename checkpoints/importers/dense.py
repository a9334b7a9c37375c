"""Unquantised Hugging Face checkpoints: every stored array is a logical tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from checkpoints.errors import UnsupportedFormatError
from checkpoints.safetensors_file import StoredTensor
from checkpoints.tensors import DenseFormat, LogicalTensor, TensorInfo

_CODES = ("qweight", "weight_packed", "weight_scale_inv")


def dense_tensor(name: str, stored: StoredTensor) -> LogicalTensor:
    """A stored array shown as it is, under a name."""
    info = TensorInfo(name, stored.shape, DenseFormat(stored.dtype.name), stored.file, stored.num_bytes)
    return LogicalTensor(info, stored.read)


def import_dense(
    path: Path, quantization: dict[str, Any], stored: Mapping[str, StoredTensor]
) -> Iterable[LogicalTensor]:
    """See `checkpoints.importers.Importer`.

    Raises:
        UnsupportedFormatError: a tensor is codes, which a config would have to explain.
    """
    del quantization
    for name, tensor in stored.items():
        if name.rpartition(".")[2] in _CODES:
            hint = "add quantization_config to config.json, or say which method it is with model_format"
            raise UnsupportedFormatError(
                path, "is codes, and no config names their method", tensor=tensor.name, hint=hint
            )
    return [dense_tensor(name, tensor) for name, tensor in stored.items()]
