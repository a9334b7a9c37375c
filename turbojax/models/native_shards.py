"""A native checkpoint straight into shards: each device reads its slice of every array, where that is its shard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from checkpoints.native import restore_native
from pallas_kernels.affine_linear import PackedAffine
from turbojax.core.weights import Linear, Weights
from turbojax.errors import ConfigError
from turbojax.models.abstract import abstract_weights
from turbojax.models.cutting import ROW_PARALLEL, ModelCut
from turbojax.models.packed_form import affine_parts, with_parts
from turbojax.models.spec import ModelSpec, gate_up_tile
from turbojax.sharding import Placement

Finish = Callable[[Weights], Weights]
"""From what is stored to what steps read."""


def restore_shards(path: Path, stored: Weights, placement: Placement, finish: Finish) -> Weights:
    """Restores the shards of a model.

    Args:
        path: the checkpoint.
        stored: the abstract tree of what it holds, of the whole model.
        placement: the devices.
        finish: applied to each shard.

    Raises:
        ConfigError: shards are no slices of what is stored; says what does not divide.
        CorruptFileError: see `restore_native`.
    """
    cut = ModelCut.of(stored.spec, placement.num_shards)
    if problem := uneven(cut, stored):
        accepted = f"a number that divides it, or the checkpoint that {path.name} was saved from: {problem}"
        raise ConfigError("EngineConfig", "tp", placement.num_shards, accepted)
    restored, local = restore_native(path, sliced(stored, placement)), cut.shard_spec()
    shards = []
    for number, device in enumerate(placement.devices):
        if device in placement.mesh.local_devices:
            with jax.default_device(device):  # for whatever `finish` unpacks
                shard = finish(shard_of(restored, local, device, is_first=number == 0))
                shards.append(jax.device_put(shard, device))
    return placement.join(shards)


def sliced(stored: Weights, placement: Placement) -> Weights:
    """The abstract tree with shardings. What a row-parallel linear has once for each output every device reads."""
    num = placement.num_shards

    def into(spec: PartitionSpec, leaf: Any) -> Any:
        cut = [size for size, axis in zip(leaf.shape, spec, strict=False) if axis is not None]
        spec = PartitionSpec() if any(size % num for size in cut) else spec
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(placement.mesh, spec))

    specs: Weights = placement.rules.of(stored)
    bias_for_all = lambda w: replace(w, bias=None if w.bias is None else PartitionSpec())  # noqa: E731
    segments = tuple(replace(s, o=bias_for_all(s.o), down=bias_for_all(s.down)) for s in specs.segments)
    is_spec = lambda node: isinstance(node, PartitionSpec)  # noqa: E731
    return jax.tree.map(into, replace(specs, segments=segments), stored, is_leaf=is_spec)


def uneven(cut: ModelCut, stored: Weights) -> str | None:
    """Why the slices of what is stored are not the shards; None where they are."""
    spec, num = cut.spec, cut.num_shards
    layer, local = spec.segments[0].layer, cut.shard_spec()
    ffw_dim = layer.down.in_dim
    if layer.num_kv_heads % num:
        return f"{layer.num_kv_heads} kv heads"
    if ffw_dim % num or gate_up_tile(ffw_dim // num) != gate_up_tile(ffw_dim):
        return f"{ffw_dim} columns of the MLP in tiles of {gate_up_tile(ffw_dim)}"
    if spec.vocab_size % num:
        return f"{spec.vocab_size} tokens"
    for whole, part in zip(spec.segments, local.segments, strict=True):
        for name in ROW_PARALLEL:
            before, after = getattr(whole.layer, name).storage, getattr(part.layer, name).storage
            if before != after and getattr(before, "group_size", 0) < getattr(whole.layer, name).in_dim:
                return f"groups or blocks of {name}: {before}"
    return next(filter(None, (uneven_part(name, p, num) for name, p in affine_parts(stored).items())), None)


def uneven_part(place: str, part: Any, num: int) -> str | None:
    """See `uneven`; of a linear of grouped codes."""
    is_row_parallel = any(f".{name}." in place for name in ROW_PARALLEL)
    if is_row_parallel and part.perm is not None:
        return f"permuted codes of {place}"
    if not isinstance(part, PackedAffine):
        return None
    if is_row_parallel and (part.K % num or part.K // num % part.layout.tile_k):
        return f"{part.K} inputs of {place} in tiles of {part.layout.tile_k}"
    if not is_row_parallel and (part.N % num or part.words.shape[2] != part.N or part.N // num % 64):
        return f"{part.N} outputs of {place} in runs of 64"
    return None


def shard_of(restored: Weights, local: ModelSpec, device: jax.Device | None, *, is_first: bool) -> Weights:
    """The part of a device, as the model that it is; a bias behind the sum is the first one's."""
    mine = jax.tree.map(lambda leaf: next(s.data for s in leaf.addressable_shards if s.device == device), restored)
    sizes = affine_parts(abstract_weights(local))
    parts = {}
    for place, part in affine_parts(mine).items():
        size = sizes.get(place, sizes.get(".embedding.weight"))  # a packed head may be the embedding's
        assert size is not None, place
        group_size = size.K if part.group_size == part.K else part.group_size
        dims = {"K": size.K, "N": size.N} if isinstance(part, PackedAffine) else {}
        parts[place] = replace(part, group_size=group_size, **dims)

    def with_own_bias(w: Linear) -> Linear:
        return w if w.bias is None or is_first else replace(w, bias=jnp.zeros_like(w.bias))

    mine = with_parts(mine, parts)
    segments = tuple(replace(s, o=with_own_bias(s.o), down=with_own_bias(s.down)) for s in mine.segments)
    return replace(mine, segments=segments, spec=local)
