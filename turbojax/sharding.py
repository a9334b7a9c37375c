"""Where an engine lives: the devices of its mesh, and which axis of weights and state is cut between them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from pallas_kernels.affine_linear import AffineWeights, PackedAffine
from pallas_kernels.eight_bit_linear import EightBitWeights
from turbojax.core.shards import AXIS
from turbojax.core.state import EngineState
from turbojax.core.weights import LayerWeights, Linear, Weights
from turbojax.errors import ConfigError
from turbojax.models.packing import agreed

Axes = tuple[str | None, ...]
"""Logical axes of an array; None where nothing cuts it."""


@dataclass(frozen=True)
class Rules:
    """The mesh axis of each logical axis; None: every device has all of it. Layers, pages and slots are never cut.

    Attributes:
        heads: query and kv heads: outputs of qkv, inputs of o, heads of the KV pool.
        ffw: columns of the MLP: outputs of gate and up, inputs of down.
        vocab: rows of embedding and head.
    """

    heads: str | None = AXIS
    ffw: str | None = AXIS
    vocab: str | None = AXIS

    def spec(self, axes: Axes) -> Any:
        """The PartitionSpec of an array; specs stand in trees where arrays stand.

        Raises:
            ValueError: two of its axes lie on one mesh axis.
        """
        found = [None if axis is None else getattr(self, axis) for axis in axes]
        used = [axis for axis in found if axis is not None]
        if len(set(used)) < len(used):
            raise ValueError(f"logical axes {axes} lie on mesh axes {found}: one each is accepted")
        return PartitionSpec(*found)

    def linear(self, w: Linear, out: str | None, into: str | None) -> Linear:
        """Specs of a linear from `into` to `out`. Of what a row-parallel one has once for each output (a bias, scales
        of channels) every shard has its own."""
        spec, weight = self.spec, w.weight
        stacked: Any
        if isinstance(weight, AffineWeights):
            by_output = spec((None, out, into))
            stacked = replace(
                weight, codes=by_output, scale=by_output,
                offset=None if weight.offset is None else by_output,
                perm=None if weight.perm is None else spec((None, into)),
            )  # fmt: skip
        elif isinstance(weight, PackedAffine):
            by_group = spec((None, into, out))
            stacked = replace(
                weight, words=spec((None, into, out, None)), scale=by_group,
                shift=None if weight.shift is None else by_group,
                perm=None if weight.perm is None else spec((None, into)),
            )  # fmt: skip
        elif isinstance(weight, EightBitWeights):
            stacked = EightBitWeights(spec((None, out, into)), spec((None, out, into)))
        else:
            stacked = spec((None, out, into))
        return Linear(stacked, None if w.bias is None else spec((None, out or into)))

    def layers(self, w: LayerWeights) -> LayerWeights:
        """Specs of the layers of a segment."""
        names = ("attn_norm", "q_norm", "k_norm", "post_attn_norm", "ffw_norm", "post_ffw_norm")
        norms: dict[str, Any] = {name: None if getattr(w, name) is None else PartitionSpec() for name in names}
        return LayerWeights(
            **norms,
            qkv=tuple(self.linear(part, "heads", None) for part in w.qkv),
            o=self.linear(w.o, None, "heads"),
            gate_up=tuple(self.linear(part, "ffw", None) for part in w.gate_up),
            down=self.linear(w.down, None, "ffw"),
            k_scale=None if w.k_scale is None else self.spec((None, "heads", None)),
        )

    def of(self, tree: Any) -> Any:
        """Specs of weights, of a state, or of what every device has all of; a prefix of the tree."""
        if isinstance(tree, Weights):
            return replace(
                tree,
                embedding=self.linear(tree.embedding, "vocab", None),
                segments=tuple(self.layers(segment) for segment in tree.segments),
                final_norm=self.spec(()),
                head=None if tree.head is None else self.linear(tree.head, "vocab", None),
            )
        return self.state if isinstance(tree, EngineState) else PartitionSpec()

    @property
    def state(self) -> EngineState:
        """A pool is cut along its kv heads [L, P, K, ...]; every device knows all slots."""
        return EngineState(pool=self.spec((None, None, "heads")), slots=self.spec(()), hidden=self.spec(()))


@dataclass(frozen=True)
class Placement:
    """The devices that run every step of an engine together; one of them runs it as it is, without a mesh.

    Attributes:
        devices: None stands for JAX's default device.
        rules: what is cut between them.
    """

    devices: tuple[jax.Device | None, ...] = (None,)
    rules: Rules = Rules()

    @property
    def num_shards(self) -> int:
        return len(self.devices)

    @functools.cached_property
    def mesh(self) -> Mesh:
        return Mesh(np.array(self.devices), (AXIS,))

    @property
    def whole(self) -> Any:
        """The sharding of what every device has all of; None leaves it to JAX."""
        [device, *others] = self.devices
        if others:
            return NamedSharding(self.mesh, PartitionSpec())
        return None if device is None else SingleDeviceSharding(device)

    def put(self, array: np.ndarray, axes: Axes) -> jax.Array:
        """A host array on all devices, cut along its logical axes."""
        sharding = NamedSharding(self.mesh, self.rules.spec(axes)) if self.num_shards > 1 else self.whole
        return jax.device_put(array, sharding)

    def shardings(self, tree: Any) -> Any:
        """Of every leaf."""
        if self.num_shards == 1:
            return jax.tree.map(lambda _: self.whole, tree)

        def below(spec: PartitionSpec, part: Any) -> Any:
            return jax.tree.map(lambda _: NamedSharding(self.mesh, spec), part)

        return jax.tree.map(below, self.rules.of(tree), tree, is_leaf=lambda node: isinstance(node, PartitionSpec))

    def abstract(self, tree: Any) -> Any:
        """The shapes of a tree that lives here."""
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            tree,
            self.shardings(tree),
        )

    def spread(self, step: Callable[..., Any], num_outputs: int = 0) -> Callable[..., Any]:
        """A step that every device runs on its shard; by itself on one device.

        Args:
            step: from arrays, or nothing, to a state and `num_outputs` more outputs.
            num_outputs: what all shards return alike.
        """
        if self.num_shards == 1:
            return step
        outputs: Any = (self.rules.state, *[PartitionSpec()] * num_outputs) if num_outputs else self.rules.state

        @functools.wraps(step)
        def everywhere(*inputs: Any, **static: Any) -> Any:
            specs = tuple(self.rules.of(tree) for tree in inputs)
            return jax.shard_map(
                functools.partial(step, **static), mesh=self.mesh, in_specs=specs, out_specs=outputs, check_vma=False
            )(*inputs)

        return everywhere

    def join(self, shards: Sequence[Weights]) -> Weights:
        """The weights of all shards, each on its device, as one tree of arrays over the mesh."""
        if self.num_shards == 1:
            return shards[0]
        shards = agreed(shards)
        specs, structure = jax.tree.leaves(self.rules.of(shards[0])), jax.tree.structure(shards[0])
        leaves = zip(specs, *(jax.tree.leaves(shard) for shard in shards), strict=True)
        return jax.tree.unflatten(structure, [self._joined(spec, parts) for spec, *parts in leaves])

    def copied(self, weights: Weights) -> Weights:
        """Weights that lie on as many other devices, copied from device to device."""

        def copy(leaf: jax.Array, sharding: Any) -> jax.Array:
            parts = [jax.device_put(s.data, d) for s, d in zip(leaf.addressable_shards, self.devices, strict=True)]
            return jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts)

        return jax.tree.map(copy, weights, self.shardings(weights))

    def join_abstract(self, shard: Weights) -> Weights:
        """The shapes of `join` from those of one shard."""
        if self.num_shards == 1:
            return self.abstract(shard)

        def joined(spec: PartitionSpec, leaf: Any) -> Any:
            return jax.ShapeDtypeStruct(
                self._joined_shape(spec, leaf.shape), leaf.dtype, sharding=NamedSharding(self.mesh, spec)
            )

        return jax.tree.map(joined, self.rules.of(shard), shard, is_leaf=lambda node: isinstance(node, PartitionSpec))

    def _joined(self, spec: PartitionSpec, parts: list[jax.Array]) -> jax.Array:
        shape = self._joined_shape(spec, parts[0].shape)
        return jax.make_array_from_single_device_arrays(shape, NamedSharding(self.mesh, spec), parts)

    def _joined_shape(self, spec: PartitionSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
        cut = [*spec, *[None] * (len(shape) - len(spec))]
        return tuple(n if axis is None else n * self.num_shards for n, axis in zip(shape, cut, strict=True))


HERE = Placement()
"""JAX's default device."""


def device_bytes(tree: Any) -> int:
    """Bytes that a tree takes of each of its devices; abstract leaves without a sharding are on one."""

    def of(leaf: Any) -> int:
        sharding = getattr(leaf, "sharding", None)
        shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(map(of, jax.tree.leaves(tree)))


def placements(tp: int, dp: int) -> list[Placement]:
    """The devices of `dp` engines of `tp` devices each.

    Raises:
        ConfigError: there are fewer.
    """
    if tp * dp == 1:
        return [HERE]
    devices = jax.devices()
    if tp * dp > len(devices):
        field, value = ("tp", tp) if dp == 1 else ("dp", dp)
        each = "" if dp == 1 else f" of {tp} devices each (tp)"
        accepted = f"at most {len(devices) // (1 if dp == 1 else tp)}{each}: there are {len(devices)} devices"
        raise ConfigError("EngineConfig", field, value, accepted)
    return [Placement(tuple(devices[first : first + tp])) for first in range(0, tp * dp, tp)]
