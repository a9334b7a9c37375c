"""Weights in the form that the GPU kernels read: affine codes packed once after loading."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from pallas_kernels.affine_linear import AffineWeights, pack, packing_problem
from turbojax.core.weights import LayerWeights, Linear, Weights


def pack_linear(w: Linear) -> Linear:
    """The linear with packed codes; as it is where it is dense or where its format has no packed form."""
    if not isinstance(w.weight, AffineWeights) or packing_problem(w.weight) is not None:
        return w
    return replace(w, weight=pack(narrowed(w.weight)))


def narrowed(w: AffineWeights) -> AffineWeights:
    """Scales and offsets in float16 where that loses nothing, as checkpoints mostly store them and the CPU does not.

    At groups of 128 a float32 scale is 3 % more to read; and zero points are only found behind offsets as rounded as
    the checkpoint's are (else each linear costs twice the dots).
    """
    params: dict[str, Any] = {"scale": w.scale, "offset": w.offset}
    with np.errstate(over="ignore", under="ignore"):
        halves: dict[str, Any] = {name: np.asarray(a).astype(np.float16) for name, a in params.items() if a is not None}
    if any(np.any(half.astype(np.float32) != np.asarray(params[name])) for name, half in halves.items()):
        return w
    return replace(w, **halves)


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
