"""The fused affine linear for Hopper in Pallas-Mosaic: one warpgroup copies tiles by TMA, the others multiply them.

As in the Triton kernel the result is W x^T, with codes unpacked in the registers where wgmma takes its left operand.
What is new is that nobody waits for each other: copies run ahead through a ring in shared memory, and warpgroups
unpack while the tensor cores multiply for others. Programs stay resident and walk over the output's tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from pallas_kernels.affine_linear.hopper_program import Place, Program, num_programs, scratch_of
from pallas_kernels.affine_linear.hopper_unpack import (
    ROWS,
    STRIP,
    constant,
    load,
    scale_terms,
    spread,
    unpack_plane,
    zeros_of_rows,
)
from pallas_kernels.affine_linear.tuning import LEAST_ROWS, HopperConfig
from pallas_kernels.affine_linear.types import PackedAffine, PackedLayout
from pallas_kernels.affine_linear.unpack import ZERO_BASE

MAX_REGISTERS, COPIER_REGISTERS = 240, 40
WGMMA = mosaic_gpu.Layout.WGMMA


def _copy_tiles(p: Program) -> None:
    """The copying warpgroup: a slot of the ring is filled as soon as it is free."""
    mosaic_gpu.set_max_registers(COPIER_REGISTERS, action="decrease")
    w, c, s = p.w, p.config, p.scratch

    def copy_tile(place: Place, count: jax.Array) -> jax.Array:
        columns = pl.ds(place.column, c.program_n)

        def step(tile, count):
            slot = lax.rem(count, c.num_stages)
            p.wait("free", slot)
            groups = pl.ds(w.group_of_plane(tile, 0), w.groups_per_tile)
            copies = [
                (p.words.at[p.layer, tile, columns], s["words"].at[slot]),
                (p.x.at[pl.ds(place.row, c.tile_m), pl.ds(tile * w.tile_k, w.tile_k)], s["x"].at[slot]),
                *(
                    (param.at[p.layer, groups, columns], smem.at[slot, pl.ds(0, w.groups_per_tile)])
                    for param, smem in zip(p.params, s["params"], strict=True)
                ),
            ]
            for source, smem in copies:
                mosaic_gpu.copy_gmem_to_smem(source, smem, s["full"].at[slot])
            return count + 1

        return lax.fori_loop(place.first, place.last, step, count)

    p.for_tiles(copy_tile)
    mosaic_gpu.griddepcontrol_launch_dependents()  # the next kernel may take the places of programs that have ended


def _multiply_tiles(p: Program) -> None:
    """A multiplying warpgroup: sums of a tile of the result, added to those of others, and stored."""
    c, warpgroup = p.config, p.warpgroup
    spare = (c.num_registers * (c.warpgroups + 1) - COPIER_REGISTERS) // c.warpgroups // 8 * 8
    mosaic_gpu.set_max_registers(min(spare, MAX_REGISTERS), action="increase")

    def free_ring() -> None:
        for slot in range(c.num_stages - c.scale_weights):  # those that scale release a slot a step late
            p.arrive("free", slot)
        if not c.side_by_side:
            p.arrive("sums_free", 0)

    if c.side_by_side:
        free_ring()
    else:
        pl.when(warpgroup == 0)(free_ring)

    def tile(place: Place, count: jax.Array) -> jax.Array:
        if c.scale_weights:
            _store(p, place, _sum_scaled(p, place, count))
        elif c.side_by_side:
            _store(p, place, [_sum_groups(p, place, count, 0, 1)])
        else:
            _add_turns(p, place, _sum_groups(p, place, count, warpgroup, c.warpgroups))
        return count + place.last - place.first

    p.for_tiles(tile)
    mosaic_gpu.wait_smem_to_gmem(0, wait_read_only=True)


def _weights_of(p: Program, slot: jax.Array, strip: int) -> Callable[..., jax.Array]:
    """(plane, scale terms) -> the weights [64, W] of a strip of a tile."""
    W, dtype = p.w.plane_width, p.x.dtype
    words = load(p.scratch["words"].at[slot, p.strip_rows(strip)], WGMMA, optimized=True)
    if p.w.kind == "symmetric":
        zeros = [constant(ZERO_BASE[4, dtype.name] + 8, W, dtype)] * p.w.groups_per_tile
    else:
        of_rows = [p.scratch["params"][1].at[slot, group, p.strip_rows(strip)] for group in range(p.w.groups_per_tile)]
        zeros = [zeros_of_rows(load(ref, ROWS), W, dtype) for ref in of_rows]
    return lambda plane, *scales: unpack_plane(words, zeros[plane // p.w.planes_per_group], *scales, plane=plane)


def _scale_of(p: Program, slot: jax.Array, group: int, strip: int) -> jax.Array:
    return load(p.scratch["params"][0].at[slot, group, p.strip_rows(strip)], ROWS)


def _x_of(p: Program, slot: jax.Array, plane: int) -> Any:
    """x^T [W, tile_m] of a plane of a tile."""
    return p.scratch["x"].at[slot, :, pl.ds(plane * p.w.plane_width, p.w.plane_width)].transpose((1, 0))


def _sum_groups(p: Program, place: Place, count: jax.Array, turn: Any, num_turns: int) -> jax.Array:
    """Sums [64, tile_m] over each `num_turns`-th tile of K, with scales on the sums of groups.

    A warpgroup's slots of the ring are always the same ones, so `turn` counts from the program's first tile of K.
    """
    c, run = p.config, p.w.planes_per_group
    sums = mosaic_gpu.ACC((STRIP, c.tile_m), jnp.float32)
    skip = lax.rem(turn + num_turns - lax.rem(count, num_turns), num_turns) if num_turns > 1 else 0

    def step(index, total):
        slot = lax.rem(count + skip + index * num_turns, c.num_stages)
        p.wait("full", slot)
        weights = _weights_of(p, slot, 0)
        scales = [_scale_of(p, slot, group, 0).astype(jnp.float32) for group in range(p.w.groups_per_tile)]

        def multiply(*groups):
            for plane in range(p.w.num_planes):
                mosaic_gpu.wgmma(groups[plane // run], weights(plane), _x_of(p, slot, plane))
                if c.warpgroups > 3:  # the unpacked planes of one wgmma at a time fit the registers
                    mosaic_gpu.wgmma_wait(1)
            return tuple(group[...] for group in groups)

        for group, scale in zip(pl.run_scoped(multiply, *[sums] * p.w.groups_per_tile), scales, strict=True):
            total = total + group * spread(scale, c.tile_m)
        p.arrive("free", slot)
        return total

    turns = (place.last - place.first - skip + num_turns - 1) // num_turns
    return lax.fori_loop(0, turns, step, constant(0, c.tile_m, jnp.dtype(jnp.float32)))


def _sum_scaled(p: Program, place: Place, count: jax.Array) -> list[jax.Array]:
    """Sums [64, tile_m] of each strip over the tiles of K, with scales on the weights; tensor cores never pause."""
    c, run, dtype = p.config, p.w.planes_per_group, p.x.dtype
    num_strips = c.tile_n // STRIP

    def multiply(*sums):
        def step(_, count):
            slot = lax.rem(count, c.num_stages)
            p.wait("full", slot)
            for strip in range(num_strips):
                weights = _weights_of(p, slot, strip)
                for plane in range(p.w.num_planes):
                    if plane % run == 0:
                        terms = scale_terms(_scale_of(p, slot, plane // run, strip), dtype)
                        scales = [spread(term, p.w.plane_width) for term in terms]
                    mosaic_gpu.wgmma(sums[strip], weights(plane, *scales), _x_of(p, slot, plane))
                    mosaic_gpu.wgmma_wait(1)
                    if strip == plane == 0:  # the last step's products are done, and with them its slot
                        p.arrive("free", lax.rem(count + c.num_stages - 1, c.num_stages))
            return count + 1

        lax.fori_loop(place.first, place.last, step, count)
        return [strip[...] for strip in sums]

    return pl.run_scoped(multiply, *[mosaic_gpu.ACC((STRIP, c.tile_m), jnp.float32)] * num_strips)


def _add_turns(p: Program, place: Place, values: jax.Array) -> None:
    """Warpgroup 0 adds the others' sums to its own, in order, and goes on with the total."""
    warpgroup, sums = p.warpgroup, p.scratch["sums"]

    @pl.when(warpgroup > 0)
    def _():
        p.wait("sums_free", 0)
        sums[warpgroup - 1] = values
        p.arrive("sums_full", 0)

    @pl.when(warpgroup == 0)
    def _():
        p.wait("sums_full", 0)
        total = values
        for other in range(p.config.warpgroups - 1):
            total = total + load(sums.at[other], WGMMA)
        p.arrive("sums_free", 0)
        if p.config.cluster_size > 1:
            _add_splits(p, place, total)
        else:
            _store(p, place, [total])


