"""The folder of a run under way: finished layers and the stream behind the last, so that a killed run goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from checkpoints import AffineTensor, Checkpoint, EightBitTensor
from checkpoints.safetensors_file import StoredTensor, read_safetensors
from checkpoints.tensors import AffineFormat, DenseFormat, EightBitFormat, LogicalTensor, Tensor, TensorInfo
from turbojax.errors import LiteError
from turbojax.lite.floats import FloatModel
from turbojax.lite.methods import LinearReport, QuantisedLayer

AFFINE, EIGHT_BIT = ("codes", "scale", "offset", "perm"), ("codes", "scale")


class WorkFolder:
    """Layers in canonical form, one file each; whatever has its `.json` is whole."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Opens the folder, or makes it.

        Raises:
            LiteError: it holds a run with other settings; names the first that differs.
        """
        self.path, found = path, path / "settings.json"
        settings = json.loads(json.dumps(settings))
        if found.exists():
            before = json.loads(found.read_text(encoding="utf-8"))
            for name in sorted(before.keys() | settings.keys()):
                if before.get(name) != settings.get(name):
                    raise LiteError(
                        f"{path}: holds an unfinished run whose {name} is {before.get(name)!r}, and now it is "
                        f"{settings.get(name)!r}: remove the folder, or repeat that run's settings"
                    )
            return
        path.mkdir(parents=True, exist_ok=True)
        write_whole(found, lambda at: at.write_text(json.dumps(settings, indent=2), encoding="utf-8"))

    @property
    def num_done(self) -> int:
        """Layers that are finished, counted from the first on."""
        count = 0
        while self._layer(count, "json").exists():
            count += 1
        return count

    def stream(self) -> np.ndarray:
        """The stream behind the last finished layer, float32 [B, T, D]."""
        return np.load(self._stream(self.num_done))

    def finish_layer(self, index: int, layer: QuantisedLayer, stream: np.ndarray | None) -> None:
        """Keeps a layer; what a crash leaves half written does not count."""
        arrays, forms = dict(layer.others), {}
        for name, codes in layer.codes.items():
            leaves = AFFINE if isinstance(codes, AffineTensor) else EIGHT_BIT
            found = {leaf: getattr(codes, leaf) for leaf in leaves}
            arrays |= {f"{name}:{leaf}": np.ascontiguousarray(a) for leaf, a in found.items() if a is not None}
            forms[name] = form_of(codes)
        write_whole(self._layer(index, "safetensors"), lambda at: save_file(arrays, at))
        if stream is not None:
            write_whole(self._stream(index + 1), lambda at: save_array(at, stream))
        record = {"codes": forms, "linears": [asdict(linear) for linear in layer.linears]}
        write_whole(self._layer(index, "json"), lambda at: at.write_text(json.dumps(record), encoding="utf-8"))
        self._stream(index).unlink(missing_ok=True)

    def linears(self) -> list[LinearReport]:
        """What rounding did to each linear of the finished layers."""
        records = [self._record(i) for i in range(self.num_done)]
        return [LinearReport(**linear) for record in records for linear in record["linears"]]

    def tensors(self) -> dict[str, LogicalTensor]:
        """The finished layers' tensors."""
        found: dict[str, LogicalTensor] = {}
        for i in range(self.num_done):
            path = self._layer(i, "safetensors")
            stored, forms = read_safetensors(path), self._record(i)["codes"]
            found |= {name: dense(name, tensor) for name, tensor in stored.items() if ":" not in name}
            for name, form in forms.items():
                leaves = {leaf: stored[f"{name}:{leaf}"] for leaf in AFFINE if f"{name}:{leaf}" in stored}
                found[name] = affine(name, leaves, **form) if form else eight_bit(name, leaves)
        return found

    def remove(self) -> None:
        shutil.rmtree(self.path)

    def _layer(self, index: int, suffix: str) -> Path:
        return self.path / f"layer-{index:05}.{suffix}"

    def _stream(self, index: int) -> Path:
        return self.path / f"stream-{index:05}.npy"

    def _record(self, index: int) -> dict[str, Any]:
        return json.loads(self._layer(index, "json").read_text(encoding="utf-8"))


