"""One program of the Hopper kernel: which tiles of the result it computes, and its shared memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels import backend
from pallas_kernels.affine_linear.hopper_unpack import STRIP
from pallas_kernels.affine_linear.tuning import HopperConfig, hopper_shared_bytes, param_slot
from pallas_kernels.affine_linear.types import PackedLayout

SWIZZLE = 128  # bytes of a row of a tile in shared memory, as TMA and wgmma agree on it
STORE_ROWS = 32  # of a piece of the result on its way out; 16 where memory is short


@dataclass(frozen=True)
class Place:
    """A tile of the result: its part of K and its corner; the tiles of K from `first` to `last`."""

    split: jax.Array
    row: jax.Array
    column: jax.Array
    first: jax.Array
    last: jax.Array


@dataclass(frozen=True)
class Program:
    """What one warpgroup of a program sees: refs, those of `scratch_of` by name, and how the work is cut."""

    w: PackedLayout
    config: HopperConfig
    warpgroup: jax.Array
    layer: jax.Array
    x: Any
    words: Any
    params: tuple[Any, ...]
    out: Any
    scratch: dict[str, Any]

    @property
    def row_tiles(self) -> int:
        return pl.cdiv(self.x.shape[0], self.config.tile_m)

    @property
    def column_tiles(self) -> int:
        return self.words.shape[2] // self.config.program_n

    @property
    def my_column(self) -> Any:
        """Where the warpgroup's columns start within the program's."""
        return self.warpgroup * self.config.tile_n if self.config.side_by_side else 0

    @property
    def writer(self) -> Any:
        """Which buffer of results is the warpgroup's."""
        return self.warpgroup if self.config.side_by_side else 0

    def strip_rows(self, strip: int) -> slice | pl.Slice:
        return pl.ds(self.my_column + strip * STRIP, STRIP)

    def place(self, index: jax.Array) -> Place:
        """Tile `index`: rows innermost, so that words come from L2 but once."""
        column_of, split_of = self.row_tiles, self.row_tiles * self.column_tiles
        in_cluster = self.config.cluster_size > 1
        split = lax.axis_index("split") if in_cluster else index // split_of
        row, column = index % column_of, index // column_of % self.column_tiles
        T, S = self.w.num_tiles, self.config.splits
        bounds = split * T // S, (split + 1) * T // S
        return Place(split, row * self.config.tile_m, column * self.config.program_n, *bounds)

    def for_tiles(self, body: Callable[[Place, jax.Array], jax.Array]) -> None:
        """body(place, number of tiles of K before) -> that number behind it, for each of the program's tiles."""
        program = lax.axis_index("program")
        total = self.row_tiles * self.column_tiles * self.config.num_partials
        stride = num_programs(total, self.config)
        step = lambda i, count: body(self.place(program + i * stride), count)  # noqa: E731
        lax.fori_loop(0, (total - program + stride - 1) // stride, step, jnp.int32(0))

    def wait(self, name: str, index: Any) -> None:
        mosaic_gpu.barrier_wait(self.scratch[name].at[index])

    def arrive(self, name: str, index: Any) -> None:
        mosaic_gpu.barrier_arrive(self.scratch[name].at[index])


def num_programs(num_tiles: int, config: HopperConfig) -> int:
    """Resident programs; a cluster sums one tile only."""
    return num_tiles if config.cluster_size > 1 else min(backend.HOPPER_MULTIPROCESSORS, num_tiles)


def _tiled(columns: int, dtype: jnp.dtype) -> tuple[mosaic_gpu.TilingTransform, mosaic_gpu.SwizzleTransform]:
    """How TMA and wgmma lay out rows of so many elements."""
    columns = min(columns, SWIZZLE // jnp.dtype(dtype).itemsize)
    return mosaic_gpu.TilingTransform((8, columns)), mosaic_gpu.SwizzleTransform(columns * jnp.dtype(dtype).itemsize)


def scratch_of(
    config: HopperConfig, w: PackedLayout, dtype: jnp.dtype, out_dtype: jnp.dtype, param_dtypes: list[jnp.dtype]
) -> dict[str, Any]:
    """Shared memory and barriers: the ring with its slots' barriers, buffers of results, sums that are handed over."""
    c, W = config, w.plane_width
    writers = c.warpgroups if c.side_by_side else 1
    param_sizes, out_bytes = [d.itemsize for d in param_dtypes], out_dtype.itemsize
    fits = hopper_shared_bytes(c, w, param_sizes, out_bytes, STORE_ROWS) <= backend.shared_bytes()
    store_m = min(c.tile_m, STORE_ROWS if fits else STORE_ROWS // 2)
    scratch: dict[str, Any] = {
        "x": mosaic_gpu.SMEM((c.num_stages, c.tile_m, w.tile_k), dtype, transforms=_tiled(W, dtype)),
        "words": mosaic_gpu.SMEM((c.num_stages, c.program_n, W), jnp.uint16, transforms=_tiled(W, jnp.uint16)),
        "params": tuple(mosaic_gpu.SMEM((c.num_stages, *param_slot(c, w, d.itemsize)), d) for d in param_dtypes),
        "out": mosaic_gpu.SMEM((writers, 2, store_m, STRIP), out_dtype, transforms=_tiled(STRIP, out_dtype)),
        "full": mosaic_gpu.Barrier(num_arrivals=2 + len(param_dtypes), num_barriers=c.num_stages),
        "free": mosaic_gpu.Barrier(num_arrivals=writers, num_barriers=c.num_stages),
    }
    sums = lambda n: mosaic_gpu.SMEM((n, STRIP, c.tile_m), jnp.float32, transforms=_tiled(c.tile_m, jnp.float32))  # noqa: E731
    if not c.side_by_side:
        scratch["sums"] = sums(c.warpgroups - 1)
        scratch["sums_full"] = mosaic_gpu.Barrier(num_arrivals=c.warpgroups - 1, num_barriers=1)
        scratch["sums_free"] = mosaic_gpu.Barrier(num_arrivals=1, num_barriers=1)
    if c.cluster_size > 1:
        scratch["split_sums"] = sums(c.splits - 1)
        scratch["split_full"] = mosaic_gpu.Barrier(num_arrivals=c.splits - 1, num_barriers=1)
    return scratch
