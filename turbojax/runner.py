"""The join of host and device: takes a StepPlan, runs the compiled pure step on padded arrays, brings tokens back."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from turbojax.batches import COPIES_PER_CALL, JOINS_PER_CALL
from turbojax.buckets import Buckets, PickShape, StepShape
from turbojax.core.split import PickBatch
from turbojax.core.state import NOT_FINITE, EngineState
from turbojax.core.weights import Weights
from turbojax.engine.plan import PageCopy, RowOutputs, SlotJoin, StepPlan, StepResult
from turbojax.errors import SlotError
from turbojax.executables import Executables
from turbojax.results import Outputs, SampledRow, Wish, joined, sampled_rows


@dataclass
class StepHandle:
    """A step under way.

    Attributes:
        plan, shape: what runs.
        is_plain: nothing but tokens is wanted, of logits as they are.
        num_before: rows of the step before those of its chunks.
        tokens: on the device, int32 [steps, B] of a fused step, blocks of [M] of a split one; empty before `pick`.
        wishes: what its slots want beside tokens.
        outputs: of the rows that were sampled, a block each, as far as somebody wants them.
        blocks: of the rows of chunks, by slot: outputs of so many rows, in order.
    """

    plan: StepPlan
    shape: StepShape
    is_plain: bool
    num_before: int
    tokens: list[jax.Array]
    wishes: dict[int, Wish] = field(default_factory=dict)
    outputs: list[Outputs] = field(default_factory=list)
    blocks: dict[int, list[tuple[Outputs, int]]] = field(default_factory=dict)

    @property
    def rows(self) -> list[SampledRow]:
        """Of a split step, one a slot."""
        return sampled_rows(self.plan.decode_slots, self.plan.prefill_chunks, self.num_before)


class JaxRunner:
    """Holds weights and state, and runs steps on them. The state is donated to each step and replaced by its result."""

    def __init__(self, executables: Executables, make_state: Callable[[], EngineState], *, debug: bool = False) -> None:
        """`make_state` makes the fresh state that the executables were compiled for; `debug` checks page numbers."""
        self._executables, self._make_state, self._debug = executables, make_state, debug
        self._batches = executables.batches
        # Waited for: memory that is not there would else show in the first step, under that step's name.
        self._state: EngineState | None = jax.block_until_ready(make_state())
        self._num_pages = self._state.pool.num_pages
        self._rich: dict[int, SlotJoin] = {}  # slots that are not plain
        self._masks: dict[int, jax.Array] = {}  # that allow everything, by number of rows
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
        """Starts the step; waits for the device only where logits of whole chunks are wanted, a block at a time.

        Raises:
            ValueError: several tokens a call of slots that are not plain.
        """
        if self._debug:
            self._check_pages(plan)
        self._change_pages(plan)
        self._join(plan.joins)
        is_plain = self._is_plain(plan)
        if plan.num_decode_steps > 1 and not is_plain:
            raise ValueError(f"{plan.num_decode_steps} tokens a call of slots {sorted(self._rich)}, accepted: 1")
        num_tokens = sum([len(chunk.token_ids) for chunk in plan.prefill_chunks])
        shape = self.buckets.shape_of(
            len(plan.decode_slots), num_tokens, len(plan.prefill_chunks), plan.num_decode_steps, plan.max_decode_pages,
            is_plain=is_plain,
        )  # fmt: skip
        num_before = len(plan.decode_slots) if self.buckets.tile_rows else shape.num_decode_slots
        tokens = self._run(plan, shape)
        if tokens is not None:
            tokens.copy_to_host_async()
            return StepHandle(plan, shape, is_plain, num_before, [tokens])
        handle = StepHandle(plan, shape, is_plain, num_before, [])
        rich = {row.slot: self._rich[row.slot] for row in handle.rows if row.counts and row.slot in self._rich}
        handle.wishes = {slot: Wish.of(join) for slot, join in rich.items()}
        self._read_chunks(handle)
        if not any(join.has_guide for join in rich.values()):
            self.pick(handle, {})
        return handle

    def pick(self, handle: StepHandle, masks: Mapping[int, np.ndarray]) -> None:
        """Starts the sampling of a split step.

        Raises:
            SlotError: a guided slot has no mask, or one of another size.
        """
        wish = functools.reduce(operator.or_, handle.wishes.values(), Wish())
        for rows in in_blocks(handle.rows, self.buckets.pick_rows[-1]):
            shape = self.buckets.pick_of(len(rows), is_plain=handle.is_plain)
            batch = self._batches.pick(rows, shape)
            if handle.is_plain:
                self._state, tokens = self._executables.pick(shape)(self.weights, self._state, batch)
            else:
                by_row = self._masks_of(rows, masks, shape.num_rows)
                tokens, outputs = self._pick_processed(shape, batch, by_row, (), wish)
                handle.outputs.append(outputs)
            tokens.copy_to_host_async()
            handle.tokens.append(tokens)

    def fetch(self, handle: StepHandle) -> StepResult:
        """Waits for the step's tokens."""
        assert handle.tokens, "a step with guides is picked before it is fetched"
        plan, blocks = handle.plan, [np.asarray(tokens) for tokens in handle.tokens]
        tokens = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        columns = tokens.T.tolist() if tokens.ndim == 2 else [[token] for token in tokens.tolist()]
        of_slot = dict(zip(plan.decode_slots, columns, strict=False))  # columns behind are padding, or chunks
        of_slot |= dict(zip([c.slot for c in plan.prefill_chunks], columns[len(plan.decode_slots) :], strict=False))
        if tokens.min() >= 0 and handle.is_plain:  # the usual step; padded rows hold NO_TOKEN
            return StepResult(plan.step_id, of_slot)
        not_finite = frozenset(slot for slot, column in of_slot.items() if NOT_FINITE in column)
        picked = {slot: [token for token in column if token >= 0] for slot, column in of_slot.items()}
        if handle.is_plain:
            return StepResult(plan.step_id, picked, not_finite)
        return StepResult(plan.step_id, picked, not_finite, *wanted_of(handle, picked))

    def reset(self) -> None:
        """Replaces the state, which a failed step has lost, and runs a step of padding on it."""
        # The old pool goes first: there is no room for two, and the error of a step that did not take it still has it.
        jax.tree.map(lambda leaf: leaf.delete(), self._state)
        self._state = None
        self._state = self._make_state()
        self._rich.clear()
        self._run(StepPlan(step_id=-1), next(self.buckets.all_shapes()))
        jax.block_until_ready(self._state)

    def close(self) -> None:
        """Nobody else runs its steps."""

    def warm_up(self) -> None:
        """Runs every program once on padding, which leaves the state as it is: a GPU loads programs when they run."""
        for shape in self.buckets.all_shapes():
            self._run(StepPlan(step_id=-1), shape)
        for pick in self.buckets.all_picks():
            batch, num = self._batches.pick((), pick), pick.num_rows
            if pick.is_plain:
                self._state, _ = self._executables.pick(pick)(self.weights, self._state, batch)
            else:
                self._pick_processed(pick, batch, self._all_allowed(num), (), Wish())
        self._state = self._executables.join(self._state, self._batches.joins(()))
        self._state = self._executables.join_rules(self._state, *self._batches.rules(()))
        self._state = self._executables.copy_pages(self._state, self._batches.copies(()))
        jax.block_until_ready(self._state)

    # -- steps --------------------------------------------------------------------------------------------

    def _change_pages(self, plan: StepPlan) -> None:
        """Zeroes dirty pages (copies of no tokens), then copies pages."""
        copies = [*(PageCopy(0, page, 0) for page in plan.dirty_pages), *plan.page_copies]
        for first in range(0, len(copies), COPIES_PER_CALL):
            batch = self._batches.copies(copies[first : first + COPIES_PER_CALL])
            self._state = self._executables.copy_pages(self._state, batch)

    def _join(self, joins: Sequence[SlotJoin]) -> None:
        for first in range(0, len(joins), JOINS_PER_CALL):
            batch = self._batches.joins(joins[first : first + JOINS_PER_CALL])
            self._state = self._executables.join(self._state, batch)
        for join in joins:
            self._rich.pop(join.slot, None)
        rich = {join.slot: join for join in joins if not join.is_plain}
        self._rich |= rich
        ruled = [join for join in rich.values() if not join.sampling.is_plain]
        for rules in self._batches.rules(ruled) if ruled else ():
            self._state = self._executables.join_rules(self._state, rules)

    def _is_plain(self, plan: StepPlan) -> bool:
        """Whether nothing but tokens is wanted of the step, of logits as they are."""
        if not all(chunk.is_plain for chunk in plan.prefill_chunks):
            return False
        named = (*plan.decode_slots, *(chunk.slot for chunk in plan.prefill_chunks))
        return not self._rich or self._rich.keys().isdisjoint(named)

    def _run(self, plan: StepPlan, shape: StepShape) -> Any:
        """Tokens of a fused step; None of a split one, whose rows then stand in the state."""
        program = self._executables.step(shape)
        if self.buckets.tile_rows is not None:
            for tile in self._batches.tiles(plan, shape):
                self._state = program(self.weights, self._state, tile)
            return None
        decode, prefill = self._batches.decode(plan, shape), self._batches.prefill(plan, shape)
        if shape.is_fused:
            self._state, tokens = program(self.weights, self._state, decode)
            return tokens
        inputs = (decode,) if prefill is None else (decode, prefill)
        self._state = program(self.weights, self._state, *inputs)
        return None

    def _read_chunks(self, handle: StepHandle) -> None:
        """Starts what is wanted of all rows of chunks, in blocks, whose memory is bounded."""
        start = handle.num_before
        for chunk in handle.plan.prefill_chunks:
            wish, num_rows = Wish.of(chunk), len(chunk.token_ids)
            known = np.append(chunk.token_ids[1:], chunk.next_token_id)
            for numbers in in_blocks(range(0 if wish.is_none else num_rows), self.buckets.pick_rows[-1]):
                shape = self.buckets.pick_of(len(numbers), is_plain=False)
                rows = [SampledRow(start + number, self._batches.sink, 0) for number in numbers]
                batch, masks = self._batches.pick(rows, shape), self._all_allowed(shape.num_rows)
                _, outputs = self._pick_processed(shape, batch, masks, known[numbers], wish)
                handle.blocks.setdefault(chunk.slot, []).append((outputs.with_logits_on_host(), len(numbers)))
            start += num_rows

    def _pick_processed(
        self, shape: PickShape, batch: PickBatch, masks: Any, targets: Sequence[int] | np.ndarray, wish: Wish
    ) -> tuple[jax.Array, Outputs]:
        wanted = self._batches.targets(targets, shape.num_rows)
        program = self._executables.pick(shape)
        self._state, tokens, outputs = program(self.weights, self._state, batch, masks, wanted)
        return tokens, Outputs.start(outputs, wish)

    def _masks_of(self, rows: Sequence[SampledRow], masks: Mapping[int, np.ndarray], num_rows: int) -> Any:
        """Bit masks by row; those of guided slots are given, others allow every token."""
        guided = [row.slot for row in rows if row.counts and row.slot in self._rich and self._rich[row.slot].has_guide]
        if not guided:
            return self._all_allowed(num_rows)
        shape = (self._all_allowed(num_rows).shape[1],)
        for slot in guided:
            mask = masks.get(slot)
            if mask is None or mask.shape != shape or mask.dtype != np.uint32:
                came = "none" if mask is None else f"{mask.dtype} {mask.shape}"
                raise SlotError(slot, f"mask of slot {slot}: {came}, accepted: uint32 {shape}")
        numbers = {row.slot: number for number, row in enumerate(rows)}
        return self._batches.masks({numbers[slot]: masks[slot] for slot in guided}, num_rows)

    def _all_allowed(self, num_rows: int) -> jax.Array:
        """Masks that allow every token, on the device: most steps bring none."""
        if num_rows not in self._masks:
            masks = self._batches.masks({}, num_rows)
            self._masks[num_rows] = jax.device_put(masks, self._executables.placement.whole)
        return self._masks[num_rows]

    def _check_pages(self, plan: StepPlan) -> None:
        """Page numbers that the kernels would read unchecked.

        Raises:
            SlotError: a page is the sink, or lies outside the pool.
        """
        given = [(join.slot, page) for join in plan.joins for group in join.page_ids for page in group]
        for slot, page in (*given, *((grant.slot, grant.page_id) for grant in plan.page_grants)):
            if not 0 < page < self._num_pages:
                raise SlotError(slot, f"page {page} of slot {slot}, accepted: 1 .. {self._num_pages - 1}")


def in_blocks(rows: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """At most so many at a time."""
    return (rows[first : first + size] for first in range(0, len(rows), size))


def wanted_of(handle: StepHandle, tokens: dict[int, list[int]]) -> tuple[dict[int, RowOutputs], dict[int, RowOutputs]]:
    """What was wanted beside the tokens of a step, and of the rows of its chunks, by slot; waits for the device."""
    block_len = handle.tokens[0].shape[0]
    outputs, prompt_outputs = {}, {}
    for number, row in enumerate(handle.rows):
        wish = handle.wishes.get(row.slot, Wish())
        if not wish.is_none and tokens[row.slot]:
            outputs[row.slot] = handle.outputs[number // block_len].rows([number % block_len], wish)
    for chunk in handle.plan.prefill_chunks:
        if chunk.slot in handle.blocks:
            parts = [block.rows(range(num), Wish.of(chunk)) for block, num in handle.blocks[chunk.slot]]
            num_known = len(chunk.token_ids) - (chunk.next_token_id < 0)
            prompt_outputs[chunk.slot] = joined(parts, num_logprobs=num_known)
    return outputs, prompt_outputs