def form_of(codes: AffineTensor | EightBitTensor) -> dict[str, int]:
    """What the arrays do not say of themselves."""
    if isinstance(codes, EightBitTensor):
        return {}
    return {"bits": codes.bits, "group_size": codes.group_size}


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file under another name first."""
    half = path.with_name(path.name + ".half")
    write(half)
    half.replace(path)


def save_array(path: Path, array: np.ndarray) -> None:
    with path.open("wb") as file:  # np.save adds a suffix to names
        np.save(file, array)


def dense(name: str, stored: StoredTensor) -> LogicalTensor:
    info = TensorInfo(name, stored.shape, DenseFormat(stored.dtype.name), stored.file, stored.num_bytes)
    return LogicalTensor(info, stored.read)


def affine(name: str, leaves: dict[str, StoredTensor], *, bits: int, group_size: int) -> LogicalTensor:
    in_dim, out_dim = leaves["codes"].shape

    def read() -> Tensor:
        arrays = {leaf: stored.read() for leaf, stored in leaves.items()}
        rest = {leaf: arrays.get(leaf) for leaf in ("offset", "perm")}
        return AffineTensor(arrays["codes"], arrays["scale"], rest["offset"], bits, group_size, rest["perm"])

    form = AffineFormat(bits, group_size, has_offset="offset" in leaves, has_perm="perm" in leaves)
    return LogicalTensor(TensorInfo(name, (out_dim, in_dim), form, leaves["codes"].file, size_of(leaves)), read)


def eight_bit(name: str, leaves: dict[str, StoredTensor]) -> LogicalTensor:
    codes, scale = leaves["codes"], leaves["scale"]
    form = EightBitFormat(codes.dtype.name, has_blocks=scale.shape[1] > 1)
    info = TensorInfo(name, (codes.shape[0], codes.shape[1]), form, codes.file, size_of(leaves))
    return LogicalTensor(info, lambda: EightBitTensor(codes.read(), scale.read()))


def size_of(leaves: dict[str, StoredTensor]) -> int:
    return sum(stored.num_bytes for stored in leaves.values())


def result_checkpoint(model: FloatModel, work: WorkFolder, dense_dtype: np.dtype | None) -> Checkpoint:
    """The quantised model as a checkpoint: the work folder's layers, and the source's other tensors.

    Args:
        model: the source.
        work: with all layers.
        dense_dtype: of everything that is no codes; None leaves it as the source and the work folder have it.
    """
    done, source = work.tensors(), model.checkpoint
    tensors = []
    for name, info in source.tensors.items():
        tensor = done.get(name) or LogicalTensor(info, lambda name=name: source.read(name))  # type: ignore[misc]
        is_codes = name in done and not isinstance(tensor.info.format, DenseFormat)
        if not is_codes and dense_dtype is not None:
            tensor = as_dense(tensor, dense_dtype)
        tensors.append(tensor)
    quantised = ("quantization_config", "compression_config")
    config = {key: value for key, value in source.config.items() if key not in quantised}
    return Checkpoint(source.path, config, dict(source.generation_config), tensors)


def as_dense(tensor: LogicalTensor, dtype: np.dtype) -> LogicalTensor:
    """A tensor's values in a dtype."""

    def read() -> np.ndarray:
        value = tensor.read()
        if isinstance(value, AffineTensor):
            value = value.dequantize().T
        elif isinstance(value, EightBitTensor):
            value = value.dequantize()
        return np.ascontiguousarray(value.astype(dtype))

    return LogicalTensor(replace(tensor.info, format=DenseFormat(dtype.name)), read)
