"""Loaded weights rounded again, to nearest, as a checkpoint of fewer bits would hold them: of all layers, or of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.affine_linear import AffineWeights, PackedAffine
from pallas_kernels.affine_linear.dequantise import packed_values
from turbojax.core.linear import at_layer
from turbojax.core.weights import LayerWeights, Linear, Weights
from turbojax.lite.grid import Grid, codes_of, fit
from turbojax.models.spec import Dense, EightBit, GroupedAffine, LinearSpec, ModelSpec, SegmentSpec


def affine_values(w: AffineWeights, layer: jax.Array) -> jax.Array:
    """float32 [N, K]."""

    def by_input(params: jax.Array) -> jax.Array:
        return jnp.repeat(at_layer(params, layer).astype(jnp.float32), w.group_size, axis=1)[:, : w.K]

    codes, scale = at_layer(w.codes, layer).astype(jnp.float32), by_input(w.scale)
    offset = -(2.0 ** (w.bits - 1)) * scale if w.offset is None else by_input(w.offset)
    values = codes * scale + offset
    return values if w.perm is None else values.at[:, at_layer(w.perm, layer)].set(values)


def layer_values(w: Linear, layer: jax.Array) -> jax.Array:
    """The float32 weights [N, K] of one layer of a linear whose activations stay in 16 bits."""
    if isinstance(w.weight, AffineWeights):
        return affine_values(w.weight, layer)
    if isinstance(w.weight, PackedAffine):
        return packed_values(w.weight, layer)
    assert isinstance(w.weight, jax.Array), "weights of eight-bit activations are not rounded again"
    return at_layer(w.weight, layer).astype(jnp.float32)


def rounded_linear(w: Linear, spec: LinearSpec, grid: Grid, num_layers: int) -> Linear:
    """The linear on the grid; one whose activations have eight bits stays."""
    if isinstance(spec.storage, EightBit):
        return w

    def of_layer(layer: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        values = layer_values(w, layer)
        scale, offset = fit(values, grid)
        return codes_of(values, scale, offset, grid).astype(jnp.uint8), scale, offset

    codes, scale, offset = lax.map(of_layer, jnp.arange(num_layers, dtype=jnp.int32))
    return replace(w, weight=AffineWeights(codes, scale, offset, None, grid.bits, grid.group_size))


def rounded_at(w: Linear, spec: LinearSpec, grid: Grid, num_layers: int, layer: jax.Array) -> Linear:
    """The linear in float32, one of its layers on the grid; one whose activations have eight bits stays."""
    if isinstance(spec.storage, EightBit):
        return w

    def on_grid(values: jax.Array) -> jax.Array:
        scale, offset = fit(values, grid)
        codes = codes_of(values, scale, offset, grid).astype(jnp.float32)
        by_input = (jnp.repeat(params, grid.group_size, axis=1)[:, : values.shape[1]] for params in (scale, offset))
        return codes * next(by_input) + next(by_input)

    def of_layer(index: jax.Array) -> jax.Array:
        values = layer_values(w, index)
        return lax.cond(index == layer, on_grid, lambda values: values, values)

    return replace(w, weight=lax.map(of_layer, jnp.arange(num_layers, dtype=jnp.int32)))


Rounding = Callable[[Linear, LinearSpec, int, int], Linear]
"""Linear, its spec, its number of layers and the first of them -> the linear as a candidate has it."""


def with_linears(weights: Weights, rounding: Rounding) -> Weights:
    """The model with other linears in its layers; embedding, head and norms stay, and so does the spec.

    The decoder goes by what the arrays are, not by what the spec says they are stored as.
    """

    def layers(w: LayerWeights, segment: SegmentSpec) -> LayerWeights:
        spec, place = segment.layer, (segment.num_layers, segment.first_layer)

        def each(linears: tuple[Linear, ...], specs: tuple[LinearSpec, ...]) -> tuple[Linear, ...]:
            return tuple(rounding(x, s, *place) for x, s in zip(linears, specs, strict=True))

        (o,), (down,) = each((w.o,), (spec.o,)), each((w.down,), (spec.down,))
        return replace(w, qkv=each(w.qkv, spec.qkv), o=o, gate_up=each(w.gate_up, spec.gate_up), down=down)

    pairs = zip(weights.segments, weights.spec.segments, strict=True)
    return replace(weights, segments=tuple(layers(w, segment) for w, segment in pairs))


def rounded_weights(weights: Weights, grid: Grid) -> Weights:
    """The model with the linears of all layers on a grid."""
    return with_linears(weights, lambda w, spec, num_layers, first: rounded_linear(w, spec, grid, num_layers))


@partial(jax.jit, static_argnames="grid")
def rounded_layer(weights: Weights, grid: Grid, layer: jax.Array) -> Weights:
    """The model in float32 with the linears of one layer on a grid. One program serves every layer."""
    return with_linears(
        weights, lambda w, spec, num_layers, first: rounded_at(w, spec, grid, num_layers, layer - first)
    )


def linear_specs(spec: ModelSpec, only: int | None = None) -> Iterator[tuple[LinearSpec, int]]:
    """The linears of the layers, and how many layers have each; or those of one layer."""
    for segment in spec.segments:
        layer, within = segment.layer, only is None or 0 <= only - segment.first_layer < segment.num_layers
        for part in layer.linears:
            if within:
                yield part, segment.num_layers if only is None else 1


def bits_of(part: LinearSpec) -> int:
    """Of a weight, codes alone."""
    if isinstance(part.storage, Dense):
        return 16
    return part.storage.bits if isinstance(part.storage, GroupedAffine) else 8


def linear_bytes(spec: ModelSpec, grid: Grid | None = None, layer: int | None = None) -> int:
    """Bytes of the layers' linears as a checkpoint holds them: dense ones in 16 bits, scales and offsets too.

    `grid` is what those are rounded to whose activations stay in 16 bits: of all layers, or of one.
    """
    if layer is not None:
        return linear_bytes(spec) - parts_bytes(spec, None, layer) + parts_bytes(spec, grid, layer)
    return parts_bytes(spec, grid, None)


def parts_bytes(spec: ModelSpec, grid: Grid | None, only: int | None) -> int:
    """The same of all layers, or of one alone."""
    total = 0
    for part, count in linear_specs(spec, only):
        bits, storage = bits_of(part), part.storage
        group = storage.group_size if isinstance(storage, GroupedAffine) else part.in_dim
        if grid is not None and not isinstance(storage, EightBit):
            bits, group = grid.bits, grid.group_size
        params = 0 if bits == 16 else 4 * -(-part.in_dim // group)
        total += count * part.out_dim * (part.in_dim * bits // 8 + params)
    return total
