"""The fused eight-bit linear for Hopper in Pallas-Mosaic: TMA copies tiles, two warpgroups multiply, one feeds them.

Triton multiplies e4m3 on Hopper through float16, at less than half the rate; here wgmma takes the codes as they are.
Programs stay resident, one a multiprocessor, and walk over the output's tiles.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels import backend
from pallas_kernels.eight_bit_linear.tuning import HopperConfig
from pallas_kernels.eight_bit_linear.types import BLOCK, EightBitWeights
from pallas_kernels.linears import sum_partial

BAND = 8  # tiles of outputs that follow each other on the same rows, which then come from L2
SWIZZLE = 128  # bytes of a row of a tile in shared memory, as TMA and wgmma agree on it
FEEDER_REGISTERS = 40
ROW_ALIGNMENT = 8  # rows of x, since TMA copies tiles of 8 rows
# With more groups of K, scales are read a step ahead: L1 cannot hold a tile's, and the wait for L2 shows (112 groups:
# 490 us -> 431 at 4096 rows; but 32 groups: 208 -> 234 at 1024 rows). Between the two nothing was measured.
MAX_GROUPS_READ_LATE = 64
STORE_M = 64  # rows of a piece of the result on its way through shared memory

ROWS, COLUMNS = mosaic_gpu.Layout.WGMMA.reduce(1), mosaic_gpu.Layout.WGMMA.reduce(0)


@dataclass(frozen=True)
class _Place:
    """Where a warpgroup works on one tile of the result: the program's corner, its own, and its part of the inputs."""

    split: jax.Array
    program_row: jax.Array
    program_column: jax.Array
    row: jax.Array
    column: jax.Array
    rows: slice | pl.Slice
    outputs: slice | pl.Slice


