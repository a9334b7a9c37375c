"""One safetensors file, read lazily: any dtype, no torch, everything validated before data are touched."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints.errors import CheckpointFileError, CorruptFileError, UnsupportedFormatError
from checkpoints.mapping import mapped

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_REDOWNLOAD = "download the file again"

_DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}


@dataclass(frozen=True)
class StoredTensor:
    """An array as it lies in a safetensors file: bytes `start` .. `stop` of the `mapped` file; `at` is what is read."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    file: Path
    start: int
    stop: int
    file_bytes: np.ndarray
    at: tuple[slice, ...] = ()

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start

    def read(self) -> np.ndarray:
        """A read-only view of the mapped file (a copy where the file aligns it badly): [shape], or `at` of it."""
        raw = self.file_bytes[self.start : self.stop]
        if self.start % self.dtype.itemsize:
            raw = raw.copy()
        return raw.view(self.dtype).reshape(self.shape)[self.at]


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Opens a file and reads its header; the layout is an 8-byte header length, JSON, then raw bytes.

    Raises:
        CheckpointFileError: the file cannot be opened.
        CorruptFileError: header and file contradict each other.
        UnsupportedFormatError: a dtype that numpy and ml_dtypes do not know.
    """
    try:
        num_file_bytes = path.stat().st_size
        with path.open("rb") as file:
            num_header_bytes = _header_len(path, file.read(8), num_file_bytes)
            header = _parse_header(path, file.read(num_header_bytes))
        data = mapped(path)
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}"
        raise CheckpointFileError(path, reason, hint="check that it is there and readable") from error
    data_start = 8 + num_header_bytes
    header.pop("__metadata__", None)
    tensors = {name: _entry(path, name, entry, data_start, data) for name, entry in header.items()}
    _check_cover(path, tensors, data_start, num_file_bytes)
    return tensors


def _header_len(path: Path, prefix: bytes, num_file_bytes: int) -> int:
    if len(prefix) < 8:
        reason = f"the file has {num_file_bytes} bytes, too few for a safetensors header"
        raise CorruptFileError(path, reason, hint=_REDOWNLOAD)
    num_bytes = int.from_bytes(prefix, "little")
    if num_bytes > min(_MAX_HEADER_BYTES, num_file_bytes - 8):
        reason = f"its header claims {num_bytes} bytes, but the file has {num_file_bytes}"
        raise CorruptFileError(path, reason, hint=f"it is truncated or no safetensors file: {_REDOWNLOAD}")
    return num_bytes


def _parse_header(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = f"its header is not valid JSON ({error})"
        raise CorruptFileError(path, reason, hint=_REDOWNLOAD) from error
    if not isinstance(header, dict):
        reason = f"its header is a JSON {type(header).__name__}, not an object"
        raise CorruptFileError(path, reason, hint=_REDOWNLOAD)
    return header


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _entry(path: Path, name: str, entry: Any, data_start: int, data: np.ndarray) -> StoredTensor:
    def corrupt(reason: str) -> CorruptFileError:
        return CorruptFileError(path, reason, tensor=name, hint=_REDOWNLOAD)

    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise corrupt("its header entry lacks dtype, shape or data_offsets")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or not all(map(_is_count, shape)) or len(shape) > 16:
        raise corrupt(f"its shape {shape!r} is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise corrupt(f"its data_offsets {offsets!r} are not two positions")
    dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        reason = f"has dtype {entry['dtype']!r}, which is not supported"
        hint = f"supported: {', '.join(_DTYPES)}"
        raise UnsupportedFormatError(path, reason, tensor=name, hint=hint)
    start, stop = (data_start + offset for offset in offsets)
    if stop > data.size:
        raise corrupt(f"its data end at byte {stop}, but the file has {data.size}: it is truncated")
    num_bytes = math.prod(shape) * dtype.itemsize
    if stop - start != num_bytes:
        raise corrupt(f"{entry['dtype']} {shape} takes {num_bytes} bytes, its data_offsets span {stop - start}")
    return StoredTensor(name, dtype, tuple(shape), path, start, stop, data)


def _check_cover(path: Path, tensors: dict[str, StoredTensor], data_start: int, num_file_bytes: int) -> None:
    """The format allows neither holes nor overlaps nor trailing bytes."""
    position = data_start
    for tensor in sorted(tensors.values(), key=lambda t: (t.start, t.stop)):
        if tensor.start != position:
            reason = f"its data start at byte {tensor.start}, where {position} was expected"
            raise CorruptFileError(path, reason, tensor=tensor.name, hint=_REDOWNLOAD)
        position = tensor.stop
    if position != num_file_bytes:
        reason = f"its tensors end at byte {position}, but the file has {num_file_bytes}"
        raise CorruptFileError(path, reason, hint=_REDOWNLOAD)
