"""`quant_method: gptq`, versions 1 and 2: codes packed along K, zero points along N, rows of a group anywhere."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.affine import AffineTensor
from checkpoints.errors import CorruptFileError, MissingTensorError, ShapeMismatchError
from checkpoints.importers.affine import (
    FLOATS,
    KERNEL_BITS,
    Arrays,
    affine_tensor,
    check_finite,
    hold,
    in_units,
    kernel_bits,
    matrix,
    order_of,
    say_widened,
    size_of_groups,
    split_modules,
)
from checkpoints.importers.dense import dense_tensor
from checkpoints.importers.settings import expect, group_size_setting
from checkpoints.safetensors_file import StoredTensor
from checkpoints.tensors import AffineFormat, LogicalTensor, TensorInfo
from checkpoints.words import WORD_BITS, num_words, unpack

BITS = (2, 3, 4, 8)
# What is added to a stored zero point; the first format stores one less.
ZERO_SHIFTS = {"gptq": 1, "gptq_v2": 0}


def import_gptq(
    path: Path, quantization: dict[str, Any], stored: Mapping[str, StoredTensor]
) -> Iterable[LogicalTensor]:
    """See `checkpoints.importers.Importer`. Modules left out have a plain `weight`, and stay dense."""
    if quantization.get("is_marlin_format"):
        expect(path, "is_marlin_format", True, (False,))
    expect(path, "pack_dtype", quantization.get("pack_dtype", "int32"), ("int32",))
    leaves = ("qweight", "qzeros", "scales", "g_idx")
    modules, others = split_modules(path, stored, leaves, required=("qweight", "scales"))
    logical, all_bits = [], []
    for module, arrays in modules.items():
        settings = Settings.of(path, quantization, module)
        if settings.desc_act and "g_idx" not in arrays:
            hint = "desc_act needs it: download the checkpoint again"
            raise MissingTensorError(path, f"{module}.g_idx", hint=hint)
        logical.append(_logical(module, arrays, settings))
        all_bits.append(settings.bits)
    say_widened(path, all_bits)
    return [*logical, *(dense_tensor(t.name, t) for t in others)]


@dataclass(frozen=True)
class Settings:
    """How one module was quantised.

    Attributes:
        bits: of a code.
        group_size: rows of K under one scale; -1 is all, None is not said.
        sym: zero points are all 2**(bits - 1).
        desc_act: groups do not follow the order of the rows.
        zero_shift: what to add to a stored zero point.
    """

    bits: int
    group_size: int | None
    sym: bool
    desc_act: bool
    zero_shift: int

    @classmethod
    def of(cls, path: Path, quantization: dict[str, Any], module: str) -> Settings:
        """The config's, with what its "dynamic" patterns change for this module.

        Raises:
            UnsupportedFormatError, ConfigError: a field cannot be honoured.
        """
        found = dict(quantization)
        for pattern, changes in (quantization.get("dynamic") or {}).items():
            if not pattern.startswith("-:") and re.match(pattern.removeprefix("+:"), module):
                found |= changes
                break
        form = found.get("checkpoint_format", found.get("format", "gptq"))
        bits = found.get("bits", 4)
        expect(path, "checkpoint_format", form, tuple(ZERO_SHIFTS))
        expect(path, "bits", bits, BITS)
        group_size = group_size_setting(path, found, "group_size")
        return cls(bits, group_size, bool(found.get("sym")), bool(found.get("desc_act")), ZERO_SHIFTS[form])


@dataclass(frozen=True)
class _Reader:
    """Reads one linear."""

    arrays: Arrays
    shape: tuple[int, int]
    settings: Settings
    group_size: int
    perm: np.ndarray | None

    def __call__(self) -> AffineTensor:
        bits = self.settings.bits
        codes = unpack(self.arrays["qweight"].read(), bits, self.shape[1], cut=True)
        zero = None if self.settings.sym else self.zero()
        scale = self.arrays["scales"].read()
        return affine_tensor(codes, scale, zero, bits=bits, group_size=self.group_size, perm=self.perm)

    def window(self, rows: slice, columns: slice) -> AffineTensor | None:
        """See `LogicalTensor.read_window`."""
        (out_dim, in_dim), per_word = self.shape, WORD_BITS // self.settings.bits
        words, groups = in_units(columns, per_word, in_dim), in_units(columns, self.group_size, in_dim)
        zeros = in_units(rows, per_word, out_dim)
        is_permuted = self.perm is not None and columns != slice(0, in_dim)
        if WORD_BITS % self.settings.bits or is_permuted or words is None or groups is None or zeros is None:
            return None
        at = {"qweight": (words, rows), "scales": (groups, rows), "qzeros": (groups, zeros)}
        arrays = {leaf: replace(array, at=at[leaf]) for leaf, array in self.arrays.items() if leaf in at}
        shape = rows.stop - rows.start, columns.stop - columns.start
        return replace(self, arrays=arrays, shape=shape)()

    def zero(self) -> np.ndarray | None:
        """int16 [G, N]; None where none are stored, which is symmetric."""
        if "qzeros" not in self.arrays:
            return None
        packed = np.ascontiguousarray(self.arrays["qzeros"].read().T)
        stored = unpack(packed, self.settings.bits, self.shape[0], cut=True).T
        return stored.astype(np.int16) + np.int16(self.settings.zero_shift)

    def check(self) -> None:
        check_finite(self.arrays["scales"])
        zero, middle = self.zero() if self.settings.sym else None, 1 << self.settings.bits - 1
        if zero is not None and (zero != middle).any():
            tensor, found = self.arrays["qzeros"], int(zero[zero != middle][0])
            reason = f"quantization_config says sym, but a zero point is {found} instead of {middle}"
            hint = f"check sym, and checkpoint_format (taken as {'gptq' if self.settings.zero_shift else 'gptq_v2'})"
            raise CorruptFileError(tensor.file, reason, tensor=tensor.name, hint=hint)


def _logical(module: str, arrays: Arrays, settings: Settings) -> LogicalTensor:
    qweight, scales, bits = arrays["qweight"], arrays["scales"], settings.bits
    num_rows, out_dim = matrix(qweight)
    in_dim, rest = divmod(num_rows * WORD_BITS, bits)
    if rest:
        whole = (num_rows // bits * bits, out_dim)
        hint = f"a multiple of {bits} rows of words is expected: codes of {bits} bits are packed along the inputs"
        raise ShapeMismatchError(qweight.file, qweight.name, found=qweight.shape, expected=whole, hint=hint)
    group_size = size_of_groups(settings.group_size, in_dim, scales.shape[0] if scales.shape else 0, scales)
    num_groups = -(-in_dim // group_size)
    why = f"follows from {qweight.name} {list(qweight.shape)} of GPTQ, {bits} bits and group_size {group_size}"
    hold(scales, (num_groups, out_dim), FLOATS, why)
    if "qzeros" in arrays:
        hold(arrays["qzeros"], (num_groups, num_words(out_dim, bits, cut=True)), ("int32",), why)
    perm = order_of(arrays.get("g_idx"), in_dim, group_size)
    has_offset = ("qzeros" in arrays and not settings.sym) or bits not in KERNEL_BITS
    form = AffineFormat(kernel_bits(bits), group_size, has_offset, has_perm=perm is not None)
    reader = _Reader(arrays, (out_dim, in_dim), settings, group_size, perm)
    num_bytes = sum(a.num_bytes for a in arrays.values())
    info = TensorInfo(f"{module}.weight", (out_dim, in_dim), form, qweight.file, num_bytes)
    return LogicalTensor(info, reader, reader.check, read_window=reader.window)
