"""The codes of one linear in all layers of a segment, written layer by layer: plain, or packed as they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from checkpoints import AffineTensor, WordTensor
from checkpoints.words import merge_awq
from pallas_kernels.affine_linear import AffineWeights, PackedAffine, packing_problem
from pallas_kernels.affine_linear.packing import pack_codes, with_words, words_shape
from turbojax.models.packing import narrowed, regrouped
from turbojax.models.placing import fill, pick, places, room
from turbojax.models.spec import GroupedAffine, LinearSpec


class AffineStack:
    """Weights of L layers that fill up. Layers may be written at the same time.

    Scales and offsets are float32 here, which holds those of every format exactly.
    """

    def __init__(self, spec: LinearSpec, num_layers: int, pack: bool, whole: bool = True) -> None:
        """Makes room.

        Args:
            spec: of the (fused) linear; its storage is GroupedAffine.
            num_layers: L.
            pack: keep packed codes where the format has a packed form, instead of a code a byte.
            whole: the parts are whole tensors, none of them rows of one.
        """
        storage, N, K = spec.storage, spec.out_dim, spec.in_dim
        assert isinstance(storage, GroupedAffine)
        grouped = (num_layers, N, -(-K // storage.group_size))
        self._scale = room(grouped, np.float32)
        self._offset = room(grouped, np.float32) if storage.has_offset else None
        self._perm = room((num_layers, K), np.int32) if storage.has_perm else None
        self._storage = storage
        abstract: Any = jax.ShapeDtypeStruct((num_layers, N, K), np.uint8)
        weights = regrouped(self._weights(abstract))
        self._codes = self._words = None
        if pack and packing_problem(weights) is None:
            self._words = room(words_shape(weights), np.uint16)
        else:
            self._codes = room(abstract.shape, np.uint8)
        self._abstract_codes = abstract
        self._whole = whole

    @property
    def takes_words(self) -> bool:
        """Whether parts may come with their codes in words: nothing is picked of them, and they fill every tile."""
        if self._words is None or self._storage.bits != 4:
            return False
        _, num_tiles, _, width = self._words.shape
        return self._whole and self._abstract_codes.shape[2] == num_tiles * 4 * width

    def _weights(self, codes: Any) -> AffineWeights:
        arrays: dict[str, Any] = {"scale": self._scale, "offset": self._offset, "perm": self._perm}
        return AffineWeights(codes, **arrays, bits=self._storage.bits, group_size=self._storage.group_size)

    def write(
        self,
        i: int,
        tensors: Sequence[AffineTensor | WordTensor],
        rows: Sequence[tuple[int, ...] | None],
        num_runs: int,
    ) -> int:
        """Fills layer `i` from the parts of the linear (see `placing.fill`); gives the bytes of its plain form.

        Args:
            i: place in the stack.
            tensors: the parts; codes in words only where `takes_words`.
            rows: of each part's outputs that belong to this linear; None is all.
            num_runs: see `fill`.
        """

        def parts(field: str) -> list[np.ndarray]:
            return [pick(getattr(t, field).T, r) for t, r in zip(tensors, rows, strict=True)]

        fill(self._scale[i], parts("scale"), num_runs)
        if self._offset is not None:
            fill(self._offset[i], parts("offset"), num_runs)
        if self._perm is not None and isinstance(tensors[0], AffineTensor) and tensors[0].perm is not None:
            self._perm[i] = tensors[0].perm
        if self._codes is not None:
            fill(self._codes[i], parts("codes"), num_runs)
        elif self._words is not None:
            _, N, _ = self._abstract_codes.shape
            words = places(self._words[i][:, :N], [len(s) for s in parts("scale")], num_runs, axis=1)
            for place, tensor, some in zip(words, tensors, rows, strict=True):
                if isinstance(tensor, WordTensor):
                    merge_words(place, tensor.words)
                else:
                    pack_codes(place, pick(tensor.codes.T, some), self._storage.bits)
        params = [a[i].nbytes for a in (self._scale, self._offset, self._perm) if a is not None]
        return int(np.prod(self._abstract_codes.shape[1:])) + sum(params)

    def weights(self) -> AffineWeights | PackedAffine:
        """The stack, on the host."""
        if self._words is None:
            return self._weights(self._codes)
        return with_words(narrowed(regrouped(self._weights(self._abstract_codes))), self._words)


def merge_words(words: np.ndarray, stored: np.ndarray) -> None:
    """What `pack_codes` does, for codes of 4 bits that are words already: 2.4 times as fast.

    Args:
        words: uint16 [tiles, ..., W] to fill.
        stored: int32 [tiles * 4 * W, N / 8], see `WordTensor`.
    """
    width = words.shape[-1]
    for place, tile in zip(words, stored.reshape(len(words), 4, width, -1), strict=True):
        place[...] = merge_awq(tile).T.reshape(place.shape)
