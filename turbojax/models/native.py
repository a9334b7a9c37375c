"""Native checkpoints of a model: its weights as they are on the device, and the spec that they follow."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import jax

from checkpoints.native import read_meta, restore_native, save_native
from pallas_kernels.backend import on_gpu
from turbojax.core.weights import LayerWeights, Weights
from turbojax.errors import ModelConfigError
from turbojax.kv_policy import ENTRY, read_k_scale, read_kv_policy, write_k_scale
from turbojax.models.abstract import abstract_weights
from turbojax.models.model import Model
from turbojax.models.native_shards import restore_shards
from turbojax.models.packed_form import PackedForm, abstract_stored, as_kernels_read, as_loaded, as_stored
from turbojax.models.planning import KVBits, has_hadamard
from turbojax.models.spec import ModelSpec, SegmentSpec
from turbojax.sharding import HERE, Placement
from turbojax.tokenizer import load_tokenizer

Shard = Callable[[Any], Any]
"""An abstract tree -> the same tree with shardings on its leaves."""


def save_model(model: Model, path: str | Path) -> None:
    """Writes a native checkpoint, which loads without parsing, fusing or packing anything.

    What else the checkpoint it came from has goes with it: its tokenizer, and what a calibration found of its KV cache.

    Raises:
        CheckpointFileError: the folder exists, or cannot be written.
        TokenizerError: the checkpoint it came from has a broken tokenizer.
        ModelConfigError: the checkpoint it came from has a broken KV policy or scale of keys.
    """
    path, tokenizer = Path(path), load_tokenizer(model.path)
    policy, k_scale = read_kv_policy(model.path), read_k_scale(model.path)
    beside = {} if policy is None else {ENTRY: policy.entry()}  # a folder's config has it already, a file's does not
    write_weights(path, model.weights, beside | model.config, model.generation_config)
    if tokenizer is not None:
        tokenizer.save(path)
    if k_scale is not None:
        write_k_scale(path, k_scale)


def write_weights(path: Path, weights: Weights, config: Any, generation_config: Any) -> None:
    """Writes weights in the form that kernels read, with all that `load_native_model` needs to know of them.

    Raises:
        ModelConfigError: they are cut into shards, whose padding belongs to this number of devices.
    """
    if weights.spec.num_shards > 1:
        raise ModelConfigError(
            f"{path}: the model is cut for {weights.spec.num_shards} devices; load it on one to save it"
        )
    stored, forms = as_stored(weights)
    meta = {
        "spec": dataclasses.asdict(weights.spec),
        "packed": forms,
        "config": config,
        "generation_config": generation_config,
    }
    save_native(path, stored, meta)


def load_native_model(
    path: str | Path, shard: Shard | None = None, *, packed: bool | None = None, placement: Placement = HERE
) -> Model:
    """Restores a native checkpoint.

    Args:
        path: the folder.
        shard: adds shardings to the abstract tree; the arrays are restored straight into them. Without it they go to
            the default device.
        packed: leave codes as kernels read them, or unpack them for the reference; None is what the backend computes
            with.
        placement: devices that the model is cut between, each of which reads its slices alone.

    Raises:
        turbojax.errors.ConfigError: the slices of these devices are no shards; names what does not divide.
        ConfigError, CorruptFileError: it is no native checkpoint of this version, or its files are broken.
    """
    path = Path(path)
    meta = read_meta(path)
    spec = from_plain(ModelSpec, meta["spec"])
    forms = {place: from_plain(PackedForm, form) for place, form in meta["packed"].items()}
    abstract = abstract_stored(abstract_weights(spec), spec, forms)
    reads = packed or (packed is None and on_gpu())
    finish = lambda stored: as_kernels_read(stored, forms) if reads else as_loaded(stored, forms)  # noqa: E731
    if placement.num_shards > 1:
        weights = restore_shards(path, abstract, placement, finish)
        return Model(path, weights.spec, weights, meta["config"], meta["generation_config"], placement)
    device = placement.whole or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if shard is None:
        on_device = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device)  # noqa: E731
        abstract = jax.tree.map(on_device, abstract)
    else:
        abstract = shard(abstract)
    weights = finish(restore_native(path, abstract))
    return Model(path, spec, weights, meta["config"], meta["generation_config"], placement)


def with_kv_bits(model: Model, kv_bits: Callable[[int], KVBits], kv_hadamard: bool = False) -> Model:
    """The model with another precision of its KV cache (bits of K and V by layer); the weights' values stay.

    Layers of one stack that come to differ are cut into several, whose arrays are copies.
    """
    weights, segments = list[LayerWeights](), list[SegmentSpec]()
    for stack, segment in zip(model.weights.segments, model.spec.segments, strict=True):
        for first, last, (k_bits, v_bits) in runs_of(kv_bits, segment):
            layer = dataclasses.replace(
                segment.layer, k_bits=k_bits, v_bits=v_bits, k_hadamard=has_hadamard((k_bits, v_bits), kv_hadamard)
            )
            run = itemgetter(slice(first - segment.first_layer, last - segment.first_layer))
            segments.append(SegmentSpec(layer, first, last - first))
            is_whole = last - first == segment.num_layers
            weights.append(stack if is_whole else jax.tree.map(run, stack))
    spec = dataclasses.replace(model.spec, segments=tuple(segments))
    found = dataclasses.replace(model.weights, segments=tuple(weights), spec=spec)
    return dataclasses.replace(model, spec=spec, weights=found)


def runs_of(kv_bits: Callable[[int], KVBits], segment: SegmentSpec) -> Iterator[tuple[int, int, KVBits]]:
    """Layers first .. last of a segment, `last` not among them, that stand together and have the same bits."""
    first, end = segment.first_layer, segment.first_layer + segment.num_layers
    for bits, layers in groupby(range(first, end), key=kv_bits):
        num_layers = len(list(layers))
        yield first, first + num_layers, bits
        first += num_layers


def from_plain(kind: Any, value: Any) -> Any:
    """The inverse of dataclasses.asdict, by the fields' types: dataclasses, tuples of one kind, optional ones.

    A union of dataclasses is told apart by their fields' names.
    """
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        kinds = [a for a in args if a is not types.NoneType]
        kind = kinds[0] if len(kinds) == 1 else next(a for a in kinds if {f.name for f in fields(a)} == {*value})
        return from_plain(kind, value)
    if origin is tuple:
        return tuple(from_plain(args[0], item) for item in value)
    if origin is dict:
        return dict(value)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{name: from_plain(hints[name], item) for name, item in value.items()})  # type: ignore[operator]
    return float(value) if kind is float else value
