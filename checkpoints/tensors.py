"""Logical tensors: what a checkpoint shows of each tensor before its data are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.affine import AffineTensor, WordTensor
from checkpoints.eight_bit import EightBitTensor
from checkpoints.errors import MissingTensorError
from checkpoints.mapping import give_back


@dataclass(frozen=True)
class DenseFormat:
    """Plain numbers. `dtype` is a name that numpy with ml_dtypes knows: "bfloat16", "float32", ..."""

    dtype: str


@dataclass(frozen=True)
class AffineFormat:
    """Integer codes in groups; see `AffineTensor`."""

    bits: int
    group_size: int
    has_offset: bool
    has_perm: bool = False


@dataclass(frozen=True)
class EightBitFormat:
    """Eight-bit codes of `dtype` ("int8" or "float8_e4m3fn"), scaled by channel or by block; see `EightBitTensor`."""

    dtype: str
    has_blocks: bool = False


TensorFormat = DenseFormat | AffineFormat | EightBitFormat
Tensor = np.ndarray | AffineTensor | EightBitTensor


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as the headers describe it.

    Attributes:
        name: the Hugging Face name.
        shape: in Hugging Face orientation, [N, K] for a linear, whatever the format.
        format: what `Checkpoint.read` gives: a dense array, an AffineTensor or an EightBitTensor.
        file: the file that holds it.
        num_bytes: its size in that file, scales included.
    """

    name: str
    shape: tuple[int, ...]
    format: TensorFormat
    file: Path
    num_bytes: int


@dataclass(frozen=True)
class LogicalTensor:
    """A tensor with the way to read it.

    Attributes:
        info: what the headers say.
        read: reads it.
        read_words: reads it with its codes left in words, where it is stored as a WordTensor is.
        read_window: reads some outputs and inputs of a linear alone; None where words or groups would be cut.
        check: reads what is small of it (scales, zero points) and raises CheckpointError where that is broken.
    """

    info: TensorInfo
    read: Callable[[], Tensor] = field(repr=False)
    check: Callable[[], None] | None = field(default=None, repr=False)
    read_words: Callable[[], WordTensor] | None = field(default=None, repr=False)
    read_window: Callable[[slice, slice], Tensor | None] | None = field(default=None, repr=False)


class Checkpoint:
    """A model's files, opened: config and headers are read, tensor data are not.

    Attributes:
        path: the folder or file that was opened.
        config: the Hugging Face style config, made from the metadata for GGUF.
        generation_config: may be empty.
        tensors: every logical tensor by its Hugging Face name.
    """

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        generation_config: dict[str, Any],
        tensors: Iterable[LogicalTensor],
        files: Sequence[np.ndarray] = (),
    ) -> None:
        """Takes what an opener has found; `files` are its mapped files, as `mapped` gives them."""
        self.path = path
        self._files = files
        self.config = config
        self.generation_config = generation_config
        self._logical = {tensor.info.name: tensor for tensor in tensors}
        self.tensors: Mapping[str, TensorInfo] = {n: t.info for n, t in self._logical.items()}

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {len(self.tensors)} tensors)"

    def read(self, name: str) -> Tensor:
        """Reads one tensor.

        Dense arrays have the Hugging Face orientation ([N, K] for a linear) and are, where the file allows,
        read-only views of the mapped file: slicing one reads that slice alone.

        Raises:
            MissingTensorError: there is no such tensor.
        """
        if name not in self._logical:
            raise MissingTensorError(self.path, name)
        return self._logical[name].read()

    def read_words(self, name: str) -> WordTensor | None:
        """Reads an affine tensor with its codes left in words; None where the file does not store it so."""
        reader = self._logical[name].read_words
        return None if reader is None else reader()

    def read_window(self, name: str, rows: slice, columns: slice) -> Tensor | None:
        """Reads outputs `rows` and inputs `columns` of a linear, no further; None where it can only be read whole."""
        reader = self._logical[name].read_window
        return None if reader is None else reader(rows, columns)

    def release(self) -> None:
        """Gives the mapped pages that were read back to the system, which keeps them cached.

        Until then they count as this process's memory. Arrays that were read stay valid.
        """
        for file in self._files:
            give_back(file)

    def check(self) -> None:
        """Reads the scales of quantised tensors, a few percent of the bytes, before anybody reads the rest.

        Raises:
            CheckpointError: some are not finite, or contradict the config; names file and tensor.
        """
        for tensor in self._logical.values():
            if tensor.check is not None:
                tensor.check()
