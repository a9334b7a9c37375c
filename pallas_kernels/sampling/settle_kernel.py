"""The second kernel: the row's draw from its chunks' draws, drawn again where truncation refuses it.

A token is kept by top-p if little enough mass lies above it, so one pass over the logits tells whether a draw was
allowed, and no threshold is searched. A refused draw is a bound for the next: whatever is kept lies above it. The noise
of a token never changes, so the first draw that is kept is the draw from the kept tokens alone. With top-p 0.9 one draw
in ten is refused. The pass judges those that would likely come next as well, so that rows seldom need another, and only
chunks whose draw might still win are drawn again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import backend
from pallas_kernels.sampling.tiles import LOWEST, Row, SampleConfig, call, tile_of, whole, winner
from pallas_kernels.sampling.top_k import bound_of_top_k

NUM_NEXT = 2  # draws judged ahead: three refused in a row are one row in thousands at top-p 0.9


class Draw(NamedTuple):
    """A token, its scaled logit and its score, or those of each chunk."""

    pick: jax.Array
    value: jax.Array
    score: jax.Array


class Check(NamedTuple):
    """A draw, and what is known of top-p's threshold: values up to `refused` are not kept, from `kept` on they are."""

    drawn: Draw
    refused: jax.Array
    kept: jax.Array