def _add_splits(p: Program, place: Place, values: jax.Array) -> None:
    """The cluster's program 0 adds the others' sums, which they write to its shared memory, and stores the total."""
    sums = p.scratch["split_sums"]

    @pl.when(place.split > 0)
    def _():
        mosaic_gpu.async_store_smem(
            values, sums.at[place.split - 1], p.scratch["split_full"].at[0], cluster_idx=jnp.int32(0),
            cluster_dim="split", optimized=False,
        )  # fmt: skip

    @pl.when(place.split == 0)
    def _():
        p.wait("split_full", 0)
        total = values
        for other in range(p.config.splits - 1):
            total = total + load(sums.at[other], WGMMA)
        _store(p, place, [total])


def _store(p: Program, place: Place, strips: list[jax.Array]) -> None:
    """Writes strips [64, tile_m] as rows of the result, piece by piece through two buffers.

    TMA leaves out what lies past M. A cluster's program 0 stores, and one of splits side by side its partial sums.
    """
    buffers = p.scratch["out"].at[p.writer]
    store_m, number = buffers.shape[1], 0
    for strip, values in enumerate(strips):
        for m in range(0, p.config.tile_m, store_m):
            mosaic_gpu.wait_smem_to_gmem(min(number, 1), wait_read_only=True)
            buffer = buffers.at[number % 2]
            piece = values[:, m : m + store_m].astype(p.out.dtype)
            buffer.transpose((1, 0))[...] = mosaic_gpu.layout_cast(piece, mosaic_gpu.Layout.WGMMA_TRANSPOSED)
            mosaic_gpu.commit_smem()
            columns = pl.ds(place.column + p.my_column + strip * STRIP, STRIP)
            to = p.out.at[place.split, pl.ds(place.row + m, store_m), columns]
            mosaic_gpu.copy_smem_to_gmem(buffer, to)
            number += 1


