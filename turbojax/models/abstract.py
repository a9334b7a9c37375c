"""The abstract tree of a model: shape and dtype of every parameter, from the spec alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from checkpoints.eight_bit import blocks_of
from pallas_kernels.affine_linear import AffineWeights
from pallas_kernels.eight_bit_linear import EightBitWeights
from turbojax.core.weights import LayerWeights, Linear, Weights
from turbojax.models.spec import Dense, EightBit, LinearSpec, ModelSpec, SegmentSpec


def leaf(shape: tuple[int, ...], dtype: DTypeLike) -> Any:
    """A parameter without its values; stands where an array stands."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def abstract_linear(spec: LinearSpec, num_layers: int, dtype: str) -> Linear:
    """See `Linear`; a dense weight is [L, N, K]."""
    n, k = spec.out_dim, spec.in_dim
    bias = leaf((num_layers, n), dtype) if spec.has_bias else None
    storage = spec.storage
    if isinstance(storage, Dense):
        return Linear(leaf((num_layers, n, k), dtype), bias)
    if isinstance(storage, EightBit):
        scales = blocks_of((n, k)) if storage.has_blocks else (n, 1)
        codes = leaf((num_layers, n, k), storage.dtype)
        return Linear(EightBitWeights(codes, leaf((num_layers, *scales), jnp.float32)), bias)
    grouped = leaf((num_layers, n, -(-k // storage.group_size)), jnp.float32)
    weight = AffineWeights(
        codes=leaf((num_layers, n, k), jnp.uint8),
        scale=grouped,
        offset=grouped if storage.has_offset else None,
        perm=leaf((num_layers, k), jnp.int32) if storage.has_perm else None,
        bits=storage.bits,
        group_size=storage.group_size,
    )
    return Linear(weight, bias)


def abstract_layers(segment: SegmentSpec, model: ModelSpec) -> LayerWeights:
    """See `LayerWeights`; norms are float32."""
    spec, num_layers = segment.layer, segment.num_layers

    def norm(width: int, exists: bool = True) -> Any:
        return leaf((num_layers, width), jnp.float32) if exists else None

    def linear(part: LinearSpec) -> Linear:
        return abstract_linear(part, num_layers, model.dtype)

    return LayerWeights(
        attn_norm=norm(model.embed_dim),
        qkv=tuple(linear(part) for part in spec.qkv),
        q_norm=norm(spec.head_dim, spec.has_qk_norm),
        k_norm=norm(spec.head_dim, spec.has_qk_norm),
        o=linear(spec.o),
        post_attn_norm=norm(model.embed_dim, spec.has_post_norms),
        ffw_norm=norm(model.embed_dim),
        gate_up=tuple(linear(part) for part in spec.gate_up),
        down=linear(spec.down),
        post_ffw_norm=norm(model.embed_dim, spec.has_post_norms),
        k_scale=leaf((num_layers, spec.num_kv_heads, spec.head_dim), jnp.float32) if spec.has_k_scale else None,
    )


def abstract_weights(spec: ModelSpec) -> Weights:
    """The whole tree with jax.ShapeDtypeStruct leaves: what loading gives, and what native checkpoints restore into."""
    return Weights(
        embedding=abstract_linear(spec.embedding, 1, spec.dtype),
        segments=tuple(abstract_layers(segment, spec) for segment in spec.segments),
        final_norm=leaf((1, spec.embed_dim), jnp.float32),
        head=None if spec.head is None else abstract_linear(spec.head, 1, spec.dtype),
        spec=spec,
    )
