"""`quant_method: compressed-tensors`: integers of 2 to 8 bits in words or bytes, and e4m3, by module."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.affine import AffineTensor
from checkpoints.eight_bit import CODES, EightBitTensor
from checkpoints.errors import MissingTensorError, ShapeMismatchError
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
)
from checkpoints.importers.eight_bit import import_eight_bit
from checkpoints.importers.schemes import Scheme, scheme_for, schemes_of
from checkpoints.importers.settings import expect
from checkpoints.safetensors_file import StoredTensor
from checkpoints.tensors import AffineFormat, DenseFormat, EightBitFormat, LogicalTensor, TensorInfo
from checkpoints.words import WORD_BITS, num_words, unpack, unpack_rows

BESIDE = ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")

log = logging.getLogger(__name__)


def import_compressed_tensors(
    path: Path, quantization: dict[str, Any], stored: Mapping[str, StoredTensor]
) -> Iterable[LogicalTensor]:
    """See `checkpoints.importers.Importer`. Modules in `ignore` have a plain `weight`, and stay dense."""
    schemes = schemes_of(path, quantization)
    for key in ("transform_config", "sparsity_config"):  # rotations of activations; weights with zeros squeezed out
        expect(path, key, quantization.get(key), (None, {}, {"format": "dense"}, {"config_groups": {}}))
    rest, logical, used = dict(stored), [], []
    for module in _modules(path, stored):
        scheme = scheme_for(path, schemes, module)
        if scheme.is_float or (scheme.is_eight_bit and f"{module}.weight" in stored):
            continue
        leaves = ("weight", "weight_packed", *BESIDE)
        arrays = {leaf: rest.pop(f"{module}.{leaf}") for leaf in leaves if f"{module}.{leaf}" in stored}
        logical.append(_affine(path, module, arrays, scheme))
        used.append(scheme)
    say_widened(path, [scheme.bits for scheme in used])
    if count := sum(scheme.has_activations for scheme in used):
        log.warning("%s: activations of %d linears stay in 16 bits, which is finer than the config's", path, count)
    for tensor in import_eight_bit(path, quantization, rest):
        is_codes = isinstance(tensor.info.format, EightBitFormat)
        module = tensor.info.name.removesuffix(".weight")
        weight_only = is_codes and not scheme_for(path, schemes, module).has_activations
        logical.append(_dense(tensor) if weight_only else tensor)
    if count := sum(isinstance(t.read, _Dequantised) for t in logical):
        text = "%s: %d linears of e4m3 weights alone become dense: no kernel takes them with 16-bit activations"
        log.warning(text, path, count)
    return logical


def _modules(path: Path, stored: Mapping[str, StoredTensor]) -> list[str]:
    """Modules whose weight is codes.

    Raises:
        MissingTensorError: some of a module's arrays are there and its codes are not.
    """
    found = []
    for name, tensor in stored.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "weight_packed" or (leaf == "weight" and tensor.dtype in CODES):
            found.append(module)
        elif leaf == "weight_shape" and f"{module}.weight_packed" not in stored:
            hint = f"{name} says how it unpacks: download the checkpoint again"
            raise MissingTensorError(path, f"{module}.weight_packed", hint=hint)
    return found


@dataclass(frozen=True)
class _Reader:
    """Reads one linear of integers."""

    arrays: Arrays
    shape: tuple[int, int]
    scheme: Scheme
    group_size: int
    perm: np.ndarray | None

    def __call__(self) -> AffineTensor:
        bits, (out_dim, in_dim) = self.scheme.bits, self.shape
        scale = self.arrays["weight_scale"].read().reshape(-1, self.num_groups)
        scale = np.broadcast_to(scale, (out_dim, self.num_groups))
        if "weight_packed" in self.arrays:
            codes = unpack_rows(self.arrays["weight_packed"].read(), bits, in_dim)
        else:
            codes = self.arrays["weight"].read().view(np.uint8) ^ np.uint8(0x80)
        zero = self.zero()
        middle = None if zero is None else zero.T
        return affine_tensor(codes.T, scale.T, middle, bits=bits, group_size=self.group_size, perm=self.perm)

    def window(self, rows: slice, columns: slice) -> AffineTensor | None:
        """See `LogicalTensor.read_window`."""
        (out_dim, in_dim), per_word = self.shape, WORD_BITS // self.scheme.bits
        words, groups = in_units(columns, per_word, in_dim), in_units(columns, self.group_size, in_dim)
        zeros, scale = in_units(rows, per_word, out_dim), self.arrays["weight_scale"]
        is_permuted = self.perm is not None and columns != slice(0, in_dim)
        if scale.shape != (out_dim, self.num_groups) or is_permuted or words is None or groups is None or zeros is None:
            return None
        at = {"weight_packed": (rows, words), "weight": (rows, columns), "weight_scale": (rows, groups)}
        zero = self.arrays.get("weight_zero_point")
        at["weight_zero_point"] = (zeros if zero is not None and zero.dtype == np.int32 else rows, groups)
        arrays = {leaf: replace(array, at=at[leaf]) for leaf, array in self.arrays.items() if leaf in at}
        shape = rows.stop - rows.start, columns.stop - columns.start
        return replace(self, arrays=arrays, shape=shape)()

    @property
    def num_groups(self) -> int:
        return -(-self.shape[1] // self.group_size)

    def zero(self) -> np.ndarray | None:
        """[N, G], as the codes count from 0; None where symmetric."""
        if self.scheme.symmetric:
            return None
        stored, bits = self.arrays["weight_zero_point"], self.scheme.bits
        if stored.dtype == np.int32:
            return unpack(stored.read(), bits, self.shape[0])
        return stored.read().astype(np.int16).reshape(-1, self.num_groups) + np.int16(1 << bits - 1)

    def check(self) -> None:
        check_finite(self.arrays["weight_scale"])


def _affine(path: Path, module: str, arrays: Arrays, scheme: Scheme) -> LogicalTensor:
    for leaf in ("weight_scale", *(() if scheme.symmetric else ("weight_zero_point",))):
        if leaf not in arrays:
            hint = "its codes mean nothing without it: download the checkpoint again"
            raise MissingTensorError(path, f"{module}.{leaf}", hint=hint)
    codes, scale, bits = arrays.get("weight_packed") or arrays["weight"], arrays["weight_scale"], scheme.bits
    out_dim, in_dim = _shape(path, module, arrays, bits)
    group_size = in_dim if scheme.group_size in (None, -1) else min(scheme.group_size or in_dim, in_dim)
    num_groups = -(-in_dim // group_size)
    why = f"follows from {out_dim} outputs and {in_dim} inputs in groups of {group_size}"
    if scheme.group_size is None and scale.shape in ((), (1,), (1, 1), (out_dim,)):  # of the matrix, or a flat column
        hold(scale, scale.shape, FLOATS, why)
    else:
        hold(scale, (out_dim, num_groups), FLOATS, why)
    if not scheme.symmetric:
        zero, one_a_scale = arrays["weight_zero_point"], scale.shape or (1,)
        is_packed = zero.dtype == np.int32
        shape = (num_words(out_dim, bits), num_groups) if is_packed else one_a_scale
        hold(zero, shape, ("int32", "int8"), f"{why}, {'packed along the outputs' if is_packed else 'like scales'}")
    perm = order_of(arrays.get("weight_g_idx"), in_dim, group_size)
    has_offset = not scheme.symmetric or bits not in KERNEL_BITS
    form = AffineFormat(kernel_bits(bits), group_size, has_offset, has_perm=perm is not None)
    reader = _Reader(arrays, (out_dim, in_dim), scheme, group_size, perm)
    num_bytes = sum(a.num_bytes for a in arrays.values())
    info = TensorInfo(f"{module}.weight", (out_dim, in_dim), form, codes.file, num_bytes)
    return LogicalTensor(info, reader, reader.check, read_window=reader.window)


def _shape(path: Path, module: str, arrays: Arrays, bits: int) -> tuple[int, int]:
    """(N, K) of a module; that of packed codes is an array of its own, 16 bytes that are read here."""
    if "weight_packed" not in arrays:
        hold(arrays["weight"], arrays["weight"].shape[:2], ("int8",), "a matrix is expected")
        return arrays["weight"].shape[0], arrays["weight"].shape[1]
    if "weight_shape" not in arrays:
        hint = "it says how many codes the words hold: download the checkpoint again"
        raise MissingTensorError(path, f"{module}.weight_shape", hint=hint)
    packed, stored = arrays["weight_packed"], arrays["weight_shape"]
    hold(stored, (2,), ("int64", "int32"), "outputs and inputs of the module")
    out_dim, in_dim = (int(size) for size in stored.read())
    found, expected = matrix(packed), (out_dim, num_words(in_dim, bits))
    if found != expected or in_dim < 1:
        hint = f"follows from {stored.name} {[out_dim, in_dim]} and {bits} bits"
        raise ShapeMismatchError(packed.file, packed.name, found=found, expected=expected, hint=hint)
    return out_dim, in_dim


@dataclass(frozen=True)
class _Dequantised:
    """Reads eight-bit codes as their values."""

    tensor: LogicalTensor

    def __call__(self) -> np.ndarray:
        codes = self.tensor.read()
        assert isinstance(codes, EightBitTensor), self.tensor.info.name
        return codes.dequantize()


def _dense(tensor: LogicalTensor) -> LogicalTensor:
    return replace(tensor, info=replace(tensor.info, format=DenseFormat("float32")), read=_Dequantised(tensor))
