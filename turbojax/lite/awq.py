"""Activation-aware weight quantisation (arXiv 2306.00978): channels that matter are scaled up before rounding.

y = x @ W.T is also (x / s) @ (W * s).T for any factors s of the input channels. Those of large inputs are scaled up, so
that the grid rounds their weights relatively less, and 1 / s goes into whatever makes the input. Every trial is scored
by the error of the outputs over all calibration tokens, which the Gram matrix of the inputs gives without running them.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from turbojax.lite.folding import Heads, shared
from turbojax.lite.grid import Grid, snapped
from turbojax.lite.statistics import InputStats, gram_loss, runs

NUM_EXPONENTS = 20
# The ranges that clipping tries; half of a range is never the better one at 4 bits.
SHRINKS = tuple(1.0 - 0.05 * i for i in range(11))


def scale_trials(stats: InputStats, heads: Heads | None) -> np.ndarray:
    """Factors of the input channels [20, K]: mean |x| to the power of 0, 0.05 .. 0.95, centred on 1.

    Exponent 0 leaves the weights as they are, so that the best trial is never worse than plain rounding.
    """
    size = shared(stats.mean_abs, heads).astype(np.float64)
    size = np.maximum(size, 1e-4 * max(float(size.max()), 1e-12))
    trials = size[None] ** (np.arange(NUM_EXPONENTS) / NUM_EXPONENTS)[:, None]
    return (trials / np.sqrt(trials.max(1) * trials.min(1))[:, None]).astype(np.float32)


@functools.partial(jax.jit, static_argnames="grid")
def trial_losses(w: jax.Array, gram: jax.Array, trials: jax.Array, grid: Grid) -> jax.Array:
    """Output errors [S] of weights [N, K] rounded under each trial's factors [S, K]."""

    def loss(scale: jax.Array) -> jax.Array:
        return gram_loss(snapped(w * scale[None], grid) / scale[None] - w, gram)

    return lax.map(loss, trials)


def search_scale(w: np.ndarray, stats: InputStats, grid: Grid, heads: Heads | None) -> np.ndarray:
    """The best factors of the input channels [K] of weights [N, K], all linears of one input together.

    Args:
        w: the weights.
        stats: of their input.
        grid: that they are rounded to.
        heads: of the input, where several must have equal factors; see `folding.heads_of`.
    """
    trials, gram = scale_trials(stats, heads), jnp.asarray(stats.gram)
    parts = [trial_losses(jnp.asarray(w[rows]), gram, jnp.asarray(trials), grid) for rows in runs(len(w))]
    return trials[int(np.argmin(np.sum([np.asarray(part) for part in parts], axis=0)))]


def search_clip(w: np.ndarray, gram: np.ndarray, grid: Grid) -> np.ndarray:
    """The share of its range [N, G] that each group keeps: few large weights give way where the others gain more.

    Groups are scored alone. Where all of them together are no better for an output, it keeps its whole ranges.
    """
    whole, blocks = jnp.asarray(gram), jnp.asarray(diagonal_blocks(gram, grid.group_size))
    return np.concatenate([np.asarray(clip_rows(jnp.asarray(w[rows]), whole, blocks, grid)) for rows in runs(len(w))])


@functools.partial(jax.jit, static_argnames="grid")
def clip_rows(w: jax.Array, gram: jax.Array, blocks: jax.Array, grid: Grid) -> jax.Array:
    """`search_clip` for some outputs [R, K]: [R, G]."""
    shares = jnp.asarray(SHRINKS, w.dtype)
    losses = lax.map(lambda share: block_losses(snapped(w, grid, share) - w, blocks, grid), shares)
    best = shares[jnp.argmin(losses, axis=0)]

    def total(shrink: jax.Array) -> jax.Array:
        error = snapped(w, grid, shrink) - w
        return jnp.sum(jnp.matmul(error, gram, precision=lax.Precision.HIGHEST) * error, axis=1)

    kept = jnp.ones_like(best)
    return jnp.where((total(best) < total(kept))[:, None], best, kept)


def block_losses(error: jax.Array, blocks: jax.Array, grid: Grid) -> jax.Array:
    """What errors [N, K] of the weights do to the outputs, each group [N, G] alone.

    Args:
        error: of the weights.
        blocks: the Gram matrix's blocks on its diagonal [G, g, g]; 0 where the last group is filled up.
        grid: the groups.
    """
    padding = -error.shape[1] % grid.group_size
    groups = jnp.pad(error, ((0, 0), (0, padding))).reshape(error.shape[0], -1, grid.group_size)
    spread = jnp.einsum("ngk,gkl->ngl", groups, blocks, precision=lax.Precision.HIGHEST)
    return jnp.sum(spread * groups, axis=-1)


def diagonal_blocks(gram: np.ndarray, group_size: int) -> np.ndarray:
    """The blocks [G, g, g] on the diagonal of a Gram matrix."""
    padding = -len(gram) % group_size
    padded = np.pad(gram, ((0, padding), (0, padding)))
    starts = range(0, len(padded), group_size)
    return np.stack([padded[i : i + group_size, i : i + group_size] for i in starts])
