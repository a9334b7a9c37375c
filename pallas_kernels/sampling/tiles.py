"""One row's logits as kernels see them: tiles in registers, scaled to base 2, padding at -inf."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.sampling.noise import gumbel

LOWEST = -3.4028235e38  # the least finite value: differences to it are no NaN
NO_INDEX = 2**31 - 1
PER_LOAD = 4  # float32 that a thread reads at once


@dataclass(frozen=True)
class SampleConfig:
    """How the work is cut.

    Attributes:
        chunk_len: tokens of a chunk, a power of two. Sums round by it, so it must not depend on the batch.
        draw_warps: warps of a program that draws from one chunk.
        settle_warps: warps of a program that settles one row.
    """

    chunk_len: int = 8192
    draw_warps: int = 16
    settle_warps: int = 16


@dataclass(frozen=True)
class Row:
    """A row of logits within a program.

    Attributes:
        refs: all arrays by name, `[M, ...]` each.
        row: int32 scalar.
        num_vocab: V.
        tile: shape of a chunk in registers: steps of lanes. Reductions over steps stay within a thread.
        interpret: the interpreter has no inline assembly.
    """

    refs: dict[str, Any]
    row: jax.Array
    num_vocab: int
    tile: tuple[int, int]
    interpret: bool

    @property
    def chunk_len(self) -> int:
        return self.tile[0] * self.tile[1]

    @property
    def num_chunks(self) -> int:
        return -(-self.num_vocab // self.chunk_len)

    def of(self, name: str, column: int | jax.Array | None = None) -> jax.Array:
        """The row's own parameter, or one of several."""
        return self.refs[name][self.row] if column is None else self.refs[name][self.row, column]

    def fold(
        self, wanted: Callable[[jax.Array, Any], jax.Array], body: Callable[[jax.Array, Any], Any], carry: Any
    ) -> Any:
        """Folds `body(chunk, carry)` over the chunks that `wanted(chunk, carry)`."""

        def step(chunk: jax.Array, carry: Any) -> Any:
            return lax.cond(wanted(chunk, carry), lambda: body(chunk, carry), lambda: carry)

        return lax.fori_loop(0, self.num_chunks, step, carry)

    def read(self, chunk: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Scaled logits and token numbers of a chunk, [tile]."""
        steps, lanes = (jnp.arange(n, dtype=jnp.int32) for n in self.tile)
        index = chunk * self.chunk_len + (steps[:, None] * self.tile[1] + lanes[None, :])
        x = backend.masked_load(self.refs["logits"].at[self.row, index], mask=index < self.num_vocab, other=-jnp.inf)
        return x * self.of("scale"), index

    def noisy(self, x: jax.Array, index: jax.Array) -> jax.Array:
        """x with its noise: the largest is the draw."""
        log2 = jnp.log2 if self.interpret else lambda x: backend.approximate("lg2", x)
        return x + gumbel(self.of("keys", 0), self.of("keys", 1), index, log2)

    def exp2(self, x: jax.Array) -> jax.Array:
        return jnp.exp2(x) if self.interpret else backend.approximate("ex2", x)


def whole(reduce: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
    """A scalar of a tile, within threads first, or of a vector."""
    while x.ndim:
        x = reduce(x, axis=0)
    return x


def winner(score: jax.Array, x: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The largest score, the first index that has it, and x there; NO_INDEX where every score is NaN."""
    best = whole(jnp.max, score)
    pick = whole(jnp.min, jnp.where(score == best, index, NO_INDEX))
    return best, pick, whole(jnp.max, jnp.where(index == pick, x, -jnp.inf))


def tile_of(chunk_len: int, num_warps: int) -> tuple[int, int]:
    """See `Row`."""
    lanes = min(32 * num_warps * PER_LOAD, chunk_len)
    return chunk_len // lanes, lanes


def call(
    kernel: Callable[[dict[str, Any]], None], name: str, grid: tuple[int, ...], inputs: dict[str, jax.Array],
    outputs: dict[str, jax.ShapeDtypeStruct], num_warps: int, interpret: bool, in_place: dict[str, str] | None = None,
) -> dict[str, jax.Array]:  # fmt: skip
    """pallas_call of a kernel that takes its refs by name; `in_place` names the outputs that are inputs."""
    given, made = list(inputs), list(outputs)

    def by_name(*refs: Any) -> None:
        kernel(dict(zip((*given, *made), refs, strict=True)))

    found = pl.pallas_call(
        by_name,
        grid=grid,
        out_shape=list(outputs.values()),
        input_output_aliases={given.index(a): made.index(b) for a, b in (in_place or {}).items()},
        compiler_params=backend.compiler_params(num_warps, 1),
        interpret=interpret,
        name=name,
    )(*inputs.values())
    return dict(zip(outputs, found, strict=True))
