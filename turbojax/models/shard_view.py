"""A checkpoint as one shard of a model sees it: every tensor cut to what the shard has, read no further than that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from checkpoints import AffineFormat, AffineTensor, Checkpoint, EightBitTensor, Tensor, WordTensor
from checkpoints.eight_bit import BLOCK, eight_bit_tensor
from turbojax.models.cutting import PADDING, PARTS, ROW_PARALLEL, ModelCut, shard_arrays
from turbojax.models.families import Architecture, Source
from turbojax.models.spec import GroupedAffine, LinearSpec

SEPARATOR = " of "  # stands between a part and the tensor it is read from: several parts may share one
PER_WORD = 8


def shard_architecture(arch: Architecture) -> Architecture:
    """The architecture whose sources `ShardView` knows: a tensor of its own for each part."""
    own = {p: Source(p + SEPARATOR + s.name) if p in PARTS else s for p, s in arch.sources.items()}
    return replace(arch, sources=own)


@dataclass(frozen=True)
class Part:
    """What a shard has of a tensor [N, K].

    Attributes:
        rows, columns: of N and of K; None is all.
        codes: as `columns`, of permuted codes.
        group_size: of the shard's groups of K; None where it is the tensor's own.
        has_bias: the shard adds the bias of a row-parallel part.
    """

    rows: np.ndarray | None
    columns: np.ndarray | None
    codes: np.ndarray | None
    group_size: int | None
    has_bias: bool

    def of(self, tensor: Tensor, places: np.ndarray | None) -> Tensor:
        """The shard's part of a tensor; `places` see `ModelCut.places_of_inputs`."""
        if isinstance(tensor, AffineTensor):
            return self._affine(tensor, places)
        if isinstance(tensor, EightBitTensor):
            return self._eight_bit(tensor)
        if tensor.ndim == 1:
            return shard_arrays(tensor, self.rows, 0) if self.has_bias else np.zeros_like(tensor)
        return shard_arrays(shard_arrays(tensor, self.rows, 0), self.columns, 1)

    def _groups(self, group_size: int, columns: np.ndarray | None) -> np.ndarray | None:
        """The tensor's group behind each of the shard's."""
        if columns is None or self.group_size is None:
            return None
        first = columns[:: self.group_size]
        return np.where(first == PADDING, PADDING, first // group_size)

    def _affine(self, tensor: AffineTensor, places: np.ndarray | None) -> AffineTensor:
        columns = self.columns if tensor.perm is None else self.codes
        groups = self._groups(tensor.group_size, columns)

        def cut(array: np.ndarray, along_k: np.ndarray | None) -> np.ndarray:
            return shard_arrays(shard_arrays(array, along_k, 0), self.rows, 1)

        perm = tensor.perm
        if perm is not None and columns is not None:
            assert places is not None
            perm = shard_arrays(places[perm], columns, 0)  # rows of padding look anywhere: their scales are zero
        offset = None if tensor.offset is None else cut(tensor.offset, groups)
        size = tensor.group_size if groups is None or self.group_size is None else self.group_size
        codes, scale = cut(tensor.codes, columns), cut(tensor.scale, groups)
        return AffineTensor(codes, scale, offset, tensor.bits, size, perm)

    def _eight_bit(self, tensor: EightBitTensor) -> EightBitTensor:
        codes = shard_arrays(shard_arrays(tensor.codes, self.rows, 0), self.columns, 1)
        if not tensor.has_blocks:
            return EightBitTensor(codes, shard_arrays(tensor.scale, self.rows, 0))
        scale = shard_arrays(tensor.scale, blocks_in(self.rows), 0)
        return eight_bit_tensor(codes, shard_arrays(scale, blocks_in(self.columns), 1))

    def words(self, tensor: WordTensor) -> WordTensor | None:
        """Codes left in words, where rows and columns are runs that end at words and at groups."""
        rows, columns = self.rows, self.columns
        if any(run_in(index, 0) is None for index in (rows, columns)):
            return None
        if rows is not None and (rows[0] % PER_WORD or len(rows) % PER_WORD):
            return None
        words = shard_arrays(tensor.words, columns, 0)
        if rows is not None:
            words = words[:, rows[0] // PER_WORD : (rows[-1] + 1) // PER_WORD]
        groups = self._groups(len(tensor.words) // len(tensor.scale), columns)
        cut = lambda array: shard_arrays(shard_arrays(array, groups, 0), rows, 1)  # noqa: E731
        return WordTensor(words, cut(tensor.scale), None if tensor.offset is None else cut(tensor.offset))


def blocks_in(index: np.ndarray | None) -> np.ndarray | None:
    """The blocks that whole blocks of an index are."""
    if index is None:
        return None
    first = index[::BLOCK]
    return np.where(first == PADDING, PADDING, first // BLOCK)


class ShardView(Checkpoint):
    """The tensors of one shard, under the names of `shard_architecture`. Norms are as they are."""

    def __init__(self, checkpoint: Checkpoint, arch: Architecture, cut: ModelCut, shard: int) -> None:
        self.path, self.config = checkpoint.path, checkpoint.config
        self._whole, self._cut, self._shard = checkpoint, cut, shard
        self._sources = arch.sources
        self._places = {part: cut.places_of_inputs(part) for part in ROW_PARALLEL}
        self._group_sizes = group_sizes_of(cut)
        self._parts: dict[tuple[str, int | None], Part] = {}

    def part(self, part: str, whole_group: int | None) -> Part:
        """What the shard has of tensors of a part whose groups have this size in the checkpoint."""
        key = part, whole_group
        if key not in self._parts:
            rows, rows_of_source = self._cut.rows(part, self._shard), self._sources[part].rows
            if rows_of_source is not None:
                rows = np.asarray(rows_of_source) if rows is None else within(np.asarray(rows_of_source), rows)
            self._parts[key] = Part(
                rows,
                self._cut.columns(part, self._shard),
                self._cut.codes(part, self._shard),
                self._group_sizes.get((part, whole_group)),
                part not in ROW_PARALLEL or self._shard == 0,
            )
        return self._parts[key]

    def read(self, name: str) -> Tensor:
        part, _, stored = name.rpartition(SEPARATOR)
        window = self._window(part, stored) if part else None
        tensor = self._whole.read(stored) if window is None else window
        if not part or window is not None:
            return tensor
        group_size = tensor.group_size if isinstance(tensor, AffineTensor) else None
        return self.part(part, group_size).of(tensor, self._places.get(part))

    def _window(self, part: str, stored: str) -> Tensor | None:
        """The shard's part where it is a run of outputs and of inputs that the file can be read by alone."""
        info = self._whole.tensors.get(stored)
        if info is None or not isinstance(info.format, AffineFormat) or len(info.shape) != 2:
            return None
        mine = self.part(part, info.format.group_size)
        if mine.group_size not in (None, info.format.group_size):
            return None
        rows, columns = (run_in(index, size) for index, size in zip((mine.rows, mine.columns), info.shape, strict=True))
        return None if rows is None or columns is None else self._whole.read_window(stored, rows, columns)

    def read_words(self, name: str) -> WordTensor | None:
        part, _, stored = name.rpartition(SEPARATOR)
        tensor = self._whole.read_words(stored)
        if tensor is None or not part:
            return tensor
        return self.part(part, len(tensor.words) // len(tensor.scale)).words(tensor)

    def release(self) -> None:
        self._whole.release()


def run_in(index: np.ndarray | None, size: int) -> slice | None:
    """The one run that an index is; None where it is more, or has padding."""
    if index is None:
        return slice(0, size)
    is_run = index[0] != PADDING and bool(np.all(np.diff(index) == 1))
    return slice(int(index[0]), int(index[-1]) + 1) if is_run else None


def within(rows: np.ndarray, index: np.ndarray) -> np.ndarray:
    """rows[index], padding kept."""
    return np.where(index == PADDING, PADDING, rows[index])


def group_sizes_of(cut: ModelCut) -> Mapping[tuple[str, int | None], int]:
    """The size of a shard's groups, by row-parallel part and the size of the checkpoint's."""
    found: dict[tuple[str, int | None], int] = {}
    shard = cut.shard_spec()
    for whole, mine in zip(cut.spec.segments, shard.segments, strict=True):
        pairs: dict[str, tuple[LinearSpec, LinearSpec]] = {
            "o": (whole.layer.o, mine.layer.o),
            "down": (whole.layer.down, mine.layer.down),
        }
        for part, (before, after) in pairs.items():
            if isinstance(before.storage, GroupedAffine) and isinstance(after.storage, GroupedAffine):
                found[part, before.storage.group_size] = after.storage.group_size
    return found
