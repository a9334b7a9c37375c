"""Opens a checkpoint as a model: config, spec and weights in one call, for the engine and for research code alike."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from checkpoints import Checkpoint, open_checkpoint
from turbojax.core.weights import Weights
from turbojax.errors import ModelConfigError
from turbojax.models.abstract import abstract_weights
from turbojax.models.cutting import ModelCut
from turbojax.models.families import Architecture, Config, architecture_of
from turbojax.models.loading import Place, Progress, load_weights
from turbojax.models.planning import KVBits, plan_model
from turbojax.models.shard_view import ShardView, shard_architecture
from turbojax.models.spec import ModelSpec
from turbojax.sharding import HERE, Placement

DTYPES = ("float32", "bfloat16", "float16")
BLOCK_BYTES = 1 << 30  # of a stack that is on the host at a time: a fraction of a file of a 70B model


@dataclass(frozen=True)
class Model:
    """A loaded model.

    Attributes:
        path: the checkpoint.
        spec: what it is.
        weights: its parameters.
        config, generation_config: HF-style dicts.
        placement: where the weights are; where that is several devices, `spec` is that of each one's shard.
    """

    path: Path
    spec: ModelSpec
    weights: Weights
    config: dict[str, Any]
    generation_config: dict[str, Any]
    placement: Placement = HERE


def resolve_dtype(dtype: str, config: Config) -> str:
    """The dtype of activations and dense weights.

    "auto" is float32 on a CPU (XLA's bfloat16 dots run at a fifth of its float32 ones there); elsewhere the
    checkpoint's own 16-bit dtype, bfloat16 where it has none.
    """
    if dtype in DTYPES:
        return dtype
    if dtype != "auto":
        raise ModelConfigError(f"dtype '{dtype}' is not one of auto, {', '.join(DTYPES)}")
    if jax.default_backend() == "cpu":
        return "float32"
    stored = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    return stored if stored in ("bfloat16", "float16") else "bfloat16"


def load_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    kv_bits: KVBits | Callable[[int], KVBits] = (16, 16),
    kv_hadamard: bool = False,
    model_format: str | None = None,
    pack: bool = False,
    place: Place = jax.device_put,
    placement: Placement = HERE,
    progress: Callable[[float], None] | None = None,
) -> Model:
    """Loads a checkpoint (folder or .gguf file); `native.load_native_model` restores native ones.

    Args:
        path: where it is.
        dtype: "auto" | "float32" | "bfloat16" | "float16", of activations and dense weights.
        kv_bits: bits of K and of V in the KV cache (16, 8 or 4), for all layers or as a function of the layer.
        kv_hadamard: see `EngineConfig`.
        model_format: what the checkpoint must be, see `checkpoints.MODEL_FORMATS`; None finds out.
        pack: pack affine codes for the GPU kernels while loading, see `packing.pack_weights`.
        place: host array -> device array, on JAX's default device.
        placement: devices that the model is cut between, see `sharding`; `place` counts on the default one alone.
        progress: called with the share of the weights' bytes loaded since the last call.

    Raises:
        CheckpointError: a file is broken, a tensor is missing or has the wrong shape.
        ModelConfigError: the config names an unknown architecture or something that cannot be honoured.
    """
    checkpoint = open_checkpoint(Path(path), model_format)
    return model_of(
        checkpoint, dtype=dtype, kv_bits=kv_bits, kv_hadamard=kv_hadamard, pack=pack, place=place, placement=placement,
        progress=progress,
    )  # fmt: skip


def model_of(
    checkpoint: Checkpoint,
    *,
    dtype: str = "auto",
    kv_bits: KVBits | Callable[[int], KVBits] = (16, 16),
    kv_hadamard: bool = False,
    pack: bool = False,
    place: Place = jax.device_put,
    placement: Placement = HERE,
    progress: Callable[[float], None] | None = None,
) -> Model:
    """Loads what an open checkpoint shows, wherever its tensors are; see `load_model`."""
    arch = architecture_of(checkpoint.config)
    bits = kv_bits if callable(kv_bits) else lambda layer: kv_bits
    spec = plan_model(checkpoint, arch, resolve_dtype(dtype, checkpoint.config), bits, kv_hadamard)
    cut = None if placement.num_shards == 1 else ModelCut.of(spec, placement.num_shards)
    local = spec if cut is None else cut.shard_spec()
    checkpoint.check()
    num_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract_weights(local)))
    total = num_bytes * placement.num_shards
    share = None if progress is None else lambda num_bytes: progress(num_bytes / total)
    if cut is not None:
        weights = load_shards(checkpoint, arch, cut, placement, pack=pack, progress=share)
    else:
        [device] = placement.devices
        place = place if device is None else functools.partial(jax.device_put, device=device)
        with jax.default_device(device):  # for what joins blocks
            weights = load_weights(
                checkpoint, arch, spec, pack=pack, place=place, progress=share, block_bytes=block_bytes()
            )
    configs = dict(checkpoint.config), dict(checkpoint.generation_config)
    return Model(checkpoint.path, local, weights, *configs, placement)


def block_bytes() -> int | None:
    """Of a stack that goes to one device whole; see `load_weights`."""
    return None if jax.default_backend() == "cpu" else BLOCK_BYTES


def load_shards(
    checkpoint: Checkpoint, arch: Architecture, cut: ModelCut, placement: Placement, *, pack: bool,
    progress: Progress | None,
) -> Weights:  # fmt: skip
    """Loads each shard onto its device, as the smaller model that it is; other processes load those of theirs."""
    spec, own_sources, shards = cut.shard_spec(), shard_architecture(arch), []
    for shard, device in enumerate(placement.devices):
        assert device is not None, "shards have devices of their own"
        if device.process_index != jax.process_index():
            continue
        view, place = ShardView(checkpoint, arch, cut, shard), functools.partial(jax.device_put, device=device)
        with jax.default_device(device):
            options: dict[str, Any] = {"pack": pack, "place": place, "progress": progress, "block_bytes": BLOCK_BYTES}
            shards.append(load_weights(view, own_sources, spec, **options))
    return placement.join(shards)
