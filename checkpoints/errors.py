"""Typed errors of checkpoint reading: each message is one line with file, tensor, reason and remedy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class CheckpointError(Exception):
    """A checkpoint cannot be read.

    Attributes:
        file: the file (or folder) that is at fault.
        reason: what was found, and what was expected.
        tensor: the tensor at fault, if it is one tensor.
        hint: what to do about it.
    """

    def __init__(self, file: str | Path, reason: str, *, tensor: str | None = None, hint: str = "") -> None:
        self.file = Path(file)
        self.reason = reason
        self.tensor = tensor
        self.hint = hint
        where = f"{self.file}: tensor {tensor!r}" if tensor else f"{self.file}"
        text = f"{where}: {reason}" + (f"; {hint}" if hint else "")
        super().__init__(" ".join(text.split()))


class CheckpointFileError(CheckpointError):
    """A file is missing or cannot be opened."""


class CorruptFileError(CheckpointError):
    """A file is truncated, or its header contradicts its contents."""


class ConfigError(CheckpointError):
    """A config file, or the metadata in place of one, lacks a key or holds a wrong value."""


class UnsupportedFormatError(CheckpointError):
    """The file is well formed but of a kind that is not supported."""


class MissingTensorError(CheckpointError):
    """The model needs a tensor that the checkpoint does not hold."""

    def __init__(self, file: str | Path, tensor: str, *, hint: str = "") -> None:
        default = "the checkpoint is incomplete: download it again, or check the architecture in its config"
        super().__init__(file, "is missing", tensor=tensor, hint=hint or default)


class ShapeMismatchError(CheckpointError):
    """A tensor's shape is not the one that the config implies."""

    def __init__(
        self, file: str | Path, tensor: str, *, found: Sequence[int], expected: Sequence[int], hint: str = ""
    ) -> None:
        self.found, self.expected = tuple(found), tuple(expected)
        reason = f"has shape {list(found)}, but the config implies {list(expected)}"
        super().__init__(
            file, reason, tensor=tensor, hint=hint or "config and weights do not belong together: check both"
        )
