"""What both attention kernels do with refs: find their piece of a ragged batch, read tiles of keys and values."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.kv_cache.pages import KVPages, Planes
from pallas_kernels.paged_attention.unpack import dequantise_plane

LOG2_E = 1.4426950408889634
MINUS_INF = -1e30  # finite, so that the difference of two of them is 0 and not NaN


def ceil_div(a: Any, b: int) -> Any:
    return (a + b - 1) // b


def load_vector(ref: Any, start: int, size: int) -> jax.Array:
    """int32 ref[start : start + size], padded with zeros to a power of two."""
    index = jnp.arange(pl.next_power_of_2(size), dtype=jnp.int32)
    return backend.masked_load(ref.at[start + jnp.minimum(index, size - 1)], mask=index < size, other=0)


def pick(values: jax.Array, index: jax.Array) -> jax.Array:
    """values[index] of a small int32 vector that lives in registers; 0 where the index is past its end."""
    return jnp.sum(jnp.where(jnp.arange(values.shape[0], dtype=jnp.int32) == index, values, 0))


def locate(
    item: jax.Array, counts: jax.Array, sizes: jax.Array | None = None, num_sizes: int = 1
) -> tuple[jax.Array, jax.Array]:
    """The work list, all rows' last items at its end; each program finds its own, so that no list is built before.

    Args:
        item: int32 scalar, below the sum of the counts.
        counts: int32 [rows], items of each row.
        sizes: int32 [rows], size class of each row's last item, 0 .. num_sizes - 1: larger classes go first.
        num_sizes: classes.

    Returns:
        The item's row and its number within the row.
    """
    early, last = jnp.maximum(counts - 1, 0), jnp.minimum(counts, 1)
    ends = lax.cumsum(early, axis=0)
    done, early_row = jnp.max(ends), jnp.sum((ends <= item).astype(jnp.int32))
    is_early, number = item < done, item - pick(ends - early, early_row)
    row = early_row
    for size in reversed(range(num_sizes)):
        of_size = last if sizes is None else jnp.where(sizes == size, last, 0)
        ends = done + lax.cumsum(of_size, axis=0)
        row = jnp.where(item >= done, jnp.sum((ends <= item).astype(jnp.int32)), row)
        done = jnp.max(ends)
    return row, jnp.where(is_early, number, pick(early, row))


class ScoreFunction(NamedTuple):
    """softcap * tanh(scale * q.k / softcap), or scale * q.k without a cap; a row sees its last `window` keys."""

    scale: float
    window: int | None
    softcap: float | None

    @property
    def factor(self) -> float:
        """What q.k is multiplied by before `finish`."""
        return self.scale * LOG2_E if self.softcap is None else self.scale / self.softcap

    def finish(self, raw: jax.Array) -> jax.Array:
        """Scores times log2(e), from q.k times `factor`."""
        return raw if self.softcap is None else self.softcap * LOG2_E * jnp.tanh(raw)

    @property
    def unit(self) -> float:
        """What `bend` leaves to multiply, positive: exp2(x * unit - top) is one fused multiply-add and one exp2."""
        return self.scale * LOG2_E if self.softcap is None else self.softcap * LOG2_E

    def bend(self, raw: jax.Array) -> jax.Array:
        """Scores times log2(e) / unit, from q.k."""
        return raw if self.softcap is None else jnp.tanh(raw * (self.scale / self.softcap))

    def lowest_key(self, position: jax.Array) -> jax.Array:
        """The first key that a row at this position sees."""
        return jnp.zeros_like(position) if self.window is None else jnp.maximum(position - self.window + 1, 0)


@dataclass(frozen=True)
class Side(Planes):
    """K or V as a kernel sees it: planes of head dims, read a page at a time."""

    page_len: int

    @property
    def padded(self) -> int:
        """Columns of a tile: a power of two, and at least the 16 that a dot takes."""
        return max(16, pl.next_power_of_2(self.width))

    def columns(self, plane: int) -> tuple[jax.Array, jax.Array]:
        """Head dims [padded] of a plane, clipped into the array, and which of them are real."""
        column = jnp.arange(self.padded, dtype=jnp.int32)
        # Without padding there is nothing to clip, and a clipped index hides that it is contiguous.
        clipped = column if self.padded == self.width else jnp.minimum(column, self.width - 1)
        return plane * self.width + clipped, column < self.width

    def tile(self, ref: Any, layer: jax.Array, page: jax.Array, head: jax.Array) -> jax.Array:
        """[page_len, padded] stored words (or 16-bit values) of a page; zeros in the padding."""
        if self.padded == self.width:
            return ref[layer, page, head]
        tokens = jnp.arange(self.page_len, dtype=jnp.int32)
        columns, real = self.columns(0)
        at = jnp.broadcast_arrays(tokens[:, None], columns[None, :])
        mask = jnp.broadcast_to(real[None, :], at[0].shape)
        return backend.masked_load(ref.at[layer, page, head, at[0], at[1]], mask=mask, other=0)

    def tile_transposed(self, ref: Any, layer: jax.Array, page: jax.Array, head: jax.Array) -> jax.Array:
        """[padded, page_len]: the transpose of `tile`, read so; a transpose after the load would not be pipelined."""
        tokens = jnp.arange(self.page_len, dtype=jnp.int32)
        columns, real = self.columns(0)
        at = jnp.broadcast_arrays(columns[:, None], tokens[None, :])
        where = ref.at[layer, page, head, at[1], at[0]]
        if self.padded == self.width:
            return backend.masked_load(where)
        return backend.masked_load(where, mask=jnp.broadcast_to(real[:, None], at[0].shape), other=0)

    def params(self, ref: Any, layer: jax.Array, page: jax.Array, head: jax.Array) -> tuple[jax.Array, jax.Array]:
        """float16 scale and offset [page_len]."""
        return ref[layer, page, head, 0], ref[layer, page, head, 1]


def read_block(
    side: Side, name: str, refs: dict[str, Any], pages: tuple[jax.Array, ...], head: jax.Array, interpret: bool
) -> list[jax.Array]:
    """Values [len(pages) * page_len, padded] of each plane, float16 where they were quantised; one load for all pages.

    Args:
        side: K or V.
        name: "k" or "v", its pages in `refs`; its parameters are "k_params" or "v_params".
        refs: refs by name, with "layer".
        pages: page ids, one behind the other.
        head: kv head.
        interpret: see `dequantise_plane`.
    """
    layer, key = refs["layer"][0], jnp.arange(len(pages) * side.page_len, dtype=jnp.int32)
    page = jnp.broadcast_to(pages[0], key.shape)
    for n, later in enumerate(pages[1:], 1):
        page = jnp.where(key >= n * side.page_len, later, page)
    token = key % side.page_len
    columns, real = side.columns(0)
    at = jnp.broadcast_arrays(page[:, None], token[:, None], columns[None, :])
    where = refs[name].at[layer, at[0], head, at[1], at[2]]
    masked: Any = (
        {} if side.padded == side.width else {"mask": jnp.broadcast_to(real[None, :], at[0].shape), "other": 0}
    )
    stored = backend.masked_load(where, **masked)
    if side.bits == 16:
        return [stored]
    params = (refs[name + "_params"][layer, page, head, n, token] for n in (0, 1))
    scale, offset = (jnp.broadcast_to(x[:, None], stored.shape) for x in params)
    unpack = functools.partial(dequantise_plane, stored, scale, offset, bits=side.bits, interpret=interpret)
    return [unpack(plane=j) for j in range(side.planes)]


def sides(pages: KVPages) -> tuple[Side, Side]:
    """K and V."""
    k, v = (Side(bits, pages.head_dim, pages.page_len) for bits in (pages.k_bits, pages.v_bits))
    return k, v


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int], acc: jax.Array) -> jax.Array:
    """acc + a . b over one axis of each, in float32."""
    axes = (((contract[0],), (contract[1],)), ((), ()))
    return acc + lax.dot_general(a, b, axes, preferred_element_type=jnp.float32)


def exp2(x: jax.Array, interpret: bool) -> jax.Array:
    """2**x of float32."""
    return jnp.exp2(x) if interpret else backend.approximate("ex2", x)


def call_kernel(
    kernel: Any, name: str, grid: tuple[int, ...], inputs: dict[str, jax.Array | None],
    outputs: dict[str, jax.ShapeDtypeStruct], *, num_warps: int, num_stages: int, interpret: bool,
) -> dict[str, jax.Array]:  # fmt: skip
    """pallas_call with refs by name: `kernel(*refs, names=...)`; inputs that are None are left out."""
    given = {key: x for key, x in inputs.items() if x is not None}
    found = pl.pallas_call(
        functools.partial(kernel, names=(*given, *outputs)),
        grid=grid,
        out_shape=list(outputs.values()),
        compiler_params=backend.compiler_params(num_warps, num_stages),
        interpret=interpret,
        name=name,
    )(*given.values())
    return dict(zip(outputs, found, strict=True))
