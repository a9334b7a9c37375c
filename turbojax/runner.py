"""The join of host and device: takes a StepPlan, runs the compiled pure step on padded arrays, brings tokens back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from turbojax.batches import COPIES_PER_CALL, DIRTY_PAGES_PER_CALL, JOINS_PER_CALL
from turbojax.buckets import Buckets, StepShape
from turbojax.core.state import NOT_FINITE, EngineState
from turbojax.core.weights import Weights
from turbojax.engine.plan import StepPlan, StepResult
from turbojax.errors import SlotError
from turbojax.executables import Executables


@dataclass(frozen=True)
class StepHandle:
    """A step under way: its plan, and its tokens on the device (int32 [steps, B] or [B + C])."""

    plan: StepPlan
    shape: StepShape
    tokens: jax.Array


class JaxRunner:
    """Holds weights and state, and runs steps on them. The state is donated to each step and replaced by its result."""

    def __init__(self, executables: Executables, make_state: Callable[[], EngineState], *, debug: bool = False) -> None:
        """`make_state` makes the fresh state that the executables were compiled for; `debug` checks page numbers."""
        self._executables, self._make_state, self._debug = executables, make_state, debug
        self._batches = executables.batches
        # Waited for: memory that is not there would else show in the first step, under that step's name.
        self._state: EngineState | None = jax.block_until_ready(make_state())
        self._num_pages = self._state.pool.num_pages
        self.max_prefill_chunks = self.buckets.max_chunks

    @property
    def weights(self) -> Weights:
        return self._executables.weights

    @property
    def buckets(self) -> Buckets:
        return self._executables.buckets

    @property
    def num_traces(self) -> int:
        """Stands still once every bucket is compiled."""
        return self._executables.metrics.num_traces

    # -- the Runner protocol ------------------------------------------------------------------------------

    def dispatch(self, plan: StepPlan) -> StepHandle:
        """Starts the step; never waits for the device."""
        if self._debug:
            self._check_pages(plan)
        for first in range(0, len(plan.dirty_pages), DIRTY_PAGES_PER_CALL):
            page_ids = plan.dirty_pages[first : first + DIRTY_PAGES_PER_CALL]
            self._state = self._executables.zero_pages(self._state, self._batches.dirty_pages(page_ids))
        for first in range(0, len(plan.page_copies), COPIES_PER_CALL):
            copies = self._batches.copies(plan.page_copies[first : first + COPIES_PER_CALL])
            self._state = self._executables.copy_pages(self._state, copies)
        for first in range(0, len(plan.joins), JOINS_PER_CALL):
            joins = self._batches.joins(plan.joins[first : first + JOINS_PER_CALL])
            self._state = self._executables.join(self._state, joins)
        num_tokens = sum([len(chunk.token_ids) for chunk in plan.prefill_chunks])
        num_decode, num_chunks = len(plan.decode_slots), len(plan.prefill_chunks)
        shape = self.buckets.shape_of(num_decode, num_tokens, num_chunks, plan.num_decode_steps, plan.max_decode_pages)
        tokens = self._run(plan, shape)
        tokens.copy_to_host_async()
        return StepHandle(plan, shape, tokens)

    def pick(self, handle: StepHandle, masks: Mapping[int, np.ndarray]) -> None:
        """Samples a step that waits for masks; there are none yet."""
        raise NotImplementedError("no step waits for masks")

    def fetch(self, handle: StepHandle) -> StepResult:
        """Waits for the step's tokens."""
        plan, tokens = handle.plan, np.asarray(handle.tokens)
        columns = tokens.T.tolist() if tokens.ndim == 2 else [[token] for token in tokens.tolist()]
        of_slot = dict(zip(plan.decode_slots, columns, strict=False))  # columns behind are padding, or chunks
        of_slot |= dict(
            zip([c.slot for c in plan.prefill_chunks], columns[handle.shape.num_decode_slots :], strict=False)
        )
        if tokens.min() >= 0:  # the usual step; padded rows hold NO_TOKEN
            return StepResult(plan.step_id, of_slot)
        not_finite = frozenset(slot for slot, column in of_slot.items() if NOT_FINITE in column)
        picked = {slot: [token for token in column if token >= 0] for slot, column in of_slot.items()}
        return StepResult(plan.step_id, picked, not_finite)

    def reset(self) -> None:
        """Replaces the state, which a failed step has lost, and runs a step of padding on it."""
        # The old pool goes first: there is no room for two, and the error of a step that did not take it still has it.
        jax.tree.map(lambda leaf: leaf.delete(), self._state)
        self._state = None
        self._state = self._make_state()
        self._run(StepPlan(step_id=-1), next(self.buckets.all_shapes())).block_until_ready()

    def warm_up(self) -> None:
        """Runs every program once on padding, which leaves the state as it is: a GPU loads programs when they run."""
        for shape in self.buckets.all_shapes():
            self._run(StepPlan(step_id=-1), shape)
        self._state = self._executables.join(self._state, self._batches.joins(()))
        self._state = self._executables.zero_pages(self._state, self._batches.dirty_pages(()))
        self._state = self._executables.copy_pages(self._state, self._batches.copies(()))
        jax.block_until_ready(self._state)

    # -- steps --------------------------------------------------------------------------------------------

    def _run(self, plan: StepPlan, shape: StepShape) -> Any:
        decode, prefill = self._batches.decode(plan, shape), self._batches.prefill(plan, shape)
        program = self._executables.step(shape)
        inputs = (decode,) if prefill is None else (decode, prefill)
        self._state, tokens = program(self.weights, self._state, *inputs)
        return tokens

    def _check_pages(self, plan: StepPlan) -> None:
        """Page numbers that the kernels would read unchecked.

        Raises:
            SlotError: a page is the sink, or lies outside the pool.
        """
        given = [(join.slot, page) for join in plan.joins for group in join.page_ids for page in group]
        for slot, page in (*given, *((grant.slot, grant.page_id) for grant in plan.page_grants)):
            if not 0 < page < self._num_pages:
                raise SlotError(slot, f"page {page} of slot {slot}, accepted: 1 .. {self._num_pages - 1}")
