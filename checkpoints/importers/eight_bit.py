"""What the importers of eight-bit checkpoints share: a weight and its scale become one tensor, all else stays dense.

The dtype of a stored weight says whether its module was converted; lists of those left out say nothing more.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.eight_bit import BLOCK, CODES, EightBitTensor, blocks_of, eight_bit_tensor, one_scale_covers
from checkpoints.errors import MissingTensorError, ShapeMismatchError, UnsupportedFormatError
from checkpoints.importers.affine import check_finite
from checkpoints.importers.dense import dense_tensor
from checkpoints.safetensors_file import StoredTensor
from checkpoints.tensors import EightBitFormat, LogicalTensor, TensorInfo

SCALES = ("weight_scale", "weight_scale_inv")  # the second multiplies too, whatever its name says
STATIC_SCALES = ("input_scale", "activation_scale")
# Of symmetric codes, which these importers hold a config to: zeros by definition, and some writers store them.
ZERO_POINTS = ("weight_zero_point", "input_zero_point")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Reader:
    """Reads one weight and its scale."""

    weight: StoredTensor
    scale: StoredTensor

    def __call__(self) -> EightBitTensor:
        return eight_bit_tensor(self.weight.read(), self.scale.read())

    def check(self) -> None:
        check_finite(self.scale)


def import_eight_bit(
    path: Path, quantization: dict[str, Any], stored: Mapping[str, StoredTensor], scales: Sequence[str] = SCALES
) -> list[LogicalTensor]:
    """Logical tensors of a folder whose linears are `weight` in int8 or e4m3 with a scale (one of `scales`) beside it.

    Static scales of activations are not used: activations are quantised by token (and, for blocks, by 128 columns)
    as they come, which is at least as fine. Nor is a scheme for the KV cache, whose precision is the engine's to set.
    Both are said in the log.

    Raises:
        MissingTensorError, ShapeMismatchError, UnsupportedFormatError: weight and scale do not belong together.
    """
    leaves = {name: name.rpartition(".")[2] for name in stored}
    num_static = sum(leaf in STATIC_SCALES for leaf in leaves.values())
    if num_static:
        text = "%s: %d static activation scales are not used: activations are quantised by token as they come"
        log.warning(text, path, num_static)
    if quantization.get("kv_cache_scheme") is not None:
        log.warning("%s: kv_cache_scheme is not used: quant_policy sets the precision of the KV cache", path)
    beside = (*scales, *STATIC_SCALES, *ZERO_POINTS)
    return [_logical(path, t, stored, scales) for name, t in stored.items() if leaves[name] not in beside]


def _logical(
    path: Path, weight: StoredTensor, stored: Mapping[str, StoredTensor], scales: Sequence[str]
) -> LogicalTensor:
    module, _, leaf = weight.name.rpartition(".")
    scale = next((stored[f"{module}.{name}"] for name in scales if f"{module}.{name}" in stored), None)
    if leaf != "weight" or (scale is None and weight.dtype not in CODES):
        return dense_tensor(weight.name, weight)
    if scale is None:
        hint = "codes mean nothing without it: download the checkpoint again"
        raise MissingTensorError(path, f"{module}.{scales[0]}", hint=hint)
    if weight.dtype not in CODES or len(weight.shape) != 2:
        reason = f"is {weight.dtype} {list(weight.shape)}, and {scale.name!r} scales it"
        hint = f"supported: {' and '.join(dtype.name for dtype in CODES)} matrices with scales"
        raise UnsupportedFormatError(weight.file, reason, tensor=weight.name, hint=hint)
    reader = _Reader(weight, scale)
    return LogicalTensor(_info(weight, scale), reader, reader.check)


def _info(weight: StoredTensor, scale: StoredTensor) -> TensorInfo:
    N, K = weight.shape
    covered = one_scale_covers((N, K), scale.shape)
    if covered is None or (covered == "block" and weight.dtype == np.int8):
        blocks = "" if weight.dtype == np.int8 else f", or {list(blocks_of((N, K)))} of blocks of {BLOCK} x {BLOCK}"
        raise ShapeMismatchError(
            scale.file, scale.name, found=scale.shape, expected=(N, 1), hint=f"or [1]{blocks} are accepted too"
        )
    form = EightBitFormat(weight.dtype.name, has_blocks=covered == "block")
    return TensorInfo(weight.name, (N, K), form, weight.file, weight.num_bytes + scale.num_bytes)
