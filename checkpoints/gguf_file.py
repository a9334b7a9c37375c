"""One GGUF file: its metadata and tensor table, read and validated without touching tensor data.

The gguf package's reader makes an array of every token string: 5 s for a vocabulary of 49,152. This one takes
0.1 s and checks each length against the file's size first. Constants and dequantisers are the package's.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from checkpoints.errors import CheckpointFileError, CorruptFileError, UnsupportedFormatError
from checkpoints.mapping import mapped

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_REDOWNLOAD = "download the file again"


@dataclass(frozen=True)
class GgufTensor:
    """A tensor as the file lists it; `shape` has the usual order, [N, K] for a linear."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class GgufFile:
    """A GGUF file, opened.

    Attributes:
        path: the file.
        metadata: every key with its value; arrays of numbers are numpy arrays, of strings lists.
        tensors: the tensor table by the file's own names.
        file_bytes: the `mapped` file.
    """

    def __init__(self, path: Path) -> None:
        """Reads the header.

        Raises:
            CheckpointFileError: the file cannot be opened.
            CorruptFileError: it is truncated or contradicts itself.
            UnsupportedFormatError: a version, byte order or tensor kind that is not supported.
        """
        self.path = path
        try:
            if path.stat().st_size == 0:
                raise CorruptFileError(path, "the file is empty", hint=_REDOWNLOAD)
            self.file_bytes = mapped(path)
        except OSError as error:
            reason = f"cannot be read: {error.strerror or error}"
            raise CheckpointFileError(path, reason, hint="check that it is there and readable") from error
        cursor = _Cursor(path, self.file_bytes)
        num_tensors, num_keys = _preamble(cursor)
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.integer("<I"))
        num_parts = self.metadata.get("split.count", 1)
        if type(num_parts) is not int:
            raise CorruptFileError(path, f"split.count is {num_parts!r}", hint=_REDOWNLOAD)
        if num_parts > 1:
            hint = "merge the parts first: llama-gguf-split --merge"
            raise UnsupportedFormatError(path, "is one part of a split GGUF", hint=hint)
        entries = [_entry(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0:
            raise CorruptFileError(path, f"general.alignment is {alignment!r}", hint=_REDOWNLOAD)
        data_start = -(-cursor.position // alignment) * alignment
        self.tensors: dict[str, GgufTensor] = {}
        for name, dims, kind, offset in entries:
            if name in self.tensors:
                raise CorruptFileError(path, "is listed twice", tensor=name, hint=_REDOWNLOAD)
            self.tensors[name] = _placed(path, name, dims, kind, data_start + offset, self.file_bytes.size)

    def raw(self, tensor: GgufTensor) -> np.ndarray:
        """The tensor's bytes, uint8 [..., bytes of a row of K]: a read-only view of the mapped file."""
        raw = self.file_bytes[tensor.start : tensor.start + tensor.num_bytes]
        return raw.reshape(*tensor.shape[:-1], -1)


class _Cursor:
    """Reads the header front to back; every read is checked against the file's size."""

    def __init__(self, path: Path, data: np.ndarray) -> None:
        self.path = path
        self.position = 0
        self._data = memoryview(data)  # type: ignore[arg-type]  # an array is a buffer, which its stubs omit

    def take(self, num_bytes: int) -> memoryview:
        stop = self.position + num_bytes
        if stop > len(self._data):
            reason = f"its header needs byte {stop}, but the file has {len(self._data)}: it is truncated"
            raise CorruptFileError(self.path, reason, hint=_REDOWNLOAD)
        taken = self._data[self.position : stop]
        self.position = stop
        return taken

    def integer(self, code: str) -> int:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        text = bytes(self.take(self.integer("<Q")))
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError as error:
            reason = f"the string that ends at byte {self.position} is not UTF-8"
            raise CorruptFileError(self.path, reason, hint=_REDOWNLOAD) from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(self.integer("<I"), self.integer("<Q"))
        return self._numbers(kind, 1)[0].item()

    def _array(self, kind: int, length: int) -> Any:
        if kind == _STRING:
            if length * 8 > len(self._data) - self.position:
                self.take(length * 8)
            return [self.string() for _ in range(length)]
        return self._numbers(kind, length)

    def _numbers(self, kind: int, length: int) -> np.ndarray:
        if kind not in _SCALARS:
            reason = f"value type {kind} before byte {self.position} is unknown"
            raise CorruptFileError(self.path, reason, hint=_REDOWNLOAD)
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(length * dtype.itemsize), dtype)


def _preamble(cursor: _Cursor) -> tuple[int, int]:
    """Magic and version; gives the numbers of tensors and of metadata keys."""
    if cursor.take(4) != _MAGIC:
        raise CorruptFileError(cursor.path, "does not start with 'GGUF'", hint="it is no GGUF file")
    version = cursor.integer("<I")
    if version not in _VERSIONS:
        order = " (big-endian)" if version & 0xFFFF == 0 else ""
        reason = f"GGUF version {version}{order} is not supported"
        raise UnsupportedFormatError(cursor.path, reason, hint="convert it again: version 3, little-endian")
    return cursor.integer("<Q"), cursor.integer("<Q")


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape (the file lists the fastest dimension first), kind and offset of one tensor."""
    name = cursor.string()
    num_dims = cursor.integer("<I")
    if not 1 <= num_dims <= 4:
        raise CorruptFileError(cursor.path, f"has {num_dims} dimensions", tensor=name, hint=_REDOWNLOAD)
    dims = tuple(cursor.integer("<Q") for _ in range(num_dims))[::-1]
    return name, dims, cursor.integer("<I"), cursor.integer("<Q")


def _placed(path: Path, name: str, shape: tuple[int, ...], code: int, start: int, num_file_bytes: int) -> GgufTensor:
    try:
        kind = GGMLQuantizationType(code)
        block_len, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
        hint = "update the gguf package, or convert the file again"
        raise UnsupportedFormatError(path, f"tensor kind {code} is unknown", tensor=name, hint=hint) from error
    if 0 in shape or shape[-1] % block_len:
        reason = f"shape {list(shape)} does not divide into {kind.name} blocks of {block_len}"
        raise CorruptFileError(path, reason, tensor=name, hint=_REDOWNLOAD)
    num_bytes = math.prod(shape) // block_len * block_bytes
    if start + num_bytes > num_file_bytes:
        reason = f"its data end at byte {start + num_bytes}, but the file has {num_file_bytes}: it is truncated"
        raise CorruptFileError(path, reason, tensor=name, hint=_REDOWNLOAD)
    return GgufTensor(name, kind, shape, start, num_bytes)
