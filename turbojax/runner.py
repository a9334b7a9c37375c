"""The join of host and device: turns a StepPlan into bucketed arrays, runs the jitted pure step, brings tokens back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from turbojax.buckets import Buckets, StepShape
from turbojax.core import steps
from turbojax.core.state import NO_TOKEN, EngineState, Joins, Sampler, join
from turbojax.core.weights import Weights
from turbojax.engine.plan import SlotJoin, StepPlan, StepResult

JOINS_PER_CALL = 8


@dataclass(frozen=True)
class StepHandle:
    """A step under way: its plan, and its tokens on the device (int32 [steps, B] or [B + C])."""

    plan: StepPlan
    shape: StepShape
    tokens: jax.Array


def padded(values: Sequence[int], size: int, fill: int) -> np.ndarray:
    """int32 [size]."""
    out = np.full(size, fill, np.int32)
    out[: len(values)] = values
    return out


class JaxRunner:
    """Holds weights and state, and runs steps on them. The state is donated to each step and replaced by its result."""

    def __init__(self, weights: Weights, state: EngineState, buckets: Buckets) -> None:
        self.weights, self.buckets = weights, buckets
        self._state = state
        self.sink = state.slots.length.shape[0] - 1
        self.max_prefill_chunks = buckets.chunks[-1]
        self.num_traces = 0
        self._join = jax.jit(self._counted(join), donate_argnames="state")
        self._decode = jax.jit(self._counted(steps.decode), static_argnames="num_steps", donate_argnames="state")
        self._mixed = jax.jit(self._counted(steps.mixed), donate_argnames="state")

    def _counted(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Counts traces: `num_traces` stands still once every bucket is warm."""

        @functools.wraps(step)
        def traced(*args: Any, **kwargs: Any) -> Any:
            self.num_traces += 1
            return step(*args, **kwargs)

        return traced

    # -- the Runner protocol ------------------------------------------------------------------------------

    def dispatch(self, plan: StepPlan) -> StepHandle:
        """Starts the step; never waits for the device."""
        for first in range(0, len(plan.joins), JOINS_PER_CALL):
            self._state = self._join(self._state, self._joins(plan.joins[first : first + JOINS_PER_CALL]))
        num_tokens = sum(len(chunk.token_ids) for chunk in plan.prefill_chunks)
        shape = self.buckets.shape_of(
            len(plan.decode_slots), num_tokens, len(plan.prefill_chunks), plan.num_decode_steps
        )
        tokens = self._run(shape, self._decode_batch(plan, shape), self._prefill_batch(plan, shape))
        tokens.copy_to_host_async()
        return StepHandle(plan, shape, tokens)

    def fetch(self, handle: StepHandle) -> StepResult:
        """Waits for the step's tokens."""
        plan, tokens = handle.plan, np.asarray(handle.tokens)
        tokens = tokens[None] if tokens.ndim == 1 else tokens
        num_decode = handle.shape.num_decode_slots
        columns = {slot: i for i, slot in enumerate(plan.decode_slots)}
        columns |= {c.slot: num_decode + i for i, c in enumerate(plan.prefill_chunks) if c.is_last}
        picked = {slot: tokens[:, column] for slot, column in columns.items()}
        return StepResult(plan.step_id, {slot: t[t != NO_TOKEN].tolist() for slot, t in picked.items()})

    # -- warm-up ------------------------------------------------------------------------------------------

    def warm_up(self, progress: Callable[[StepShape], None] | None = None) -> None:
        """Compiles every bucket by running it on nothing: all rows are padding, so the state stays as it is."""
        self._state = self._join(self._state, self._joins(()))
        for shape in self.buckets.all_shapes():
            empty = StepPlan(step_id=-1)
            self._run(shape, self._decode_batch(empty, shape), self._prefill_batch(empty, shape))
            if progress is not None:
                progress(shape)

    # -- host arrays --------------------------------------------------------------------------------------

    def _run(self, shape: StepShape, decode: steps.DecodeBatch | None, prefill: steps.PrefillBatch | None) -> jax.Array:
        if prefill is None:
            self._state, tokens = self._decode(self.weights, self._state, decode, num_steps=shape.num_decode_steps)
        else:
            self._state, tokens = self._mixed(self.weights, self._state, decode, prefill)
        return tokens

    def _decode_batch(self, plan: StepPlan, shape: StepShape) -> steps.DecodeBatch | None:
        size = shape.num_decode_slots
        if size == 0:
            return None
        num_groups = self._state.slots.block_tables.shape[1]
        grants = np.zeros((size * num_groups, 4), np.int32)
        grants[:, 0] = self.sink
        for i, grant in enumerate(plan.page_grants):
            grants[i] = grant.slot, grant.group, grant.page_index, grant.page_id
        return steps.DecodeBatch(padded(plan.decode_slots, size, self.sink), grants)

    def _prefill_batch(self, plan: StepPlan, shape: StepShape) -> steps.PrefillBatch | None:
        if shape.num_chunks == 0:
            return None
        chunks = plan.prefill_chunks
        lens = [len(chunk.token_ids) for chunk in chunks]
        starts = np.full(shape.num_chunks + 1, sum(lens), np.int32)
        starts[: len(lens) + 1] = np.cumsum([0, *lens])
        flat = np.concatenate([chunk.token_ids for chunk in chunks]) if chunks else np.zeros(0, np.int32)
        is_last = np.zeros(shape.num_chunks, bool)
        is_last[: len(chunks)] = [chunk.is_last for chunk in chunks]
        return steps.PrefillBatch(
            tokens=padded(flat, shape.num_prefill_tokens, 0),
            starts=starts,
            slots=padded([chunk.slot for chunk in chunks], shape.num_chunks, self.sink),
            history_lens=padded([chunk.num_history_tokens for chunk in chunks], shape.num_chunks, 0),
            is_last=is_last,
        )

    def _joins(self, joins: Sequence[SlotJoin]) -> Joins:
        slots = self._state.slots
        _, num_groups, pages_per_slot = slots.block_tables.shape
        stop_ids = np.full((JOINS_PER_CALL, slots.stop_ids.shape[1]), NO_TOKEN, np.int32)
        tables = np.zeros((JOINS_PER_CALL, num_groups, pages_per_slot), np.int32)
        for row, item in enumerate(joins):
            stop_ids[row, : len(item.stop_token_ids)] = item.stop_token_ids
            for group, page_ids in enumerate(item.page_ids):
                tables[row, group, : len(page_ids)] = page_ids

        def column(values: Sequence[float], fill: float, dtype: type) -> np.ndarray:
            out: np.ndarray = np.full(JOINS_PER_CALL, fill, dtype)
            out[: len(values)] = values
            return out

        sampling = [item.sampling for item in joins]
        return Joins(
            slot=column([item.slot for item in joins], self.sink, np.int32),
            max_len=column([item.max_len for item in joins], 0, np.int32),
            min_len=column([item.min_len for item in joins], 0, np.int32),
            stop_ids=stop_ids,
            admitted_len=column([item.admitted_len for item in joins], 0, np.int32),
            block_tables=tables,
            sampler=Sampler(
                temperature=column([s.temperature for s in sampling], 0, np.float32),
                top_k=column([s.top_k for s in sampling], 0, np.int32),
                top_p=column([s.top_p for s in sampling], 1, np.float32),
                min_p=column([s.min_p for s in sampling], 0, np.float32),
                seed=column([s.seed for s in sampling], 0, np.uint32),
                sample_index=column([s.sample_index for s in sampling], 0, np.int32),
            ),
        )
