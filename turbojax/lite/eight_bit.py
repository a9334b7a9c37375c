"""Weights in eight bits whose inputs are rounded too; SmoothQuant (arXiv 2211.10438) shares what is hard about it.

Inputs are rounded by token as they come, so a channel that is large in all tokens leaves the others few steps. Factors
s divide the input channels and multiply the weights: s = max|x|**a / max|w|**(1 - a), and a is searched by input.
"""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from checkpoints import EightBitTensor
from checkpoints.eight_bit import BLOCK, blocks_of, eight_bit_tensor
from turbojax.lite.folding import Heads, shared
from turbojax.lite.statistics import InputStats

EightBits = Literal["int8", "float8_e4m3fn"]
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
NUM_ALPHAS = 20


def rounded_channels(w: np.ndarray, dtype: EightBits) -> EightBitTensor:
    """Weights [N, K] in codes with a scale for each output."""
    scale = np.maximum(np.abs(w).max(1, keepdims=True), np.float32(1e-12)) / np.float32(LARGEST[dtype])
    return EightBitTensor(codes_of(w / scale, dtype), scale.astype(np.float32))


def rounded_blocks(w: np.ndarray) -> EightBitTensor:
    """Weights [N, K] in e4m3 with a scale for each block of 128 x 128."""
    num_rows, num_columns = blocks_of((w.shape[0], w.shape[1]))
    padded = np.pad(w, ((0, num_rows * BLOCK - w.shape[0]), (0, num_columns * BLOCK - w.shape[1])))
    largest = np.abs(padded).reshape(num_rows, BLOCK, num_columns, BLOCK).max((1, 3))
    scale = np.maximum(largest, 1e-12).astype(np.float32) / np.float32(LARGEST["float8_e4m3fn"])
    spread = scale.repeat(BLOCK, 0).repeat(BLOCK, 1)[: w.shape[0], : w.shape[1]]
    return eight_bit_tensor(codes_of(w / spread, "float8_e4m3fn"), scale)


def codes_of(x: np.ndarray, dtype: EightBits) -> np.ndarray:
    """The nearest codes of numbers that their range holds."""
    if dtype == "int8":
        return np.clip(np.rint(x), -127, 127).astype(np.int8)
    return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn)


def smoothing_trials(w: np.ndarray, stats: InputStats, heads: Heads | None) -> np.ndarray:
    """Factors of the input channels [21, K]: none, then a = 0 .. 0.95, centred on 1."""
    inputs = np.maximum(shared(stats.max_abs, heads), 1e-5).astype(np.float64)
    weights = np.maximum(shared(np.abs(w).max(0), heads), 1e-5).astype(np.float64)
    alphas = np.arange(NUM_ALPHAS)[:, None] / NUM_ALPHAS
    trials = inputs[None] ** alphas / weights[None] ** (1 - alphas)
    trials /= np.exp(np.log(trials).mean(1, keepdims=True))
    return np.concatenate([np.ones((1, w.shape[1])), np.clip(trials, 1e-4, 1e4)]).astype(np.float32)


@functools.partial(jax.jit, static_argnames="dtype")
def smoothing_losses(w: jax.Array, x: jax.Array, trials: jax.Array, dtype: EightBits) -> jax.Array:
    """Squared errors [S] of the outputs of tokens x [R, K], both sides rounded by row under each trial's factors."""

    def rounded(rows: jax.Array) -> jax.Array:
        scale = jnp.maximum(jnp.max(jnp.abs(rows), axis=1, keepdims=True), 1e-12) / LARGEST[dtype]
        codes = rows / scale
        if dtype == "int8":
            return jnp.round(codes) * scale
        codes = lax.optimization_barrier(codes.astype(jnp.float8_e4m3fn))  # else XLA skips the rounding
        return codes.astype(jnp.float32) * scale

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.matmul(x, w.T, precision=lax.Precision.HIGHEST)

    right = product(x, w)
    return lax.map(lambda s: jnp.sum((product(rounded(x / s[None]), rounded(w * s[None])) - right) ** 2), trials)


def search_smoothing(w: np.ndarray, stats: InputStats, dtype: EightBits, heads: Heads | None) -> np.ndarray:
    """The best factors of the input channels [K] of weights [N, K], all linears of one input together."""
    trials = smoothing_trials(w, stats, heads)
    losses = smoothing_losses(jnp.asarray(w), jnp.asarray(stats.rows), jnp.asarray(trials), dtype)
    return trials[int(np.argmin(np.asarray(losses)))]
