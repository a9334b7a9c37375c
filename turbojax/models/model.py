"""Opens a checkpoint as a model: config, spec and weights in one call, for the engine and for research code alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from checkpoints import Checkpoint, open_checkpoint
from turbojax.core.weights import Weights
from turbojax.errors import ModelConfigError
from turbojax.models.abstract import abstract_weights
from turbojax.models.families import Config, architecture_of
from turbojax.models.loading import Place, load_weights
from turbojax.models.planning import KVBits, plan_model
from turbojax.models.spec import ModelSpec

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Model:
    """A loaded model.

    Attributes:
        path: the checkpoint.
        spec: what it is.
        weights: its parameters.
        config, generation_config: HF-style dicts.
    """

    path: Path
    spec: ModelSpec
    weights: Weights
    config: dict[str, Any]
    generation_config: dict[str, Any]


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
        place: host array -> device array.
        progress: called with the share of the weights' bytes loaded since the last call.

    Raises:
        CheckpointError: a file is broken, a tensor is missing or has the wrong shape.
        ModelConfigError: the config names an unknown architecture or something that cannot be honoured.
    """
    checkpoint = open_checkpoint(Path(path), model_format)
    return model_of(
        checkpoint, dtype=dtype, kv_bits=kv_bits, kv_hadamard=kv_hadamard, pack=pack, place=place, progress=progress
    )


def model_of(
    checkpoint: Checkpoint,
    *,
    dtype: str = "auto",
    kv_bits: KVBits | Callable[[int], KVBits] = (16, 16),
    kv_hadamard: bool = False,
    pack: bool = False,
    place: Place = jax.device_put,
    progress: Callable[[float], None] | None = None,
) -> Model:
    """Loads what an open checkpoint shows, wherever its tensors are; see `load_model`."""
    arch = architecture_of(checkpoint.config)
    bits = kv_bits if callable(kv_bits) else lambda layer: kv_bits
    spec = plan_model(checkpoint, arch, resolve_dtype(dtype, checkpoint.config), bits, kv_hadamard)
    checkpoint.check()
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract_weights(spec)))
    share = None if progress is None else lambda num_bytes: progress(num_bytes / total)
    weights = load_weights(checkpoint, arch, spec, pack=pack, place=place, progress=share)
    return Model(checkpoint.path, spec, weights, dict(checkpoint.config), dict(checkpoint.generation_config))
