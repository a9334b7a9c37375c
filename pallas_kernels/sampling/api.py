"""Sampling's public function: checks, and the choice between kernel and reference."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import backend
from pallas_kernels.sampling.draw_kernel import draw_chunks
from pallas_kernels.sampling.noise import LOG2_E
from pallas_kernels.sampling.reference import MIN_TEMPERATURE, reference_sample
from pallas_kernels.sampling.settle_kernel import settle_rows
from pallas_kernels.sampling.tiles import SampleConfig

MAX_LOGITS_BYTES = 2**31  # kernels count bytes in int32


class Samples(NamedTuple):
    """What was sampled, [M] each.

    Attributes:
        tokens: int32.
        finite: bool, False where a logit is NaN or +inf, or every one -inf: the token means nothing.
    """

    tokens: jax.Array
    finite: jax.Array


def sample_tokens(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    keys: jax.Array,
    forbidden_ids: jax.Array | None = None,
    *,
    implementation: backend.Implementation | None = None,
) -> Samples:
    """Draws one token a row from the softmax of logits / temperature, truncated by top-k, then top-p, then min-p.

    Ties at a threshold all stay in. A row's token depends on the row alone, whatever else is in the batch, and stays
    the same when logits move by rounding.

    Args:
        logits: float32 [M, V].
        temperature: float32 [M]; 0 takes the first largest logit.
        top_k: int32 [M], tokens kept; 0 and below is off.
        top_p: float32 [M], mass of the likeliest tokens kept, of the softmax over what top-k kept; 1 is off.
        min_p: float32 [M], keeps what is at least this likely relative to the likeliest; 0 is off.
        keys: uint32 [M, 2], the randomness of each row: equal keys draw equal noise.
        forbidden_ids: int32 [M, S], tokens that a row must not draw; negative where unused.
        implementation: None takes the kernel on a GPU and the reference elsewhere.

    Raises:
        ValueError: names the argument that does not fit.
    """
    _check(logits, temperature, top_k, top_p, min_p, keys, forbidden_ids)
    chosen = backend.choose("sample_tokens", implementation, _problem(logits))
    if chosen == "reference":
        return Samples(*reference_sample(logits, temperature, top_k, top_p, min_p, keys, forbidden_ids))
    settings = (logits, temperature, top_k, top_p, min_p, keys, forbidden_ids)
    return kernel_sample(*settings, SampleConfig(), chosen == "interpret")


def kernel_sample(
    logits: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array, keys: jax.Array,
    forbidden_ids: jax.Array | None, config: SampleConfig, interpret: bool,
) -> Samples:  # fmt: skip
    """See `sample_tokens`."""
    is_hot = temperature > 0
    inputs = {
        "logits": logits,
        "scale": jnp.where(is_hot, LOG2_E / jnp.maximum(temperature, MIN_TEMPERATURE), 1.0),
        "is_hot": is_hot.astype(jnp.int32),
        "keys": keys,
    }
    if forbidden_ids is not None:
        inputs["forbidden_ids"] = forbidden_ids
    truncation = {
        "top_k": top_k,
        "top_p": top_p,
        "log2_min_p": jnp.log2(min_p),
        "is_truncated": (is_hot & ((top_k > 0) | (top_p < 1.0) | (min_p > 0))).astype(jnp.int32),
    }
    chunks = draw_chunks(inputs, config, interpret)
    return Samples(*settle_rows(inputs | truncation | chunks, config, interpret))


def _problem(logits: jax.Array) -> str | None:
    if 4 * logits.size >= MAX_LOGITS_BYTES:
        return f"logits of {4 * logits.size} bytes, below {MAX_LOGITS_BYTES} accepted"
    return backend.capability_problem()


def _check(
    logits: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array,
    keys: jax.Array, forbidden_ids: jax.Array | None,
) -> None:  # fmt: skip
    if logits.ndim != 2 or logits.dtype != jnp.float32:
        raise ValueError(f"logits: {logits.dtype} {logits.shape}, accepted: float32 [M, V]")
    rows = logits.shape[0]
    expected = {
        "temperature": (temperature, jnp.float32, (rows,)),
        "top_k": (top_k, jnp.int32, (rows,)),
        "top_p": (top_p, jnp.float32, (rows,)),
        "min_p": (min_p, jnp.float32, (rows,)),
        "keys": (keys, jnp.uint32, (rows, 2)),
    }
    if forbidden_ids is not None:
        if forbidden_ids.ndim != 2:
            raise ValueError(f"forbidden_ids: {forbidden_ids.dtype} {forbidden_ids.shape}, accepted: int32 [M, S]")
        expected["forbidden_ids"] = (forbidden_ids, jnp.int32, (rows, forbidden_ids.shape[1]))
    for name, (array, dtype, shape) in expected.items():
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(f"{name}: {array.dtype} {array.shape}, accepted: {jnp.dtype(dtype)} {shape}")
