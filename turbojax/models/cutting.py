"""How a model is cut between shards: which heads, MLP columns and tokens each has, and what model that makes it.

Every shard has the same static shapes, so what does not divide is filled up with zeros, which contribute nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from checkpoints.eight_bit import BLOCK
from turbojax.errors import ConfigError
from turbojax.models.spec import EightBit, GroupedAffine, LayerSpec, LinearSpec, ModelSpec, Storage

PADDING = -1  # in place of an index: zeros
WIDEST_UNIT = 128  # columns of the MLP that stay together where that costs no padding: a tile of the kernels
SMALLEST_UNIT = 16

PARTS = ("q", "k", "v", "o", "gate", "up", "down", "embedding", "head")
ROW_PARALLEL = ("o", "down")
"""Parts whose inputs are cut, so that their results are summed over the shards; those of the others are the shard's."""


@dataclass(frozen=True)
class HeadCut:
    """Heads in places: a place has one kv head, and a piece of its query heads.

    A kv head is cut into `num_pieces` pieces, each of which has the kv head itself: more than one where the shards
    outnumber the kv heads. Shard s has places s * places_per_shard and so on; those behind the last piece are empty.

    Attributes:
        num_kv_heads, group: K and G of the model.
        num_pieces: of a kv head.
        num_shards: how many there are.
    """

    num_kv_heads: int
    group: int
    num_pieces: int
    num_shards: int

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, num_shards: int) -> HeadCut:
        """The one that leaves a shard the fewest columns of qkv, and then the fewest kv heads."""
        group = num_heads // num_kv_heads
        cuts = [cls(num_kv_heads, group, pieces, num_shards) for pieces in range(1, group + 1)]
        return min(cuts, key=lambda cut: (cut.places_per_shard * (cut.heads_per_place + 2), cut.places_per_shard))

    @property
    def places_per_shard(self) -> int:
        """K of a shard."""
        return -(-self.num_kv_heads * self.num_pieces // self.num_shards)

    @property
    def heads_per_place(self) -> int:
        """G of a shard."""
        return -(-self.group // self.num_pieces)

    def kv_heads(self, shard: int) -> list[int]:
        """The kv head of each place."""
        pieces = range(shard * self.places_per_shard, (shard + 1) * self.places_per_shard)
        return [p // self.num_pieces if p < self.num_kv_heads * self.num_pieces else PADDING for p in pieces]

    def query_heads(self, shard: int) -> list[int]:
        """The query heads of all places, in order."""
        found = []
        for place, kv_head in enumerate(self.kv_heads(shard)):
            piece = (shard * self.places_per_shard + place) % self.num_pieces
            for i in range(piece * self.heads_per_place, (piece + 1) * self.heads_per_place):
                is_real = kv_head != PADDING and i < self.group
                found.append(kv_head * self.group + i if is_real else PADDING)
        return found


def runs_of(heads: Sequence[int], head_dim: int) -> np.ndarray:
    """The rows of these heads, one after the other."""
    rows = np.asarray(heads)[:, None] * head_dim + np.arange(head_dim)
    return np.where(np.asarray(heads)[:, None] == PADDING, PADDING, rows).reshape(-1)


def run_of(shard: int, length: int, total: int) -> np.ndarray:
    """Indices shard * length and so on, up to `total`."""
    index = shard * length + np.arange(length)
    return np.where(index < total, index, PADDING)


def whole_blocks(indices: Iterable[np.ndarray], size: int) -> int:
    """The largest of size, size / 2, ... whose blocks no index cuts apart: a shard's block is whole, or zeros.

    Args:
        indices: what each shard has of an axis.
        size: of the model's blocks; the result divides it.
    """
    indices = list(indices)
    while size > 1 and not all(_is_whole(index, size) for index in indices):
        size = size // 2 if size % 2 == 0 else 1
    return size


def _is_whole(index: np.ndarray, size: int) -> bool:
    if len(index) % size:
        return False
    blocks = index.reshape(-1, size)
    start = blocks[:, :1]
    is_run = np.all((start % size == 0) & (blocks == start + np.arange(size)), axis=1)
    return bool(np.all(is_run | np.all(blocks == PADDING, axis=1)))


@dataclass(frozen=True)
class ModelCut:
    """A model and its cut.

    Attributes:
        spec: of the whole model.
        num_shards: at least 2.
        heads: see `HeadCut`.
        ffw_len, vocab_len: columns of the MLP and tokens that a shard has, padding counted in.
    """

    spec: ModelSpec
    num_shards: int
    heads: HeadCut
    ffw_len: int
    vocab_len: int

    @classmethod
    def of(cls, spec: ModelSpec, num_shards: int) -> ModelCut:
        layer = spec.segments[0].layer
        heads = HeadCut.of(layer.num_heads, layer.num_kv_heads, num_shards)
        vocab_len = -(-spec.vocab_size // num_shards)
        if spec.vocab_size % num_shards:
            vocab_len = -(-vocab_len // WIDEST_UNIT) * WIDEST_UNIT
        return cls(spec, num_shards, heads, ffw_len_of(spec, num_shards), vocab_len)

    def rows(self, part: str, shard: int) -> np.ndarray | None:
        """The outputs of a part that a shard has; None is all."""
        if part in ROW_PARALLEL:
            return None
        if part in ("embedding", "head"):
            return run_of(shard, self.vocab_len, self.spec.vocab_size)
        if part in ("gate", "up"):
            return run_of(shard, self.ffw_len, self._layer.down.in_dim)
        heads = self.heads.query_heads(shard) if part == "q" else self.heads.kv_heads(shard)
        return runs_of(heads, self._layer.head_dim)

    def columns(self, part: str, shard: int) -> np.ndarray | None:
        """The inputs of a part that a shard has; None is all."""
        if part == "down":
            return run_of(shard, self.ffw_len, self._layer.down.in_dim)
        if part == "o":
            return runs_of(self.heads.query_heads(shard), self._layer.head_dim)
        return None

    def codes(self, part: str, shard: int) -> np.ndarray | None:
        """As `columns`, of permuted codes, whose rows are in the order of their groups: a run of whole groups."""
        columns = self.columns(part, shard)
        return None if columns is None else run_of(shard, len(columns), self._in_dim(part))

    def places_of_inputs(self, part: str) -> np.ndarray:
        """Where each input of a row-parallel part stands among the inputs of all shards side by side."""
        every = [self.columns(part, shard) for shard in range(self.num_shards)]
        side_by_side = np.concatenate([columns for columns in every if columns is not None])
        where = np.zeros(self._in_dim(part), np.int32)
        where[side_by_side[side_by_side != PADDING]] = np.flatnonzero(side_by_side != PADDING)
        return where

    @property
    def _layer(self) -> LayerSpec:
        return self.spec.segments[0].layer

    def _in_dim(self, part: str) -> int:
        return self._layer.o.in_dim if part == "o" else self._layer.down.in_dim

    # -- what a shard is ----------------------------------------------------------------------------------

    def shard_spec(self) -> ModelSpec:
        """The model that each shard is.

        Raises:
            ConfigError: a shard would cut blocks of scales apart.
        """
        spec = self.spec
        segments = tuple(replace(segment, layer=self._shard_layer(segment.layer)) for segment in spec.segments)
        embedding = self._shard_linear(spec.embedding, ("embedding",))
        head = None if spec.head is None else self._shard_linear(spec.head, ("head",))
        return replace(spec, segments=segments, embedding=embedding, head=head, num_shards=self.num_shards)

    def _shard_layer(self, layer: LayerSpec) -> LayerSpec:
        places = self.heads.places_per_shard

        def parts(specs: tuple[LinearSpec, ...], names: Sequence[str]) -> tuple[LinearSpec, ...]:
            if len(specs) == 1:
                return (self._shard_linear(specs[0], names),)
            return tuple(self._shard_linear(one, (name,)) for one, name in zip(specs, names, strict=True))

        return replace(
            layer,
            num_heads=places * self.heads.heads_per_place,
            num_kv_heads=places,
            qkv=parts(layer.qkv, "qkv"),
            o=self._shard_linear(layer.o, "o"),
            gate_up=parts(layer.gate_up, ("gate", "up")),
            down=self._shard_linear(layer.down, ("down",)),
        )

    def _shard_linear(self, spec: LinearSpec, parts: Sequence[str]) -> LinearSpec:
        shards = range(self.num_shards)
        rows = [index for part in parts for index in (self.rows(part, s) for s in shards) if index is not None]
        out_dim = sum(len(index) for index in rows) // self.num_shards if rows else spec.out_dim
        storage, columns = spec.storage, [index for s in shards if (index := self.columns(parts[0], s)) is not None]
        if isinstance(storage, EightBit) and storage.has_blocks:
            self._check_blocks([*rows, *columns], "+".join(parts))
        if not columns:
            return replace(spec, out_dim=out_dim)
        in_dim = len(columns[0])
        if isinstance(storage, GroupedAffine) and storage.has_perm:
            columns = [index for s in shards if (index := self.codes(parts[0], s)) is not None]
        return replace(spec, in_dim=in_dim, storage=shard_storage(storage, columns, spec.in_dim))

    def _check_blocks(self, indices: list[np.ndarray], part: str) -> None:
        size = whole_blocks(indices, BLOCK)
        if size < BLOCK:
            accepted = f"a number of shards that leaves blocks of {BLOCK} of {part} whole; {self.num_shards} cut them "
            raise ConfigError("EngineConfig", "tp", self.num_shards, accepted + f"into {size}")


def shard_storage(storage: Storage, columns: list[np.ndarray], in_dim: int) -> Storage:
    """How a shard stores a linear whose inputs are cut: in smaller groups where those of the model are cut apart."""
    if isinstance(storage, EightBit):
        return replace(storage, has_blocks=storage.has_blocks and len(columns[0]) > BLOCK)
    if not isinstance(storage, GroupedAffine):
        return storage
    if storage.group_size < in_dim:
        return replace(storage, group_size=whole_blocks(columns, storage.group_size))
    if any(np.any(index == PADDING) for index in columns):  # a scale for all inputs, but zeros need one of their own
        return replace(storage, group_size=whole_blocks(columns, WIDEST_UNIT))
    return replace(storage, group_size=len(columns[0]))


def ffw_len_of(spec: ModelSpec, num_shards: int) -> int:
    """Columns of the MLP that a shard has: whole groups and blocks; units as wide as can be without padding."""
    sizes = [SMALLEST_UNIT]
    for segment in spec.segments:
        down = segment.layer.down
        if isinstance(down.storage, GroupedAffine) and down.storage.group_size < down.in_dim:
            sizes.append(down.storage.group_size)
        if any(isinstance(w.storage, EightBit) and w.storage.has_blocks for w in (*segment.layer.gate_up, down)):
            sizes.append(BLOCK)
    ffw_dim, smallest = spec.segments[0].layer.down.in_dim, math.lcm(*sizes)
    unit = smallest
    while unit * 2 <= WIDEST_UNIT and ffw_dim % (unit * 2 * num_shards) == 0:
        unit *= 2
    return -(-ffw_dim // (unit * num_shards)) * unit


def shard_arrays(array: np.ndarray, index: np.ndarray | None, axis: int) -> np.ndarray:
    """What a shard has of an axis; a view where that is one run, so that a mapped file is read there alone."""
    if index is None:
        return array
    real = index[index != PADDING]
    is_run = len(real) == len(index) and real[-1] - real[0] == len(real) - 1 and bool(np.all(np.diff(real) == 1))
    where = (slice(None),) * axis
    if is_run:
        return array[(*where, slice(real[0], real[-1] + 1))]
    out = np.zeros((*array.shape[:axis], len(index), *array.shape[axis + 1 :]), array.dtype)
    for start, stop in runs_in(index):
        first = index[start]
        if first != PADDING:
            out[(*where, slice(start, stop))] = array[(*where, slice(first, first + stop - start))]
    return out


def runs_in(index: np.ndarray) -> list[tuple[int, int]]:
    """Where an index goes on by one (or stays padding), as (start, stop)."""
    was_padding, is_padding = index[:-1] == PADDING, index[1:] == PADDING
    step = (was_padding != is_padding) | (~is_padding & (index[1:] != index[:-1] + 1))
    ends = [0, *(np.flatnonzero(step) + 1).tolist(), len(index)]
    return list(pairwise(ends))
