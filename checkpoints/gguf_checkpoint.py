"""A GGUF file shown as a checkpoint: Hugging Face names, shapes, values and config."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.affine import AffineTensor
from checkpoints.errors import CorruptFileError, UnsupportedFormatError
from checkpoints.gguf_blocks import can_decode, decode, format_of, is_dequantised
from checkpoints.gguf_config import Metadata, generation_config, hf_config
from checkpoints.gguf_file import GgufFile, GgufTensor
from checkpoints.gguf_names import hf_name, is_norm_plus_one, is_rotary_interleaved, is_table
from checkpoints.tensors import Checkpoint, LogicalTensor, TensorInfo

log = logging.getLogger(__name__)


def open_gguf(path: Path) -> Checkpoint:
    """Opens a .gguf file; see `checkpoints.open_checkpoint`."""
    file = GgufFile(path)
    meta = Metadata(file)
    config = hf_config(meta)
    tensors = [_logical(meta, config, t) for name, t in file.tensors.items() if not is_table(name)]
    _say_dequantised(path, [t for t in file.tensors.values() if is_dequantised(t.kind, len(t.shape))])
    return Checkpoint(path, config, generation_config(file), tensors, [file.file_bytes])


def _say_dequantised(path: Path, tensors: list[GgufTensor]) -> None:
    """One warning: which tensors, and what they take in the file and at 16 bits a value."""
    if not tensors:
        return
    kinds = ", ".join(sorted({t.kind.name for t in tensors}))
    log.warning(
        "%s: %d tensors become dense, since no kernel takes codes of %s: %.1f MB in the file, %.1f MB in 16 bits (%s)",
        path, len(tensors), kinds, sum(t.num_bytes for t in tensors) / 1e6,
        sum(2 * math.prod(t.shape) for t in tensors) / 1e6, ", ".join(_by_layer(t.name for t in tensors)),
    )  # fmt: skip


def _by_layer(names: Iterable[str]) -> list[str]:
    """Names of tensors, those of several layers in one: "blk.0,1,5.ffn_down.weight"."""
    layers: dict[str, list[str]] = {}
    for name in names:
        layer = name.split(".")[1]
        pattern = name.replace(f"blk.{layer}.", "blk.{}.")
        layers.setdefault(pattern, []).append(layer)
    return [pattern.format(",".join(of)) for pattern, of in layers.items()]


@dataclass(frozen=True)
class _Reader:
    """Reads one tensor and undoes what the converter did to it."""

    file: GgufFile
    tensor: GgufTensor
    num_heads: int | None
    is_plus_one: bool

    def __call__(self) -> np.ndarray | AffineTensor:
        raw = self.file.raw(self.tensor)
        if self.num_heads is not None:
            raw = half_split_rows(raw, self.tensor.shape[0], self.num_heads)
        value = decode(raw, self.tensor.kind)
        return value - np.float32(1) if self.is_plus_one and isinstance(value, np.ndarray) else value


def half_split_rows(raw: np.ndarray, num_rows: int, num_heads: int) -> np.ndarray:
    """Rows (or elements) of q or k from interleaved rotary pairs (D/2, 2) to halves (2, D/2) in each head."""
    pairs = raw.reshape(num_heads, num_rows // num_heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(raw.shape)


def _logical(meta: Metadata, config: dict[str, Any], tensor: GgufTensor) -> LogicalTensor:
    path = meta.file.path
    name = hf_name(meta.architecture, tensor.name)
    if name is None:
        reason = f"is not a tensor of architecture {meta.architecture!r} as supported here"
        hint = "mixtures of experts and multimodal parts in GGUF are not supported"
        raise UnsupportedFormatError(path, reason, tensor=tensor.name, hint=hint)
    if not can_decode(tensor.kind):
        hint = "convert it to F16, BF16, Q8_0, Q4_0, Q4_1 or a K-quant"
        reason = f"kind {tensor.kind.name} is not supported"
        raise UnsupportedFormatError(path, reason, tensor=tensor.name, hint=hint)
    num_heads = None
    if is_rotary_interleaved(meta.architecture, name):
        num_heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        if tensor.shape[0] % (2 * num_heads):
            reason = f"its {tensor.shape[0]} rows do not divide into {num_heads} heads of rotary pairs"
            raise CorruptFileError(path, reason, tensor=tensor.name, hint="convert the model again")
    info = TensorInfo(name, tensor.shape, format_of(tensor.kind, len(tensor.shape)), path, tensor.num_bytes)
    is_plus_one = is_norm_plus_one(meta.architecture, name)
    return LogicalTensor(info, _Reader(meta.file, tensor, num_heads, is_plus_one))
