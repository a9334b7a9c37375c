"""Gives a loaded model the scale of its keys that a calibration found."""

from __future__ import annotations

import dataclasses

import numpy as np

from turbojax.errors import ModelConfigError
from turbojax.kv_policy import scale_file
from turbojax.models.cutting import PADDING, HeadCut
from turbojax.models.families import architecture_of
from turbojax.models.model import Model


def with_k_scale(model: Model, scale: np.ndarray | None) -> Model:
    """The model with a scale of its keys [layers, K, H] in the layers that turn them; as it is without one.

    Raises:
        ModelConfigError: the scale is of another model.
    """
    if scale is None or not any(segment.layer.k_hadamard for segment in model.spec.segments):
        return model
    segments, weights = [], []
    heads = heads_of_places(model)
    for segment, w in zip(model.spec.segments, model.weights.segments, strict=True):
        layer, last = segment.layer, segment.first_layer + segment.num_layers
        expected = (model.spec.num_layers, len(np.unique(heads[heads != PADDING])), layer.head_dim)
        if scale.shape != expected:
            raise ModelConfigError(f"{scale_file(model.path)}: has shape {scale.shape}, the model's keys {expected}")
        if layer.k_hadamard:
            layer = dataclasses.replace(layer, has_k_scale=True)
            mine = scale[segment.first_layer : last].astype(np.float32)
            mine = np.where(heads[:, None] == PADDING, np.float32(1), mine[:, heads])
            w = dataclasses.replace(w, k_scale=model.placement.put(mine, (None, "heads", None)))
        segments.append(dataclasses.replace(segment, layer=layer))
        weights.append(w)
    spec = dataclasses.replace(model.spec, segments=tuple(segments))
    changed = dataclasses.replace(model.weights, spec=spec, segments=tuple(weights))
    return dataclasses.replace(model, spec=spec, weights=changed)


def heads_of_places(model: Model) -> np.ndarray:
    """The kv heads of the model, as all shards together have them."""
    num_shards = model.placement.num_shards
    if num_shards == 1:
        return np.arange(model.spec.segments[0].layer.num_kv_heads)
    arch = architecture_of(model.config)
    cut = HeadCut.of(arch.num_heads, arch.num_kv_heads, num_shards)
    return np.concatenate([cut.kv_heads(shard) for shard in range(num_shards)])
