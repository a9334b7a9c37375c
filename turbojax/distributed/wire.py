"""What leader and followers send each other: msgpack of plain data, in frames of bounded size. Never pickle.

A value is None, a bool, an int, a float, a text, bytes, an array, a tuple, a dict, or one of the dataclasses of
`engine/plan.py` that a StepPlan is made of. Whatever else comes is refused.
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import msgpack
import numpy as np

from turbojax.engine.plan import PageCopy, PageGrant, PrefillChunk, SamplingParams, SlotJoin, StepPlan
from turbojax.errors import ClusterError

# The largest is a plan whose chunks fill a step and whose joins bring long prompts: 8,192 tokens and a few millions.
MAX_FRAME_BYTES = 256 * 2**20
LENGTH = struct.Struct("!I")
KINDS: tuple[type, ...] = (StepPlan, PageCopy, SlotJoin, SamplingParams, PageGrant, PrefillChunk)
FIELDS = {kind: tuple(field.name for field in dataclasses.fields(kind)) for kind in KINDS}
CODES = {kind: code for code, kind in enumerate(KINDS)}
ARRAY = len(KINDS)
# Of tokens, masks and parameters.
DTYPES = ("int32", "int64", "uint32", "float32", "float64", "bool")


def encode(value: Any) -> bytes:
    """A value as bytes.

    Raises:
        TypeError: it is no plain data.
    """
    return msgpack.packb(value, default=extension, use_bin_type=True)


def extension(value: Any) -> Any:
    """What msgpack has no form for."""
    if isinstance(value, np.ndarray):
        if value.dtype.name not in DTYPES:
            raise TypeError(f"an array of {value.dtype} cannot be sent; accepted: {', '.join(DTYPES)}")
        flat = np.ascontiguousarray(value)
        return msgpack.ExtType(ARRAY, encode((value.dtype.name, value.shape, flat.tobytes())))
    if isinstance(value, np.integer | np.floating | np.bool_):
        return value.item()
    names = FIELDS.get(type(value))
    if names is None:
        raise TypeError(f"{type(value).__name__} cannot be sent")
    return msgpack.ExtType(CODES[type(value)], encode(tuple(getattr(value, name) for name in names)))


def decode(data: bytes | memoryview) -> Any:
    """The value that these bytes are.

    Raises:
        ClusterError: they are none.
    """
    try:
        return msgpack.unpackb(data, ext_hook=of_extension, use_list=False, raw=False, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise ClusterError(f"a message of {len(data)} bytes cannot be read: {error}") from error


def of_extension(code: int, data: bytes) -> Any:
    """The array or dataclass behind an extension type."""
    found = decode(data)
    if not isinstance(found, tuple):
        raise ValueError(f"extension {code} holds {type(found).__name__}")
    if code == ARRAY:
        return array_of(*found)
    if not 0 <= code < len(KINDS) or len(found) != len(FIELDS[KINDS[code]]):
        raise ValueError(f"extension {code} with {len(found)} fields is unknown")
    return KINDS[code](*found)


def array_of(dtype: str, shape: tuple[int, ...], data: bytes) -> np.ndarray:
    if dtype not in DTYPES:
        raise ValueError(f"an array of {dtype!r}")
    return np.frombuffer(data, dtype).reshape(shape)


def framed(value: Any) -> bytes:
    """A value with its length before it.

    Raises:
        ClusterError: it is larger than a frame may be.
    """
    data = encode(value)
    if len(data) > MAX_FRAME_BYTES:
        raise ClusterError(f"a message has {len(data)} bytes; accepted: at most {MAX_FRAME_BYTES}")
    return LENGTH.pack(len(data)) + data
