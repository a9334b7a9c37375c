"""Parameters of flax models, nnx or linen, as a turbojax model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.core import meta

from turbojax.errors import InteropError
from turbojax.integrations.params import Param, from_params
from turbojax.models.model import Model

# What flax layers call their weight: Dense and Linear [K, N], Embed [V, D], RMSNorm [D].
WEIGHTS = ("kernel", "embedding", "scale")


def from_flax(
    config: Mapping[str, Any],
    params: Mapping[Any, Any],
    *,
    dtype: str = "auto",
    generation_config: Mapping[str, Any] | None = None,
    tokenizer: str | Path | None = None,
) -> Model:
    """A model from an nnx.State, or from linen's params: nested or flat, plain or frozen, with or without boxes.

    Modules are named as in the Hugging Face checkpoint; `layers_0` and `layers/0` are `layers.0`. `kernel` [K, N],
    `embedding` and `scale` are what that calls `weight`. A kernel may be a qwix.QArray.

    Args:
        config: as config.json has it.
        params: the parameters.
        dtype, generation_config, tokenizer: see `from_params`.

    Raises:
        ModelConfigError, CheckpointError, InteropError: see `from_params`; parameters are called by their
            Hugging Face names.
    """
    tensors: dict[str, Param] = {}
    for path, value in leaves(params):
        *modules, last = path
        name = ".".join([*modules, "weight" if last in WEIGHTS else last])
        if name in tensors:
            raise InteropError(f"parameter '{name}' comes twice, the second time as '{'/'.join(path)}'")
        tensors[name] = turned(value) if last == "kernel" else value
    return from_params(config, tensors, dtype=dtype, generation_config=generation_config, tokenizer=tokenizer)


def leaves(
    tree: Mapping[Any, Any] | Sequence[Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every parameter with the names that lead to it; linen's collection `params` is none of them."""
    for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        here = path + names_in(key)
        here = here[1:] if here[:1] == ("params",) else here
        if isinstance(value, Mapping | list | tuple):
            yield from leaves(value, here)
        elif here:
            yield here, unboxed(value)


def names_in(key: Any) -> tuple[str, ...]:
    """The names that a key stands for: a tuple of them, or a text with slashes or dots between them."""
    if isinstance(key, tuple):
        return tuple(name for part in key for name in names_in(part))
    return tuple(re.split(r"[/.]", re.sub(r"_(\d+)(?=$|[/.])", r".\1", str(key))))


def unboxed(value: Any) -> Any:
    """The array in an nnx.Variable, or in a box that says how linen shards it."""
    value = value.get_value() if isinstance(value, nnx.Variable) else value
    return value.unbox() if isinstance(value, meta.AxisMetadata) else value


def turned(kernel: Any) -> Any:
    """[K, N] as [N, K]. Arrays are turned on the host, where they need no room of their own."""
    return np.asarray(kernel).T if isinstance(kernel, jax.Array | np.ndarray) else kernel.T
