"""Gives a loaded model the scale of its keys that a calibration found."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from turbojax.errors import ModelConfigError
from turbojax.models.model import Model


def with_k_scale(model: Model, scale: np.ndarray | None) -> Model:
    """The model with a scale of its keys [layers, K, H] in the layers that turn them; as it is without one.

    Raises:
        ModelConfigError: the scale is of another model.
    """
    if scale is None or not any(segment.layer.k_hadamard for segment in model.spec.segments):
        return model
    segments, weights = [], []
    for segment, w in zip(model.spec.segments, model.weights.segments, strict=True):
        layer, last = segment.layer, segment.first_layer + segment.num_layers
        if scale.shape != (model.spec.num_layers, layer.num_kv_heads, layer.head_dim):
            expected = (model.spec.num_layers, layer.num_kv_heads, layer.head_dim)
            raise ModelConfigError(f"{model.path}: its scale of keys has shape {scale.shape}, the model {expected}")
        if layer.k_hadamard:
            layer = dataclasses.replace(layer, has_k_scale=True)
            w = dataclasses.replace(w, k_scale=jnp.asarray(scale[segment.first_layer : last], jnp.float32))
        segments.append(dataclasses.replace(segment, layer=layer))
        weights.append(w)
    spec = dataclasses.replace(model.spec, segments=tuple(segments))
    changed = dataclasses.replace(model.weights, spec=spec, segments=tuple(weights))
    return dataclasses.replace(model, spec=spec, weights=changed)
