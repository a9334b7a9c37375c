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
# Keys of a dict that stands for a dataclass; all others are texts, or slots from 0.
KIND, VALUES = -1, -2
ARRAY = 1  # msgpack's code of an extension: dtype, number of axes, their lengths, the values
# Of tokens, masks and parameters.
DTYPES = ("int32", "int64", "uint32", "float32", "float64", "bool")


def encode(value: Any) -> bytes:
    """A value as bytes.

    Raises:
        TypeError: it is no plain data.
    """
    return msgpack.packb(value, default=simpler, use_bin_type=True)


def simpler(value: Any) -> Any:
    """What msgpack has no form for, as something that it has."""
    names = FIELDS.get(type(value))
    if names is not None:
        return {KIND: CODES[type(value)], VALUES: tuple(getattr(value, name) for name in names)}
    if isinstance(value, np.integer | np.floating | np.bool_):
        return value.item()
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} cannot be sent")
    if value.dtype.name not in DTYPES:
        raise TypeError(f"an array of {value.dtype} cannot be sent; accepted: {', '.join(DTYPES)}")
    head = struct.pack(f"!BB{value.ndim}I", DTYPES.index(value.dtype.name), value.ndim, *value.shape)
    return msgpack.ExtType(ARRAY, head + value.tobytes())


def decode(data: bytes | memoryview) -> Any:
    """The value that these bytes are.

    Raises:
        ClusterError: they are none.
    """
    try:
        return msgpack.unpackb(
            data, object_hook=of_dict, ext_hook=of_extension, use_list=False, raw=False, strict_map_key=False
        )
    except (ValueError, TypeError, IndexError, struct.error, msgpack.UnpackException, RecursionError) as error:
        raise ClusterError(f"a message of {len(data)} bytes cannot be read: {error}") from error


def of_dict(found: dict[Any, Any]) -> Any:
    """The dataclass that a dict stands for, or the dict."""
    if KIND not in found:
        return found
    code, values = found[KIND], found.get(VALUES)
    if not isinstance(code, int) or not 0 <= code < len(KINDS) or not isinstance(values, tuple):
        raise ValueError(f"dataclass {code} is unknown")
    kind = KINDS[code]
    if len(values) != len(FIELDS[kind]):
        raise ValueError(f"{kind.__name__} has {len(FIELDS[kind])} fields, not {len(values)}")
    return kind(*values)


def of_extension(code: int, data: bytes) -> np.ndarray:
    """An array; it cannot be written to."""
    if code != ARRAY:
        raise ValueError(f"extension {code} is unknown")
    dtype, num_axes = data[0], data[1]
    start = 2 + 4 * num_axes
    return np.frombuffer(data[start:], DTYPES[dtype]).reshape(struct.unpack(f"!{num_axes}I", data[2:start]))


def framed(value: Any) -> bytes:
    """A value with its length before it.

    Raises:
        ClusterError: it is larger than a frame may be.
    """
    data = encode(value)
    if len(data) > MAX_FRAME_BYTES:
        raise ClusterError(f"a message has {len(data)} bytes; accepted: at most {MAX_FRAME_BYTES}")
    return LENGTH.pack(len(data)) + data