def _affine_kernel(layer_ref, x_ref, words_ref, *refs, w: PackedLayout, config: HopperConfig, **scratch):
    *params, out_ref = refs
    mosaic_gpu.griddepcontrol_wait()  # launched before the kernel ahead has ended, whose results are read from here on
    warpgroup = lax.axis_index("warpgroup")
    program = Program(w, config, warpgroup, layer_ref[0], x_ref, words_ref, tuple(params), out_ref, scratch)
    lax.cond(warpgroup == config.warpgroups, lambda: _copy_tiles(program), lambda: _multiply_tiles(program))


def hopper_linear(
    x: jax.Array, w: PackedAffine, layer: jax.Array | int, config: HopperConfig, out_dtype: jnp.dtype
) -> jax.Array:
    """x [M, K] times layer `layer` -> partial sums [S, M, N] in float32, in out_dtype where S is 1.

    Rows and columns are padded to what TMA copies; programs see zeros past x and write nothing past the result.
    """
    M, c = x.shape[0], config
    padded_M, padded_N = pl.cdiv(M, LEAST_ROWS) * LEAST_ROWS, w.words.shape[2]
    params = [w.scale] + ([] if w.shift is None else [w.shift])
    dtype = jnp.dtype(out_dtype if c.num_partials == 1 else jnp.float32)
    num_tiles = pl.cdiv(padded_M, c.tile_m) * (padded_N // c.program_n) * c.num_partials
    cluster: dict[str, Any] = {"cluster": (c.splits,), "cluster_names": ("split",)} if c.cluster_size > 1 else {}
    out = mosaic_gpu.kernel(
        functools.partial(_affine_kernel, w=w.layout, config=c),
        out_type=jax.ShapeDtypeStruct((c.num_partials, padded_M, padded_N), dtype),
        scratch_types=scratch_of(c, w.layout, x.dtype, dtype, [param.dtype for param in params]),
        grid=(num_programs(num_tiles, c),),
        grid_names=("program",),
        **cluster,
        num_threads=c.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="affine_hopper",
        compiler_params=mosaic_gpu.CompilerParams(
            lowering_semantics=mosaic_gpu.LoweringSemantics.Warpgroup,
            unsafe_no_auto_barriers=True,  # warpgroups meet at the ring's barriers alone
        ),
    )(
        jnp.reshape(jnp.asarray(layer, jnp.int32), (1,)),
        jnp.pad(x, ((0, padded_M - M), (0, 0))),
        w.words,
        *params,
    )
    return out[:, :M, : w.N]
