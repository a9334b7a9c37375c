"""Factors of a linear's input channels, moved into whatever makes that input: the model computes the same."""

from __future__ import annotations

import numpy as np

from turbojax.lite.floats import FloatLayer, FloatModel, InputGroup
from turbojax.models.planning import bias_of

Heads = tuple[int, int, int]
"""kv heads, query heads of each, head dim."""


def heads_of(model: FloatModel, group: InputGroup) -> Heads | None:
    """How the channels of a group's input fall into heads that share what makes them; None where each has its own."""
    arch = model.arch
    if group.before != "v":
        return None
    return arch.num_kv_heads, arch.num_heads // arch.num_kv_heads, arch.head_dim


def shared(values: np.ndarray, heads: Heads | None) -> np.ndarray:
    """A figure of each channel [K], averaged over the query heads that read one value head."""
    if heads is None:
        return values
    mean = values.reshape(heads).mean(1, keepdims=True)
    return np.broadcast_to(mean, heads).reshape(-1)


def stacked(layer: FloatLayer, group: InputGroup) -> np.ndarray:
    """The weights of a group, one under the other: [N, K]."""
    return np.concatenate([layer.weights[name.format(i=layer.index)] for name in group.tensors])


def fold(model: FloatModel, layer: FloatLayer, group: InputGroup, scale: np.ndarray) -> None:
    """Multiplies a group's input channels by `scale` [K], and divides what makes them by it; in place."""
    for name in group.tensors:
        layer.weights[name.format(i=layer.index)] *= scale[None]
    source = model.arch.sources[group.before]
    if group.before.endswith("norm"):
        norm, offset = layer.others[source.at(layer.index)], np.float32(model.arch.norm_offset)
        norm[:] = (norm + offset) / scale - offset
        return
    heads = heads_of(model, group)
    by_row = scale if heads is None else scale.reshape(heads)[:, 0].reshape(-1)
    rows = slice(None) if source.rows is None else np.asarray(source.rows)
    layer.weights[source.at(layer.index)][rows] /= by_row[:, None]
    if group.before in model.arch.biased:
        layer.others[bias_of(source).at(layer.index)][rows] /= by_row
