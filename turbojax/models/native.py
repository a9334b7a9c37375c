"""Native checkpoints of a model: its weights as they are on the device, and the spec that they follow."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from checkpoints.native import read_meta, restore_native, save_native
from turbojax.models.abstract import abstract_weights
from turbojax.models.model import Model
from turbojax.models.spec import ModelSpec

Shard = Callable[[Any], Any]
"""An abstract tree -> the same tree with shardings on its leaves."""


def save_model(model: Model, path: str | Path) -> None:
    """Writes a native checkpoint, which loads without parsing, fusing or transposing anything.

    Raises:
        CheckpointFileError: the folder exists, or cannot be written.
    """
    meta = {
        "spec": dataclasses.asdict(model.spec),
        "config": model.config,
        "generation_config": model.generation_config,
    }
    save_native(Path(path), model.weights, meta)


def load_native_model(path: str | Path, shard: Shard | None = None) -> Model:
    """Restores a native checkpoint.

    Args:
        path: the folder.
        shard: adds shardings to the abstract tree; the arrays are restored straight into them. Without it they go to
            the default device.

    Raises:
        ConfigError, CorruptFileError: it is no native checkpoint of this version, or its files are broken.
    """
    path = Path(path)
    meta = read_meta(path)
    spec = from_plain(ModelSpec, meta["spec"])
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = abstract_weights(spec)
    if shard is None:
        on_device = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)  # noqa: E731
        abstract = jax.tree.map(on_device, abstract)
    else:
        abstract = shard(abstract)
    return Model(path, spec, restore_native(path, abstract), meta["config"], meta["generation_config"])


def from_plain(kind: Any, value: Any) -> Any:
    """The inverse of dataclasses.asdict, by the fields' types: dataclasses, tuples of one kind, optional ones."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else from_plain(next(a for a in args if a is not type(None)), value)
    if origin is tuple:
        return tuple(from_plain(args[0], item) for item in value)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{name: from_plain(hints[name], item) for name, item in value.items()})  # type: ignore[operator]
    return float(value) if kind is float else value
