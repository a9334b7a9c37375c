"""Quantised weights to and from qwix's QArray (extra `qwix`), code for code."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from checkpoints import AffineTensor
from checkpoints.importers.affine import affine_tensor
from turbojax.errors import InteropError, MissingExtraError

if TYPE_CHECKING:
    import qwix


def is_qarray(value: Any) -> bool:
    """Whether this is a QArray, without importing qwix to ask."""
    return hasattr(value, "qvalue") and hasattr(value, "scale")


def to_qarray(tensor: AffineTensor) -> qwix.QArray:
    """The weight as a QArray [K, N], which multiplies from the right as a flax kernel does; `.T` is [N, K].

    Signed codes are ours less 2**(bits - 1), so a symmetric weight has no zero point. `from_qarray` gives
    codes of 4 and of 8 bits back as they were.

    Raises:
        MissingExtraError: qwix is not installed.
        InteropError: it has what a QArray has not: act-order, a shorter last group, an offset that is no zero point.
    """
    try:
        import qwix
    except ImportError as error:
        raise MissingExtraError("qwix is not installed: pip install 'turbojax[qwix]'") from error

    if tensor.perm is not None:
        raise InteropError("a QArray has its inputs in order; this weight has act-order (perm)")
    if tensor.shape[0] % tensor.group_size:
        raise InteropError(
            f"a QArray has groups of one size; {tensor.shape[0]} inputs are no multiple of {tensor.group_size}"
        )
    stored, middle = jnp.int4 if tensor.bits <= 4 else jnp.int8, 1 << (tensor.bits - 1)

    def signed(codes: np.ndarray) -> Any:
        return jnp.asarray((codes.astype(np.int16) - middle).astype(np.int8)).astype(stored)

    zero = None if tensor.offset is None else signed(zero_point(tensor))
    return qwix.QArray(signed(tensor.codes), jnp.asarray(tensor.scale), zero)


def zero_point(tensor: AffineTensor) -> np.ndarray:
    """The codes [groups, N] that stand for 0.

    Raises:
        InteropError: an offset is not exactly minus a code times the scale.
    """
    assert tensor.offset is not None
    scale, offset = tensor.scale.astype(np.float32), tensor.offset.astype(np.float32)
    zero = np.rint(np.divide(-offset, scale, out=np.zeros_like(scale), where=scale != 0))
    if not np.all((-(zero * scale) == offset) & (zero >= 0) & (zero < 1 << tensor.bits)):
        raise InteropError("a QArray has zero points; an offset of this weight is none of its codes times its scale")
    return zero


def from_qarray(array: qwix.QArray, name: str = "QArray") -> AffineTensor:
    """The weight of a QArray [K, N] of integers; its codes, now of 4 or 8 bits, and zero points are what they were.

    Args:
        array: on whatever device.
        name: what an error calls it.

    Raises:
        InteropError: it is no matrix of integers, or its scale or zero point does not divide it into equal parts.
    """
    qvalue, scale = np.asarray(array.qvalue), np.asarray(array.scale)
    qtype = array.qtype if isinstance(array.qtype, str) else jnp.dtype(array.qtype).name
    if qvalue.ndim != 2 or not re.fullmatch(r"u?int[2-8]", qtype):
        raise InteropError(
            f"parameter '{name}' is a QArray of {qtype} {list(qvalue.shape)}; accepted: integers of 2 to 8 bits [K, N]"
        )
    (K, N), bits = qvalue.shape, 4 if jnp.iinfo(qvalue.dtype).bits <= 4 else 8
    lowest = 0 if qtype.startswith("u") else -(1 << (bits - 1))
    zero = np.zeros((1, 1), np.int16) if array.zero_point is None else np.asarray(array.zero_point).astype(np.int16)
    for part in (scale, zero):
        if part.ndim != 2 or K % part.shape[0] or N % part.shape[1]:
            raise InteropError(
                f"parameter '{name}': a scale or zero point {list(part.shape)} does not divide a weight [{K}, {N}]"
            )
    num_groups = math.lcm(len(scale), len(zero))

    def spread(x: np.ndarray) -> np.ndarray:
        return x.repeat(num_groups // len(x), 0).repeat(N // x.shape[1], 1)

    codes = (qvalue.astype(np.int16) - lowest).astype(np.uint8)
    is_symmetric = array.zero_point is None and lowest < 0
    zero_code = None if is_symmetric else spread(zero) - lowest
    return affine_tensor(codes, spread(scale), zero_code, bits=bits, group_size=K // num_groups)
