"""Writes a Hugging Face folder: shards of safetensors, their index and config.json, and never half of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from checkpoints.affine import AffineTensor
from checkpoints.eight_bit import EightBitTensor
from checkpoints.errors import CheckpointFileError, UnsupportedFormatError
from checkpoints.exporters.layout import Layout, Scheme
from checkpoints.tensors import Checkpoint, DenseFormat

MAX_SHARD_BYTES = 2 << 30  # what is held before it is written


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """A folder to write into, beside `path`, that takes its name at the end; after an error nothing is left of it.

    Raises:
        CheckpointFileError: `path` exists already, or cannot be written.
    """
    if path.exists():
        raise CheckpointFileError(path, "exists already", hint="choose another folder, or remove it")
    folder = path.with_name(f".{path.name}.writing")
    try:
        shutil.rmtree(folder, ignore_errors=True)  # left by a run that was killed
        folder.mkdir(parents=True)
        yield folder
        folder.rename(path)
    except OSError as error:
        reason = f"cannot be written: {error.strerror or error}"
        raise CheckpointFileError(path, reason, hint="check free space and permissions") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class ShardWriter:
    """Collects arrays into files of bounded size."""

    def __init__(self, folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        self.folder, self.max_shard_bytes = folder, max_shard_bytes
        self.num_bytes = 0
        self._held: dict[str, np.ndarray] = {}
        self._held_bytes = 0
        self._shards: list[list[str]] = []

    def add(self, arrays: dict[str, np.ndarray]) -> None:
        """Arrays of one tensor, which stay in one file."""
        size = sum(array.nbytes for array in arrays.values())
        if self._held and self._held_bytes + size > self.max_shard_bytes:
            self._flush()
        self._held |= {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        self._held_bytes += size
        self.num_bytes += size

    def finish(self) -> None:
        """Writes what is held, names the files by their number, and writes the index where there are several."""
        self._flush()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self._shards):
            name = "model.safetensors" if count == 1 else f"model-{i + 1:05}-of-{count:05}.safetensors"
            self._shard(i).rename(self.folder / name)
            weight_map |= dict.fromkeys(names, name)
        if count > 1:
            index = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
            write_json(self.folder / "model.safetensors.index.json", index)

    def _shard(self, index: int) -> Path:
        return self.folder / f"shard-{index}"

    def _flush(self) -> None:
        if self._held:
            save_file(self._held, self._shard(len(self._shards)), metadata={"format": "pt"})
            self._shards.append(list(self._held))
            self._held, self._held_bytes = {}, 0


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check_layout(checkpoint: Checkpoint, layout: Layout, scheme: Scheme, names: list[str]) -> None:
    """Whether a layout can hold the linears `names` of a checkpoint in a scheme, before anybody computes them.

    Raises:
        UnsupportedFormatError: naming the tensor, what the layout lacks and what to do.
    """
    for name in names:
        info = checkpoint.tensors[name]
        if problem := layout.problem(scheme, (info.shape[0], info.shape[1])):
            raise UnsupportedFormatError(info.file, problem, tensor=name, hint="choose another --format")


def export_folder(
    checkpoint: Checkpoint,
    layout: Layout,
    scheme: Scheme,
    folder: Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Writes a checkpoint's tensors and configs into a folder that exists; one tensor is read at a time.

    Args:
        checkpoint: canonical codes and dense tensors; its config is that of the model without `quantization_config`.
        layout: of the codes.
        scheme: of all of them.
        folder: see `staged`.
        max_shard_bytes: of a file, unless one tensor is larger.
        progress: hears of each tensor written.

    Returns:
        The bytes of the tensors.
    """
    writer = ShardWriter(folder, max_shard_bytes)
    for name in checkpoint.tensors:
        tensor = checkpoint.read(name)
        if isinstance(tensor, AffineTensor | EightBitTensor):
            try:
                writer.add(layout.arrays(name.removesuffix(".weight"), tensor))
            except ValueError as error:
                hint = "choose another --format"
                raise UnsupportedFormatError(checkpoint.path, str(error), tensor=name, hint=hint) from error
        else:
            writer.add({name: tensor})
        if progress is not None:
            progress(1)
    writer.finish()
    config = {**checkpoint.config, "quantization_config": layout.quantization_config(scheme, dense_modules(checkpoint))}
    write_json(folder / "config.json", config)
    if checkpoint.generation_config:
        write_json(folder / "generation_config.json", checkpoint.generation_config)
    return writer.num_bytes


def dense_modules(checkpoint: Checkpoint) -> list[str]:
    """Matrices that are no codes and no embedding: what a config lists as not converted."""
    return [
        name.removesuffix(".weight")
        for name, info in checkpoint.tensors.items()
        if isinstance(info.format, DenseFormat) and len(info.shape) == 2 and "embed" not in name
    ]
