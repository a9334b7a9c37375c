"""What the importers of grouped codes share: the arrays of a module, their arithmetic, and their tensor."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from checkpoints.affine import AffineTensor
from checkpoints.errors import CorruptFileError, MissingTensorError, ShapeMismatchError, UnsupportedFormatError
from checkpoints.safetensors_file import StoredTensor

Arrays = dict[str, StoredTensor]
"""The arrays of one module by the last part of their names."""

KERNEL_BITS = (4, 8)
FLOATS = ("float16", "bfloat16", "float32")

log = logging.getLogger(__name__)


def split_modules(
    path: Path, stored: Mapping[str, StoredTensor], leaves: Sequence[str], required: Sequence[str]
) -> tuple[dict[str, Arrays], list[StoredTensor]]:
    """Modules that hold any of the arrays `leaves`, and all other stored arrays.

    Raises:
        MissingTensorError: a module lacks one of the `required` arrays.
        UnsupportedFormatError: a module holds a plain weight beside its codes, or no module holds codes.
    """
    modules: dict[str, Arrays] = {}
    others = []
    for name, tensor in stored.items():
        module, _, leaf = name.rpartition(".")
        if leaf in leaves:
            modules.setdefault(module, {})[leaf] = tensor
        else:
            others.append(tensor)
    if not modules:
        hint = "its config and its tensors do not belong together: check quantization_config"
        raise UnsupportedFormatError(path, f"no tensor's name ends with .{required[0]}", hint=hint)
    for module, arrays in modules.items():
        for leaf in required:
            if leaf not in arrays:
                have = ", ".join(sorted(arrays))
                hint = f"its module holds only {have}: download the checkpoint again, or check quant_method"
                raise MissingTensorError(path, f"{module}.{leaf}", hint=hint)
        if (twice := stored.get(f"{module}.weight")) is not None:
            reason = f"stands beside {module}.{required[0]}: the module is there dense and quantised"
            raise UnsupportedFormatError(twice.file, reason, tensor=twice.name, hint="keep one of them")
    return modules, others


def hold(tensor: StoredTensor, shape: tuple[int, ...], dtypes: Sequence[str], why: str) -> None:
    """Checks an array's header.

    Args:
        tensor: the array.
        shape: that it must have.
        dtypes: that it may have.
        why: what the shape follows from.

    Raises:
        ShapeMismatchError, UnsupportedFormatError: naming the tensor, what came and what is accepted.
    """
    if tensor.dtype.name not in dtypes:
        hint = f"supported: {', '.join(dtypes)}"
        raise UnsupportedFormatError(tensor.file, f"has dtype {tensor.dtype.name}", tensor=tensor.name, hint=hint)
    if tensor.shape != shape:
        raise ShapeMismatchError(tensor.file, tensor.name, found=tensor.shape, expected=shape, hint=why)


def matrix(tensor: StoredTensor) -> tuple[int, int]:
    """The shape of an array of 32-bit words.

    Raises:
        UnsupportedFormatError: it is none.
    """
    if len(tensor.shape) != 2 or tensor.dtype != np.int32 or 0 in tensor.shape:
        reason = f"is {tensor.dtype.name} {list(tensor.shape)}"
        raise UnsupportedFormatError(tensor.file, reason, tensor=tensor.name, hint="an int32 matrix is expected")
    return tensor.shape[0], tensor.shape[1]


def size_of_groups(configured: int | None, in_dim: int, num_groups: int, scales: StoredTensor) -> int:
    """Rows of K under one scale: the config's (-1: all), else what the number of scales leaves.

    Raises:
        ShapeMismatchError: the number of scales tells no size.
    """
    if configured is None:
        if num_groups < 1 or in_dim % num_groups:
            hint = f"{in_dim} inputs do not fall into {num_groups} groups: give group_size in quantization_config"
            raise ShapeMismatchError(scales.file, scales.name, found=scales.shape, expected=(1,), hint=hint)
        return in_dim // num_groups
    return in_dim if configured == -1 else min(configured, in_dim)


def order_of(g_idx: StoredTensor | None, in_dim: int, group_size: int) -> np.ndarray | None:
    """The order that brings rows of one group together, int32 [K]; None where they stand so, or -1 says nothing.

    Reads the array (4 bytes a row of K): whether a linear is permuted belongs to its format.

    Raises:
        CorruptFileError: these are no groups of `group_size` rows, of which the last may be shorter.
    """
    if g_idx is None:
        return None
    hold(g_idx, (in_dim,), ("int32", "int64"), f"the module has {in_dim} inputs")
    group, full = g_idx.read(), np.arange(in_dim) // group_size
    if np.array_equal(group, full) or (group == -1).all():
        return None
    order = np.argsort(group, kind="stable").astype(np.int32)
    if not np.array_equal(group[order], full):
        reason = f"its rows do not fall into groups of {group_size}"
        raise CorruptFileError(g_idx.file, reason, tensor=g_idx.name, hint="check group_size in quantization_config")
    return order


def check_finite(scales: StoredTensor) -> None:
    """Reads scales alone.

    Raises:
        CorruptFileError: some are not finite.
    """
    found = np.isfinite(scales.read())
    if not found.all():
        reason = f"{found.size - int(found.sum())} of its {found.size} values are not finite"
        raise CorruptFileError(scales.file, reason, tensor=scales.name, hint="download the file again")


def in_units(run: slice, unit: int, total: int) -> slice | None:
    """A run of a total as units of so many each, of which the last may be shorter; None where it cuts one apart."""
    if run.start % unit or (run.stop % unit and run.stop != total):
        return None
    return slice(run.start // unit, -(-run.stop // unit))


def kernel_bits(bits: int) -> int:
    """The bits that codes of `bits` are kept in: the kernels take 4 and 8."""
    return 4 if bits <= 4 else 8


def affine_tensor(
    codes: np.ndarray,
    scale: np.ndarray,
    zero: np.ndarray | None,
    *,
    bits: int,
    group_size: int,
    perm: np.ndarray | None = None,
) -> AffineTensor:
    """value = (code - zero) * scale, exactly: a zero point times a scale of 16 bits fits float32.

    Args:
        codes: uint8 [K, N].
        scale: [G, N].
        zero: integers [G, N]; None: 2**(bits - 1).
        bits: of the codes as stored.
        group_size: rows of K under one scale.
        perm: `order_of`.
    """
    if perm is not None:
        codes = codes[perm]
    return AffineTensor(codes, *scale_and_offset(scale, zero, bits), kernel_bits(bits), group_size, perm)


def scale_and_offset(scale: np.ndarray, zero: np.ndarray | None, bits: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Scale and offset [G, N] of an AffineTensor, see `affine_tensor`."""
    if zero is None and bits in KERNEL_BITS:
        return scale if scale.dtype == np.float16 else scale.astype(np.float32), None
    wide = scale.astype(np.float32)
    middle = np.float32(1 << bits - 1) if zero is None else zero.astype(np.float32)
    return wide, -(middle * wide)


def say_widened(path: Path, all_bits: Iterable[int]) -> None:
    """Logs how many linears are kept in wider codes than the file's."""
    for bits, count in sorted(Counter(all_bits).items()):
        if bits not in KERNEL_BITS:
            text = "%s: %d linears of %d bits are kept in codes of %d bits, which is what the kernels take"
            log.warning(text, path, count, bits, kernel_bits(bits))
