"""`quant_method: awq`, version "gemm": codes of 4 bits packed along N in AWQ's order, zero points likewise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints.affine import AffineTensor, WordTensor
from checkpoints.importers.affine import (
    FLOATS,
    Arrays,
    affine_tensor,
    check_finite,
    hold,
    matrix,
    scale_and_offset,
    size_of_groups,
    split_modules,
)
from checkpoints.importers.dense import dense_tensor
from checkpoints.importers.settings import expect, group_size_setting
from checkpoints.safetensors_file import StoredTensor
from checkpoints.tensors import AffineFormat, LogicalTensor, TensorInfo
from checkpoints.words import WORD_BITS, unpack_awq

BITS = 4
PER_WORD = WORD_BITS // BITS


def import_awq(path: Path, quantization: dict[str, Any], stored: Mapping[str, StoredTensor]) -> Iterable[LogicalTensor]:
    """See `checkpoints.importers.Importer`. Modules left out have a plain `weight`, and stay dense."""
    expect(path, "bits", quantization.get("bits", quantization.get("w_bit", BITS)), (BITS,))
    expect(path, "version", str(quantization.get("version", "gemm")).lower(), ("gemm",))
    for key in ("format", "checkpoint_format"):
        expect(path, key, quantization.get(key, "gemm"), ("gemm", "awq"))
    group_size = group_size_setting(path, quantization, "group_size", "q_group_size")
    expect(path, "zero_point", quantization.get("zero_point", True), (True, False))
    required = ("qweight", "scales") + (("qzeros",) if quantization.get("zero_point", True) else ())
    modules, others = split_modules(path, stored, ("qweight", "qzeros", "scales"), required)
    quantised = [_logical(module, arrays, group_size) for module, arrays in modules.items()]
    return [*quantised, *(dense_tensor(t.name, t) for t in others)]


@dataclass(frozen=True)
class _Reader:
    """Reads one linear."""

    arrays: Arrays
    group_size: int

    def __call__(self) -> AffineTensor:
        codes, scale = unpack_awq(self.arrays["qweight"].read()), self.arrays["scales"].read()
        zero = unpack_awq(self.arrays["qzeros"].read()) if "qzeros" in self.arrays else None
        return affine_tensor(codes, scale, zero, bits=BITS, group_size=self.group_size)

    def words(self) -> WordTensor:
        words, scale = self.arrays["qweight"].read(), self.arrays["scales"].read()
        zero = unpack_awq(self.arrays["qzeros"].read()) if "qzeros" in self.arrays else None
        return WordTensor(words, *scale_and_offset(scale, zero, BITS))

    def check(self) -> None:
        check_finite(self.arrays["scales"])


def _logical(module: str, arrays: Arrays, configured: int | None) -> LogicalTensor:
    qweight, scales = arrays["qweight"], arrays["scales"]
    in_dim, num_words = matrix(qweight)
    out_dim = num_words * PER_WORD
    group_size = size_of_groups(configured, in_dim, scales.shape[0] if scales.shape else 0, scales)
    num_groups = -(-in_dim // group_size)
    why = f"follows from {qweight.name} {list(qweight.shape)} of AWQ and group_size {group_size}"
    hold(scales, (num_groups, out_dim), FLOATS, why)
    if "qzeros" in arrays:
        hold(arrays["qzeros"], (num_groups, num_words), ("int32",), why)
    form = AffineFormat(BITS, group_size, has_offset="qzeros" in arrays)
    num_bytes = sum(a.num_bytes for a in arrays.values())
    reader = _Reader(arrays, group_size)
    info = TensorInfo(f"{module}.weight", (out_dim, in_dim), form, qweight.file, num_bytes)
    return LogicalTensor(info, reader, reader.check, reader.words)
