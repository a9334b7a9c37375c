"""The engine's decode steps in one bare loop on the device: what they take with no scheduler around them."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_cache import KVPages
from turbojax.bench.kernels import KernelTimes, profile_kernels
from turbojax.configs import GenerationConfig
from turbojax.core import steps
from turbojax.core.state import EngineState, KVPool, init_pool, init_sampler, init_slots
from turbojax.core.weights import Weights
from turbojax.models.random_model import fill_layers
from turbojax.models.spec import ModelSpec
from turbojax.request_builder import sampling_of

STEPS_PER_CALL = 16


@dataclass(frozen=True)
class LoopResult:
    """Seconds of a step, the length of each sequence midway, and the kernels of a step where they were asked for."""

    step_s: float
    length: float
    kernels: KernelTimes | None


def time_loop(
    weights: Weights, batch: int, context: int, sampling: GenerationConfig, *, num_steps: int, page_len: int,
    profile: bool = False,
) -> LoopResult:  # fmt: skip
    """Times decode steps of sequences of `context` random keys, several steps a call.

    Args:
        weights: the model.
        batch, context: sequences, and tokens of each.
        sampling: how tokens are picked.
        num_steps: steps to time, rounded up to whole calls.
        page_len: tokens of a page.
        profile: sums the kernels of one more call.

    Raises:
        BenchError: the profiler saw no GPU.
    """
    num_calls = -(-num_steps // STEPS_PER_CALL)
    num_new = STEPS_PER_CALL * (num_calls + 3)
    state = decoding_state(weights.spec, batch, context, num_new, page_len, sampling)
    sink = np.array([[batch, 0, 0, 0]], np.int32)  # no new pages
    rows = steps.DecodeBatch(jnp.arange(batch, dtype=jnp.int32), jnp.asarray(sink))
    decode = jax.jit(steps.decode, static_argnames="num_steps", donate_argnames="state")

    def call(times: int) -> None:
        nonlocal state
        for _ in range(times):
            state, _ = decode(weights, state, rows, num_steps=STEPS_PER_CALL)
        jax.block_until_ready(state.slots.length)

    call(2)
    start = time.perf_counter()
    call(num_calls)
    seconds = time.perf_counter() - start
    kernels = profile_kernels(lambda: call(1)) if profile else None
    length = context + STEPS_PER_CALL * (2 + num_calls / 2)
    return LoopResult(seconds / num_calls / STEPS_PER_CALL, length, kernels and per_step(kernels))


def per_step(kernels: KernelTimes) -> KernelTimes:
    """The kernels of one step of a call."""
    seconds = {name: total / STEPS_PER_CALL for name, total in kernels.seconds.items()}
    return KernelTimes(seconds, kernels.counts)


def decoding_state(
    spec: ModelSpec, batch: int, context: int, num_new: int, page_len: int, sampling: GenerationConfig
) -> EngineState:
    """A state in which every slot decodes behind `context` random keys, with pages for `num_new` more."""
    pages_per_slot = -(-(context + num_new) // page_len)
    max_len = pages_per_slot * page_len
    pool = jax.eval_shape(lambda: init_pool(spec, batch * pages_per_slot + 1, page_len))
    slots, pages = init_slots(batch, pages_per_slot), np.zeros((batch + 1, 1, pages_per_slot), np.int32)
    params = sampling_of(sampling)
    fill = lambda like, value: jnp.full(like.shape, value, like.dtype)  # noqa: E731
    sampler = init_sampler(batch + 1)
    sampler = replace(
        sampler,
        temperature=fill(sampler.temperature, params.temperature),
        top_k=fill(sampler.top_k, params.top_k),
        top_p=fill(sampler.top_p, params.top_p),
        min_p=fill(sampler.min_p, params.min_p),
        seed=jnp.arange(batch + 1, dtype=jnp.uint32),
    )
    pages[:batch, 0] = np.arange(1, batch * pages_per_slot + 1).reshape(batch, -1)
    slots = replace(
        slots,
        length=fill(slots.length, context),
        active=fill(slots.active, True),
        max_len=fill(slots.max_len, max_len),
        admitted_len=fill(slots.admitted_len, context),
        block_tables=jnp.asarray(pages),
        sampler=sampler,
    )
    return EngineState(KVPool(tuple(random_pages(p) for p in pool.segments)), slots)


def random_pages(pages: KVPages) -> KVPages:
    """Random numbers of -1 .. 1 for abstract pages."""
    key = jax.random.key(0, impl="rbg")
    filled: dict[str, Any] = {}
    for i, (side, bits) in enumerate((("k", pages.k_bits), ("v", pages.v_bits))):
        values = getattr(pages, side)
        filled[side] = fill_layers(jax.random.fold_in(key, i), values, -1, 1)
        params = getattr(pages, f"{side}_params")
        if params is not None:
            scale_and_offset = np.array([2 / (2**bits - 1), -1], np.float16)
            filled[f"{side}_params"] = jnp.broadcast_to(scale_and_offset[:, None], params.shape)
    return replace(pages, **filled)
