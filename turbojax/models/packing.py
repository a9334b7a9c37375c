"""Weights in the form that the GPU kernels read: affine codes packed once after loading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from pallas_kernels.affine_linear import AffineWeights, PackedAffine, pack, packing_problem
from turbojax.core.weights import LayerWeights, Linear, Weights

MIN_GROUP = 32  # rows under one scale that the packed form takes at least


def pack_linear(w: Linear) -> Linear:
    """The linear with packed codes; as it is where it is dense or where its format has no packed form."""
    if not isinstance(w.weight, AffineWeights):
        return w
    weight = regrouped(w.weight)
    return w if packing_problem(weight) else replace(w, weight=pack(narrowed(weight)))


def regrouped(w: AffineWeights) -> AffineWeights:
    """The same values in groups that have a packed form, if they divide into such: 96 rows are three groups of 32."""
    size = w.group_size & -w.group_size  # the largest power of two that divides it
    if w.num_groups == 1 or size == w.group_size or size < MIN_GROUP:
        return w
    num_groups = -(-w.K // size)
    finer = {name: np.repeat(np.asarray(a), w.group_size // size, axis=2)[:, :, :num_groups]
             for name, a in (("scale", w.scale), ("offset", w.offset)) if a is not None}  # fmt: skip
    return replace(w, **finer, group_size=size)  # type: ignore[arg-type]  # host arrays, as all of it is


def narrowed(w: AffineWeights) -> AffineWeights:
    """Scales and offsets in float16, each where that loses nothing: most checkpoints store scales so.

    At groups of 128 a float32 scale is 3 % more to read. A zero point times a float16 scale mostly needs float32, and
    is found again as a zero point behind either.
    """
    params: dict[str, Any] = {"scale": w.scale, "offset": w.offset}
    for name, array in params.items():
        if array is None:
            continue
        with np.errstate(over="ignore", under="ignore"):
            half = np.asarray(array).astype(np.float16)
        if not np.any(half.astype(np.float32) != np.asarray(array)):
            params[name] = half
    return replace(w, **params)


def pack_layers(w: LayerWeights) -> LayerWeights:
    """Every linear of a segment packed."""
    return replace(
        w,
        qkv=tuple(pack_linear(part) for part in w.qkv),
        o=pack_linear(w.o),
        gate_up=tuple(pack_linear(part) for part in w.gate_up),
        down=pack_linear(w.down),
    )


def pack_weights(w: Weights) -> Weights:
    """The model with packed linears.

    A quantised embedding keeps its codes, whose rows are looked up; where it is the head too, the head becomes a
    packed copy of it.
    """
    head = w.embedding if w.head is None else w.head
    is_quantised = isinstance(head.weight, AffineWeights)
    return replace(
        w,
        segments=tuple(pack_layers(segment) for segment in w.segments),
        head=pack_linear(head) if is_quantised else w.head,
    )


def agreed(trees: Sequence[Any]) -> list[Any]:
    """Packed parts of one model in one form: what one of them could store shorter it stores as the others."""
    is_packed = lambda part: isinstance(part, PackedAffine)  # noqa: E731
    flat = [jax.tree.flatten(tree, is_leaf=is_packed) for tree in trees]
    rows = [agreed_parts(parts) if is_packed(parts[0]) else parts for parts in zip(*(f[0] for f in flat), strict=True)]
    columns = zip(*rows, strict=True)
    return [jax.tree.unflatten(structure, list(leaves)) for (_, structure), leaves in zip(flat, columns, strict=True)]


def agreed_parts(parts: Sequence[PackedAffine]) -> list[PackedAffine]:
    """See `agreed`; of one linear."""
    kind = parts[0].kind if len({p.kind for p in parts}) == 1 else "offset"
    scale = np.result_type(*(p.scale.dtype for p in parts))
    offset = str(np.result_type(*(p.offset_dtype for p in parts)))
    return [
        replace(free_offset(p) if p.kind != kind else p, scale=p.scale.astype(scale), offset_dtype=offset)
        for p in parts
    ]


def free_offset(p: PackedAffine) -> PackedAffine:
    """Zero points as offsets: (code - zero) * scale = (code - middle) * scale + (middle - zero) * scale."""
    assert p.shift is not None
    shift = (np.float32(2.0 ** (p.bits - 1)) - p.shift.astype(np.float32)) * p.scale.astype(np.float32)
    return replace(p, kind="offset", shift=shift)
