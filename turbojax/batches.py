"""A step's plan as the padded host arrays that a compiled step takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from turbojax.buckets import StepShape
from turbojax.core import steps
from turbojax.core.state import NO_TOKEN, Copies, EngineState, Joins, Sampler
from turbojax.engine.plan import PageCopy, SlotJoin, StepPlan

JOINS_PER_CALL = 8
DIRTY_PAGES_PER_CALL = 32
COPIES_PER_CALL = 8


def padded(values: Sequence[int] | np.ndarray, size: int, fill: int) -> np.ndarray:
    """int32 [size]."""
    out = np.full(size, fill, np.int32)
    out[: len(values)] = values
    return out


@dataclass(frozen=True)
class Batches:
    """Makes the arrays for slots of one shape; rows that are not used name the sink slot, pages the sink page."""

    sink: int
    num_groups: int
    pages_per_slot: int
    num_stop_ids: int

    @classmethod
    def of(cls, state: EngineState) -> Batches:
        """For a state, or one without values."""
        num_rows, num_groups, pages_per_slot = state.slots.block_tables.shape
        return cls(num_rows - 1, num_groups, pages_per_slot, state.slots.stop_ids.shape[1])

    def decode(self, plan: StepPlan, shape: StepShape) -> steps.DecodeBatch | None:
        size = shape.num_decode_slots
        if size == 0:
            return None
        grants = np.zeros((size * self.num_groups, 4), np.int32)
        grants[:, 0] = self.sink
        for i, grant in enumerate(plan.page_grants):
            grants[i] = grant.slot, grant.group, grant.page_index, grant.page_id
        return steps.DecodeBatch(padded(plan.decode_slots, size, self.sink), grants)

    def prefill(self, plan: StepPlan, shape: StepShape) -> steps.PrefillBatch | None:
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

    def joins(self, joins: Sequence[SlotJoin]) -> Joins:
        """At most JOINS_PER_CALL of them."""
        stop_ids = np.full((JOINS_PER_CALL, self.num_stop_ids), NO_TOKEN, np.int32)
        tables = np.zeros((JOINS_PER_CALL, self.num_groups, self.pages_per_slot), np.int32)
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

    def dirty_pages(self, page_ids: Sequence[int]) -> np.ndarray:
        """At most DIRTY_PAGES_PER_CALL of them."""
        return padded(page_ids, DIRTY_PAGES_PER_CALL, 0)

    def copies(self, copies: Sequence[PageCopy]) -> Copies:
        """At most COPIES_PER_CALL of them."""
        columns = ([c.source_id for c in copies], [c.target_id for c in copies], [c.num_tokens for c in copies])
        return Copies(*(padded(column, COPIES_PER_CALL, 0) for column in columns))