def _place(index: jax.Array, config: HopperConfig, row_tiles: int, column_tiles: int) -> _Place:
    """The place of tile `index`: splits outermost, then bands of tiles that go back and forth."""
    num_tiles, warpgroup = row_tiles * column_tiles, lax.axis_index("warpgroup")
    row_tile, column_tile = mosaic_gpu.planar_snake(index % num_tiles, (row_tiles, column_tiles), 0, BAND)
    row, column = row_tile * config.program_m, column_tile * config.program_n
    whole = slice(None)
    if config.side_by_side:
        shift, part = warpgroup * config.tile_n, pl.ds(warpgroup * config.tile_n, config.tile_n)
        return _Place(index // num_tiles, row, column, row, column + shift, whole, part)
    shift, part = warpgroup * config.tile_m, pl.ds(warpgroup * config.tile_m, config.tile_m)
    return _Place(index // num_tiles, row, column, row + shift, column, part, whole)


def _tiled(dtype: jnp.dtype) -> tuple[mosaic_gpu.TilingTransform, mosaic_gpu.SwizzleTransform]:
    columns = SWIZZLE // jnp.dtype(dtype).itemsize
    return mosaic_gpu.TilingTransform((8, columns)), mosaic_gpu.SwizzleTransform(SWIZZLE)


def _load(ref, index: tuple, layout) -> jax.Array:
    """ref[index] from device memory, spread over a warpgroup's threads like a row or column of its tile."""
    load: Any = functools.partial(mosaic_gpu.load, layout=layout, optimized=False)
    return load(ref, index) if jax.__version_info__ < (0, 11) else load(ref.at[index])


def _spread(vector: jax.Array, config: HopperConfig, axis: int) -> jax.Array:
    """A vector along `axis` of a warpgroup's tile."""
    return lax.broadcast_in_dim(vector, (config.tile_m, config.tile_n), [axis])


def _multiply(sums_ref, x_smem, codes_smem, place: _Place) -> None:
    mosaic_gpu.wgmma(sums_ref, x_smem.at[place.rows], codes_smem.at[place.outputs].transpose((1, 0)))


def _row_scales(x_scale_ref, group, place: _Place, config: HopperConfig) -> jax.Array:
    return _load(x_scale_ref, (group, pl.ds(place.row, config.tile_m)), ROWS)


def _store(out_ref, out_smem, values: jax.Array, place: _Place) -> None:
    """Writes a warpgroup's values piece by piece through two buffers; TMA leaves out what lies past M."""
    height, width = out_smem.shape[1:]
    pieces = [(i, j) for i in range(0, values.shape[0], height) for j in range(0, values.shape[1], width)]
    for number, (i, j) in enumerate(pieces):
        mosaic_gpu.wait_smem_to_gmem(1, wait_read_only=True)
        buffer = out_smem.at[number % 2]
        buffer[...] = values[i : i + height, j : j + width]
        mosaic_gpu.commit_smem()
        to = out_ref.at[place.split, pl.ds(place.row + i, height), pl.ds(place.column + j, width)]
        mosaic_gpu.copy_smem_to_gmem(buffer, to)


def _sum_channels(x_scale_ref, scale_ref, layer, place: _Place, config: HopperConfig, sum_dtype, store):
    """(step, frame) of the pipeline where scales cover all of K: they multiply the finished sums."""

    def step(_, x_smem, codes_smem, sums_ref):
        _multiply(sums_ref, x_smem, codes_smem, place)
        mosaic_gpu.wgmma_wait(1)
        return sums_ref

    def frame(run):
        def sum_and_store(sums_ref):
            run(sums_ref)
            outputs = layer, pl.ds(place.column, config.tile_n)
            of_outputs = _spread(_load(scale_ref, outputs, COLUMNS), config, 1)
            of_rows = _spread(_row_scales(x_scale_ref, 0, place, config), config, 0)
            store(sums_ref[...].astype(jnp.float32) * of_rows * of_outputs)

        pl.run_scoped(sum_and_store, mosaic_gpu.ACC((config.tile_m, config.tile_n), sum_dtype))

    return step, frame


def _sum_blocks(x_scale_ref, scale_ref, layer, place: _Place, config: HopperConfig, first_group, store):
    """(step, frame) of the pipeline where each step has scales of its own: they multiply the step's sums."""
    last_group = x_scale_ref.shape[0] - 1
    reads_ahead = last_group >= MAX_GROUPS_READ_LATE

    def scales_of(group):
        """Of the rows, and the one of the weights: a warpgroup's outputs lie in one block."""
        return _row_scales(x_scale_ref, group, place, config), scale_ref[layer, place.column // BLOCK, group]

    def step(index, x_smem, codes_smem, carry):
        values, now = carry
        group = first_group + index[0]
        following = scales_of(jnp.minimum(group + 1, last_group)) if reads_ahead else ()

        def product(sums_ref):
            _multiply(sums_ref, x_smem, codes_smem, place)
            of_rows, of_block = now or scales_of(group)  # read while the tensor cores work
            return of_rows * of_block, sums_ref[...]

        scales, sums = pl.run_scoped(product, mosaic_gpu.ACC((config.tile_m, config.tile_n), jnp.float32))
        return values + sums * _spread(scales, config, 0), following

    def frame(run):
        zeros = mosaic_gpu.layout_cast(jnp.zeros((config.tile_m, config.tile_n), jnp.float32), mosaic_gpu.Layout.WGMMA)
        values, _ = run((zeros, scales_of(first_group) if reads_ahead else ()))
        store(values)

    return step, frame


def _pipeline(num_steps: int, dtype: jnp.dtype, has_blocks: bool, config: HopperConfig, step, frame):
    """Copies of both operands' tiles ahead of `step`, which multiplies them, inside `frame`."""
    specs = [
        mosaic_gpu.BlockSpec(
            (height, BLOCK), lambda k: (0, k), transforms=_tiled(dtype), memory_space=mosaic_gpu.SMEM,
            # products that may run on when a step ends; the sums of blocks are needed at once
            delay_release=0 if has_blocks else 1,
        )
        for height in (config.program_m, config.program_n)
    ]  # fmt: skip
    return mosaic_gpu.emit_pipeline_warp_specialized(
        step, grid=(num_steps,), in_specs=specs, memory_registers=FEEDER_REGISTERS, wg_axis="warpgroup",
        num_compute_wgs=2, max_concurrent_steps=config.num_stages, compute_context=frame,
    )  # fmt: skip


def _linear_kernel(layer_ref, x_ref, x_scale_ref, codes_ref, scale_ref, out_ref, *, has_blocks: bool, config):
    (M, K), (_, N, _) = x_ref.shape, codes_ref.shape
    row_tiles, column_tiles = pl.cdiv(M, config.program_m), pl.cdiv(N, config.program_n)
    num_steps = K // BLOCK // config.splits
    layer, layer_codes = layer_ref[0], codes_ref.at[layer_ref[0]]

    pipeline = functools.partial(_pipeline, num_steps, codes_ref.dtype, has_blocks, config)

    def program(buffers, out_smem):
        @mosaic_gpu.nd_loop((config.splits * row_tiles * column_tiles,), collective_axes="program")
        def tile(loop):
            place = _place(loop.index[0], config, row_tiles, column_tiles)
            my_smem = out_smem.at[lax.axis_index("warpgroup")]
            store = lambda values: _store(out_ref, my_smem, values.astype(out_ref.dtype), place)  # noqa: E731
            refs, first = (x_scale_ref, scale_ref, layer, place, config), place.split * num_steps
            sum_dtype = jnp.int32 if codes_ref.dtype == jnp.int8 else jnp.float32
            stages = _sum_blocks(*refs, first, store) if has_blocks else _sum_channels(*refs, sum_dtype, store)
            columns = pl.ds(first * BLOCK, num_steps * BLOCK)
            pipeline(*stages)(
                x_ref.at[pl.ds(place.program_row, config.program_m), columns],
                layer_codes.at[pl.ds(place.program_column, config.program_n), columns],
                allocations=buffers,
            )

        mosaic_gpu.wait_smem_to_gmem(0, wait_read_only=True)

    ignore = lambda *_: None  # noqa: E731  # what runs does not change what is allocated
    pl.run_scoped(
        program,
        buffers=pipeline(ignore, ignore).get_allocations(x_ref, layer_codes),
        out_smem=mosaic_gpu.SMEM(
            (2, 2, STORE_M, SWIZZLE // out_ref.dtype.itemsize), out_ref.dtype, transforms=_tiled(out_ref.dtype)
        ),
        collective_axes="warpgroup",
    )


def hopper_linear(
    x: jax.Array,
    x_scale: jax.Array,
    w: EightBitWeights,
    layer: jax.Array | int,
    config: HopperConfig,
    out_dtype: jnp.dtype,
) -> jax.Array:
    """Codes x [M, K] with scales [groups, at least M rounded up to 256] times layer `layer` -> [M, N].

    Rows past M are read as zeros and not written, by TMA.
    """
    M = x.shape[0]
    out = mosaic_gpu.kernel(
        functools.partial(_linear_kernel, has_blocks=w.has_blocks, config=config),
        out_type=jax.ShapeDtypeStruct((config.splits, M, w.N), out_dtype if config.splits == 1 else jnp.float32),
        grid=(backend.HOPPER_MULTIPROCESSORS,),  # with fewer, some programs start when others end
        grid_names=("program",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=mosaic_gpu.CompilerParams(lowering_semantics=mosaic_gpu.LoweringSemantics.Warpgroup),
    )(
        jnp.reshape(jnp.asarray(layer, jnp.int32), (1,)),
        x,
        x_scale,
        w.codes,
        w.scale if w.has_blocks else w.scale[..., 0],
    )
    return sum_partial(out, out_dtype)
