"""`quant_method: mxfp4` (gpt-oss): blocks of 32 e2m1 values under a power of two, which bfloat16 holds exactly."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints.errors import CorruptFileError, MissingTensorError, UnsupportedFormatError
from checkpoints.importers.affine import hold
from checkpoints.importers.dense import dense_tensor
from checkpoints.safetensors_file import StoredTensor
from checkpoints.tensors import DenseFormat, LogicalTensor, TensorInfo

BLOCK_LEN = 32
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# The exponent's bias is 127, and 6 = 1.5 * 2**2: with a larger exponent it would leave bfloat16's range.
MAX_EXPONENT = 252
_BLOCKS, _SCALES = "_blocks", "_scales"

log = logging.getLogger(__name__)


def import_mxfp4(
    path: Path, quantization: dict[str, Any], stored: Mapping[str, StoredTensor]
) -> Iterable[LogicalTensor]:
    """See `checkpoints.importers.Importer`. X_blocks and X_scales become the dense tensor X [..., N, K]."""
    del quantization
    names = [name.removesuffix(_BLOCKS) for name in stored if name.endswith(_BLOCKS)]
    if not names:
        hint = "its config and its tensors do not belong together: check quantization_config"
        raise UnsupportedFormatError(path, f"no tensor's name ends with {_BLOCKS}", hint=hint)
    for name in names:
        if name + _SCALES not in stored:
            raise MissingTensorError(path, name + _SCALES, hint="blocks mean nothing without it: download again")
    log.warning("%s: %d tensors of MXFP4 become bfloat16: no kernel takes their codes", path, len(names))
    taken = {name + part for name in names for part in (_BLOCKS, _SCALES)}
    logical = [_logical(name, stored[name + _BLOCKS], stored[name + _SCALES]) for name in names]
    return [*logical, *(dense_tensor(name, t) for name, t in stored.items() if name not in taken)]


def _logical(name: str, blocks: StoredTensor, scales: StoredTensor) -> LogicalTensor:
    if len(blocks.shape) < 3 or blocks.shape[-1] != BLOCK_LEN // 2:
        reason, hint = f"has shape {list(blocks.shape)}", f"[..., N, K / {BLOCK_LEN}, {BLOCK_LEN // 2}] is expected"
        raise UnsupportedFormatError(blocks.file, reason, tensor=blocks.name, hint=hint)
    hold(blocks, blocks.shape, ("uint8",), "")
    hold(scales, blocks.shape[:-1], ("uint8",), f"follows from {blocks.name}: an exponent a block")
    shape = (*blocks.shape[:-2], blocks.shape[-2] * BLOCK_LEN)
    reader, num_bytes = _Reader(blocks, scales), blocks.num_bytes + scales.num_bytes
    return LogicalTensor(TensorInfo(name, shape, DenseFormat("bfloat16"), blocks.file, num_bytes), reader, reader.check)


@dataclass(frozen=True)
class _Reader:
    """Reads one tensor, an expert at a time."""

    blocks: StoredTensor
    scales: StoredTensor

    def __call__(self) -> np.ndarray:
        blocks, scales = self.blocks.read(), self.scales.read()
        dense = np.empty((*blocks.shape, 2), np.uint16)
        for index in np.ndindex(blocks.shape[:-3]):
            codes = np.stack([blocks[index] & 0x0F, blocks[index] >> 4], axis=-1)
            value = np.ldexp(E2M1[codes], scales[index].astype(np.int32)[..., None, None] - 127)
            dense[index] = value.view(np.uint32) >> 16  # exact: two bits of mantissa
        return dense.reshape(*blocks.shape[:-2], -1).view(ml_dtypes.bfloat16)

    def check(self) -> None:
        if (largest := int(self.scales.read().max(initial=0))) > MAX_EXPONENT:
            reason = f"holds the exponent {largest}, and its values are not finite"
            raise CorruptFileError(self.scales.file, reason, tensor=self.scales.name, hint="download the file again")
