"""Packed linears in a native checkpoint: what their arrays alone do not say, and offsets to the last bit."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import numpy as np

from pallas_kernels.affine_linear import AffineWeights, PackedAffine, unpack
from turbojax.core.weights import Weights
from turbojax.models.abstract import abstract_linear, leaf
from turbojax.models.packing import narrowed, pack_weights, regrouped
from turbojax.models.spec import ModelSpec

ARRAYS = ("words", "scale", "shift", "perm")


@dataclass(frozen=True)
class PackedForm:
    """The static side of a PackedAffine on disk.

    Attributes:
        arrays: shape and dtype by name, of those that it has.
        holds_offset: `shift` is the offset itself. The kernels' shift is rounded once more, so it does not give free
            offsets back to the last bit.
        kind, bits, group_size, K, N, offset_dtype: as in PackedAffine.
    """

    arrays: dict[str, tuple[list[int], str]]
    holds_offset: bool
    kind: str
    bits: int
    group_size: int
    K: int
    N: int
    offset_dtype: str

    def abstract(self) -> PackedAffine:
        """The linear without its values."""
        leaves: dict[str, Any] = {name: leaf(tuple(shape), dtype) for name, (shape, dtype) in self.arrays.items()}
        return PackedAffine(
            **leaves, kind=self.kind, bits=self.bits, group_size=self.group_size, K=self.K, N=self.N,
            offset_dtype=self.offset_dtype,
        )  # fmt: skip


Forms = dict[str, PackedForm]
"""By the place of the linear in the tree."""


def affine_parts(weights: Weights) -> dict[str, Any]:
    """Every affine linear's weight by its place."""
    is_affine = lambda x: isinstance(x, AffineWeights | PackedAffine)  # noqa: E731
    found, _ = jax.tree_util.tree_flatten_with_path(weights, is_leaf=is_affine)
    return {jax.tree_util.keystr(path): part for path, part in found if is_affine(part)}


def with_parts(weights: Weights, parts: dict[str, Any]) -> Weights:
    """The tree with other affine linears in the places that are named."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: parts.get(jax.tree_util.keystr(path), x),
        weights,
        is_leaf=lambda x: isinstance(x, AffineWeights | PackedAffine),
    )


def as_stored(weights: Weights) -> tuple[Weights, dict[str, Any]]:
    """The weights as a native checkpoint holds them (packed, with a head of its own), and their forms as JSON."""
    sources = affine_parts(weights)
    packed = pack_weights(weights)
    stored, forms = dict[str, Any](), dict[str, Any]()
    for place, part in affine_parts(packed).items():
        if not isinstance(part, PackedAffine):
            continue
        source = sources.get(place, weights.embedding.weight)  # a head that was not there is the embedding
        holds_offset = part.kind == "offset" and isinstance(source, AffineWeights)
        if holds_offset:
            part = replace(part, shift=padded_offset(part, narrowed(regrouped(source))))
        stored[place], forms[place] = part, asdict(form_of(part, holds_offset))
    return with_parts(packed, stored), forms


def form_of(part: PackedAffine, holds_offset: bool) -> PackedForm:
    found = {name: getattr(part, name) for name in ARRAYS}
    arrays = {name: (list(a.shape), str(a.dtype)) for name, a in found.items() if a is not None}
    return PackedForm(
        arrays, holds_offset, part.kind, part.bits, part.group_size, part.K, part.N, part.offset_dtype
    )  # fmt: skip


def padded_offset(part: PackedAffine, source: AffineWeights) -> Any:
    """The offsets of `source`, laid out as the shifts of `part`."""
    offset = np.asarray(source.offset).astype(np.float32).swapaxes(1, 2)
    return np.pad(offset, [(0, whole - some) for whole, some in zip(part.scale.shape, offset.shape, strict=True)])


def abstract_stored(abstract: Weights, spec: ModelSpec, forms: Forms) -> Weights:
    """The abstract tree of what is stored, from that of the model."""
    if any(place.startswith(".head") for place in forms) and abstract.head is None:
        abstract = replace(abstract, head=abstract_linear(spec.embedding, 1, spec.dtype))
    return with_parts(abstract, {place: form.abstract() for place, form in forms.items()})


def as_kernels_read(weights: Weights, forms: Forms) -> Weights:
    """The stored weights with the shifts that kernels add."""
    parts = affine_parts(weights)
    shifted = {
        place: replace(p := parts[place], shift=p.shift + 2.0 ** (p.bits - 1) * p.scale.astype(np.float32))
        for place, form in forms.items()
        if form.holds_offset
    }
    return with_parts(weights, shifted)


def as_loaded(weights: Weights, forms: Forms) -> Weights:
    """The stored weights with a byte for each code and float32 parameters: what loading another checkpoint gives."""
    parts = affine_parts(weights)
    plain = {place: plain_part(parts[place], form) for place, form in forms.items()}
    weights = with_parts(weights, plain)
    return replace(weights, head=None) if weights.spec.head is None else weights


def plain_part(part: PackedAffine, form: PackedForm) -> AffineWeights:
    plain = unpack(part)
    if form.holds_offset:
        assert plain.offset is not None
        groups = plain.scale.shape[2]
        plain = replace(plain, offset=jax.device_put(np.asarray(part.shift)[:, :groups, : part.N].swapaxes(1, 2)))
    floats = {name: a.astype(np.float32) for name in ("scale", "offset") if (a := getattr(plain, name)) is not None}
    return replace(plain, **floats)
