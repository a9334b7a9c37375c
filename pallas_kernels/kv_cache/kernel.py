"""KV write in Pallas-Triton: rows of K and V are quantised in registers and stored into their pages, in place."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.kv_cache.pages import KVPages, Planes
from pallas_kernels.kv_cache.quantise import FLOAT16_MAX


@dataclass(frozen=True)
class WriteConfig:
    """Rows of a program, and its warps."""

    rows: int = 8
    num_warps: int = 1


@dataclass(frozen=True)
class Side(Planes):
    """K or V of some rows of one kv head: planes of head dims, padded to powers of two."""

    name: str

    @property
    def padded(self) -> int:
        return pl.next_power_of_2(self.width)

    def columns(self) -> jax.Array:
        """Head dims [planes * padded] of the padded planes; padding repeats its plane's last and moves no bound."""
        column = jnp.arange(self.planes * self.padded, dtype=jnp.int32)
        if self.padded == self.width:  # contiguous, which a clipped index would hide
            return column
        return column // self.padded * self.width + jnp.minimum(column % self.padded, self.width - 1)

    def quantise(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Words uint16 [rows, padded], scale and offset float16 [rows]; see `quantise.quantise` and `quantise.pack`."""
        x, levels = x.astype(jnp.float32), 2**self.bits - 1
        low, high = (jnp.clip(f(x, axis=1), -FLOAT16_MAX, FLOAT16_MAX) for f in (jnp.min, jnp.max))
        scale, offset = ((high - low) / levels).astype(jnp.float16), low.astype(jnp.float16)
        step = scale.astype(jnp.float32)
        step = jnp.where(step > 0, step, 1.0)  # a constant vector: codes 0, value = offset
        codes = jnp.clip((x - offset.astype(jnp.float32)[:, None]) * (1.0 / step)[:, None], 0.0, float(levels))
        # Adding 2**23 rounds to an integer and leaves it in the low bits: a conversion runs at a quarter of the rate.
        bits = lax.bitcast_convert_type(codes + 2.0**23, jnp.int32) & levels
        by_plane = bits.reshape(x.shape[0], self.planes, self.padded)
        shifts = self.bits * jnp.arange(self.planes, dtype=jnp.int32)
        words = jnp.sum(by_plane << shifts[None, :, None], axis=1)  # planes share no bit: their sum is their union
        return words.astype(jnp.uint16), scale, offset

    def store(self, refs: dict[str, Any], x: jax.Array, at: Place, head: jax.Array) -> None:
        """Writes x [rows, planes * padded], values at `columns()`, to the rows' places of the pages."""
        if self.bits != 16:
            x, *params = self.quantise(x)
            for row, values in enumerate(params):
                where = refs[f"out_{self.name}_params"].at[at.layer, at.pages, head, row, at.offsets]
                backend.masked_store(where, values, mask=at.valid)
        columns = jnp.arange(self.padded, dtype=jnp.int32)
        # Masked places keep columns of their own: the interpreter writes old values back there.
        index = jnp.broadcast_arrays(at.pages[:, None], at.offsets[:, None], columns[None, :])
        where = refs["out_" + self.name].at[at.layer, index[0], head, index[1], index[2]]
        mask = at.valid[:, None] & (columns < self.width)[None, :]
        backend.masked_store(where, x.astype(refs["out_" + self.name].dtype), mask=mask)


class Place(NamedTuple):
    """Where a program's rows go: int32 scalar layer, [rows] pages and offsets, and which rows are real."""

    layer: jax.Array
    pages: jax.Array
    offsets: jax.Array
    valid: jax.Array


def place_of(refs: dict[str, Any], rows: jax.Array, valid: jax.Array) -> Place:
    """Reads the rows' places."""
    pages, offsets = (
        backend.masked_load(refs[name].at[rows], mask=valid, other=0) for name in ("page_ids", "page_offsets")
    )
    return Place(refs["layer"][0], pages, offsets, valid)


def _kernel(*args: Any, names: tuple[str, ...], config: WriteConfig, num_rows: int, sides: tuple[Side, ...]) -> None:
    """One program: some rows of one kv head, K and V; all reads first, since stores might be to what is read."""
    refs = dict(zip(names, args, strict=True))
    head = pl.program_id(1)
    rows = pl.program_id(0) * config.rows + jnp.arange(config.rows, dtype=jnp.int32)
    valid, rows = rows < num_rows, jnp.minimum(rows, num_rows - 1)

    def read(side: Side) -> jax.Array:
        at = jnp.broadcast_arrays(rows[:, None], side.columns()[None, :])
        mask = jnp.broadcast_to(valid[:, None], at[0].shape)
        return backend.masked_load(refs["new_" + side.name].at[at[0], head, at[1]], mask=mask, other=0.0)

    found, place = [read(side) for side in sides], place_of(refs, rows, valid)
    for side, x in zip(sides, found, strict=True):
        side.store(refs, x, place, head)


def sides_of(pages: KVPages) -> tuple[Side, Side]:
    """How K and V are stored."""
    return Side(pages.k_bits, pages.head_dim, "k"), Side(pages.v_bits, pages.head_dim, "v")


def pools_of(pages: KVPages) -> dict[str, jax.Array]:
    """The arrays that a write changes, by name."""
    pools = {name: getattr(pages, name) for name in ("k", "v", "k_params", "v_params")}
    return {name: pool for name, pool in pools.items() if pool is not None}


def kernel_write(
    pages: KVPages, k: jax.Array, v: jax.Array, layer: jax.Array, page_ids: jax.Array, page_offsets: jax.Array,
    config: WriteConfig, interpret: bool,
) -> KVPages:  # fmt: skip
    """See `write_kv`."""
    num_rows = page_ids.shape[0]
    inputs = {"layer": layer.reshape(1), "page_ids": page_ids, "page_offsets": page_offsets, "new_k": k, "new_v": v}
    pools = pools_of(pages)
    names = (*inputs, *pools, *("out_" + name for name in pools))
    written = pl.pallas_call(
        functools.partial(_kernel, names=names, config=config, num_rows=num_rows, sides=sides_of(pages)),
        grid=(-(-num_rows // config.rows), pages.num_kv_heads),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pools.values()],
        input_output_aliases={len(inputs) + n: n for n in range(len(pools))},
        compiler_params=backend.compiler_params(config.num_warps, 1),
        interpret=interpret,
        name="kv_write",
    )(*inputs.values(), *pools.values())
    return replace(pages, **dict(zip(pools, written, strict=True)))
