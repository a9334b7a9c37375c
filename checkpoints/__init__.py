"""Model files on disk shown as named host tensors: formats, not models."""

from __future__ import annotations

from pathlib import Path

from checkpoints.affine import AffineTensor, WordTensor
from checkpoints.eight_bit import EightBitTensor
from checkpoints.errors import (
    CheckpointError,
    CheckpointFileError,
    ConfigError,
    CorruptFileError,
    MissingTensorError,
    ShapeMismatchError,
    UnsupportedFormatError,
)
from checkpoints.model_format import MODEL_FORMATS, resolve
from checkpoints.tensors import (
    AffineFormat,
    Checkpoint,
    DenseFormat,
    EightBitFormat,
    LogicalTensor,
    Tensor,
    TensorFormat,
    TensorInfo,
)

__all__ = [
    "MODEL_FORMATS",
    "AffineFormat",
    "AffineTensor",
    "Checkpoint",
    "CheckpointError",
    "CheckpointFileError",
    "ConfigError",
    "CorruptFileError",
    "DenseFormat",
    "EightBitFormat",
    "EightBitTensor",
    "LogicalTensor",
    "MissingTensorError",
    "ShapeMismatchError",
    "Tensor",
    "TensorFormat",
    "TensorInfo",
    "UnsupportedFormatError",
    "WordTensor",
    "is_native",
    "open_checkpoint",
]


def open_checkpoint(path: str | Path, model_format: str | None = None) -> Checkpoint:
    """Opens a Hugging Face folder (safetensors) or a .gguf file; reads config and headers only.

    Beside them it reads the group of each input (`g_idx`) and the shape of packed codes, which belong to a format.

    Args:
        path: where it is.
        model_format: what it must be, one of `MODEL_FORMATS`; None finds out.

    Raises:
        CheckpointError: one line that names the file, the tensor if it is one, the reason and the remedy.
    """
    path = Path(path)
    if path.is_dir():
        from checkpoints.hf_folder import open_folder

        return open_folder(path, model_format)
    if not path.exists():
        raise CheckpointFileError(path, "there is no such folder or file", hint="check the path")
    if path.suffix == ".gguf":
        from checkpoints.gguf_checkpoint import open_gguf

        resolve(path, {"quant_method": "gguf"}, model_format)
        return open_gguf(path)
    hint = "give a folder with config.json and safetensors, or a .gguf file"
    raise UnsupportedFormatError(path, "is neither a folder nor a .gguf file", hint=hint)


def is_native(path: str | Path) -> bool:
    """Whether a folder is a finished native checkpoint, for `checkpoints.native`, whose import takes 0.3 s."""
    return (Path(path) / "_CHECKPOINT_METADATA").is_file()