@dataclass(frozen=True)
class Settler:
    """A row whose draw is settled.

    Attributes:
        row: the logits.
        top: float32, the largest scaled logit.
        lowest_top: float32, the lowest of the chunks' largest.
        mass: float32, the sum of 2**(x - top).
        draws: the chunks' draws of the first kernel; scores of -inf behind the last chunk.
    """

    row: Row
    top: jax.Array
    lowest_top: jax.Array
    mass: jax.Array
    draws: Draw

    def masses_above(self, bounds: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """For each bound the sum of 2**(x - top) over x > bound; chunks below the first bound are not read."""

        def add(chunk: jax.Array, masses: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            x, _ = self.row.read(chunk)
            weights = self.row.exp2(x - self.top)
            return tuple(
                mass + jnp.sum(jnp.where(x > bound, weights, 0.0), axis=0)
                for mass, bound in zip(masses, bounds, strict=True)
            )

        lanes = (jnp.zeros(self.row.tile[1], jnp.float32),) * len(bounds)
        masses = self.row.fold(lambda chunk, _: self.row.of("top", chunk) > bounds[0], add, lanes)
        return tuple(whole(jnp.sum, mass) for mass in masses)

    def chain(self, value: jax.Array) -> tuple[jax.Array, ...]:
        """`value` and the likely values of the next draws if it, and then each of them, is refused; ascending."""
        values = [value]
        for _ in range(NUM_NEXT):
            scores = jnp.where(self.draws.value > values[-1], self.draws.score, -jnp.inf)
            score, _, following = winner(scores, self.draws.value, self.draws.pick)
            values.append(jnp.where(score > -jnp.inf, following, self.top))
        return tuple(values)

    def draw_above(self, bound: jax.Array) -> Draw:
        """The winner among the tokens above `bound` that min-p keeps."""
        floor = self.top + self.row.of("log2_min_p")
        kept = lambda x: (x > bound) & (x >= floor)  # noqa: E731

        def wanted(chunk: jax.Array, best: Draw) -> jax.Array:
            """Whether the chunk's own draw is not kept, another might be, and might win."""
            value, top, score = (self.row.of(name, chunk) for name in ("value", "top", "best"))
            return ~kept(value) & kept(top) & (score > best.score)

        def draw(chunk: jax.Array, best: Draw) -> Draw:
            x, index = self.row.read(chunk)
            score, pick, value = winner(jnp.where(kept(x), self.row.noisy(x, index), -jnp.inf), x, index)
            wins = score > best.score
            return Draw(*(jnp.where(wins, *pair) for pair in zip((pick, value, score), best, strict=True)))

        scores = jnp.where(kept(self.draws.value), self.draws.score, -jnp.inf)
        score, pick, value = winner(scores, self.draws.value, self.draws.pick)
        return self.row.fold(wanted, draw, Draw(pick, value, score))

    def settle(self) -> jax.Array:
        """The token drawn from what truncation keeps."""
        top_k, by_mass = self.row.of("top_k"), self.row.of("top_p") < 1.0
        by_rank = (top_k > 0) & (top_k < self.row.num_vocab)
        _, _, value = winner(self.draws.score, self.draws.value, self.draws.pick)
        no_bound = jnp.minimum(self.top, LOWEST)  # computed: a branch must not give a literal
        bound = lax.cond(
            by_rank,
            lambda: bound_of_top_k(self.row, top_k, self.top, self.lowest_top, value, by_mass),
            lambda: no_bound,
        )
        drawn = self.draw_above(bound)
        # The likeliest token is kept by any top-p, and needs no check. A min-p that keeps nothing ends it too.
        start = Check(drawn, bound, jnp.where(by_mass, self.top, drawn.value))
        unsettled = lambda at: (at.drawn.value < at.kept) & (at.drawn.score > -jnp.inf)  # noqa: E731
        return lax.while_loop(unsettled, lambda state: self.check(state, bound, by_rank), start).drawn.pick

    def check(self, state: Check, bound: jax.Array, by_rank: jax.Array) -> Check:
        """One pass: judges the draw by the mass above it, and draws again if it is refused.

        Args:
            state: with a draw that is not known to be kept.
            bound: float32, top-k keeps what is above; top-p is over the mass of these alone.
            by_rank: bool, whether top-k is on.
        """
        values = self.chain(state.drawn.value)
        kept_by_rank, *above = self.masses_above((jnp.where(by_rank, bound, values[0]), *values))
        need = self.row.of("top_p") * jnp.where(by_rank, kept_by_rank, self.mass)
        refused, kept = state.refused, state.kept
        for value, mass in zip(values, above, strict=True):
            is_refused = (mass >= need) & (value < self.top)  # not where NaN is in it: that ends the loop
            refused = jnp.where(is_refused, value, refused)
            kept = jnp.where(is_refused, kept, jnp.minimum(kept, value))
        drawn = lax.cond(state.drawn.value <= refused, lambda: self.draw_above(refused), lambda: state.drawn)
        return Check(drawn, refused, kept)


def settler_of(row: Row) -> Settler:
    """Reads the summaries of the row's chunks."""
    chunks = jnp.arange(pl.next_power_of_2(row.num_chunks), dtype=jnp.int32)
    real = chunks < row.num_chunks

    def summary(name: str, other: float) -> jax.Array:
        return backend.masked_load(row.refs[name].at[row.row, chunks], mask=real, other=other)

    tops = summary("top", LOWEST)
    top = whole(jnp.max, tops)
    lowest_top = whole(jnp.min, jnp.where(real, tops, jnp.inf))
    mass = whole(jnp.sum, summary("mass", 0.0) * row.exp2(tops - top))
    draws = Draw(summary("pick", 0), summary("value", -jnp.inf), summary("best", -jnp.inf))
    return Settler(row, top, lowest_top, mass, draws)


def settle_rows(inputs: dict[str, jax.Array], config: SampleConfig, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """The token of each row, int32 [M], and whether its logits are finite, bool [M].

    Args:
        inputs: those of `draw_chunks` with what it found, top_k, top_p, log2_min_p, is_truncated.
        config: how the work is cut.
        interpret: run the kernel in the interpreter.
    """
    num_rows, num_vocab = inputs["logits"].shape
    tile = tile_of(config.chunk_len, config.settle_warps)

    def kernel(refs: dict[str, Any]) -> None:
        row = Row(refs, pl.program_id(0), num_vocab, tile, interpret)
        settler = settler_of(row)
        _, pick, _ = winner(settler.draws.score, settler.draws.value, settler.draws.pick)
        pick = lax.cond(row.of("is_truncated") > 0, settler.settle, lambda: pick)
        refs["tokens"][row.row] = jnp.minimum(pick, num_vocab - 1)  # within the vocabulary whatever NaN does
        refs["finite"][row.row] = (settler.mass > 0).astype(jnp.int32)

    one = jax.ShapeDtypeStruct((num_rows,), jnp.int32)
    outputs = {"tokens": one, "finite": one}
    found = call(kernel, "sample_settle", (num_rows,), inputs, outputs, config.settle_warps, interpret)
    return found["tokens"], found["finite"] > 0
