"""A step's plan as the padded host arrays that a compiled step takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from turbojax.buckets import PickShape, StepShape
from turbojax.core import steps
from turbojax.core.logits import COUNT_LIMIT, IN_PROMPT, UNUSED, RuleJoins
from turbojax.core.split import PickBatch, TileBatch
from turbojax.core.state import NO_TOKEN, Copies, EngineState, Joins, Sampler
from turbojax.engine.plan import PageCopy, SlotJoin, StepPlan

JOINS_PER_CALL = 8
COPIES_PER_CALL = 8
SEEN_PER_CALL = 4096  # different tokens of sequences that are counted anew
ALL_ALLOWED = 0xFFFFFFFF


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
    num_vocab: int = 0
    num_biased_tokens: int = 0
    num_processor_params: int = 0
    processors: tuple[str, ...] = ()

    @classmethod
    def of(cls, state: EngineState, processors: tuple[str, ...] = ()) -> Batches:
        """For a state, or one without values, and the names of the logits processors in order."""
        num_rows, num_groups, pages_per_slot = state.slots.block_tables.shape
        sizes = num_rows - 1, num_groups, pages_per_slot, state.slots.stop_ids.shape[1]
        rules = state.slots.rules
        if rules is None:
            return cls(*sizes)
        limits = rules.counts.shape[1], rules.bias.shape[1], rules.processor_params.shape[1]
        return cls(*sizes, *limits, processors)

    def decode(self, plan: StepPlan, shape: StepShape) -> steps.DecodeBatch | None:
        size = shape.num_decode_slots
        if size == 0:
            return None
        return steps.DecodeBatch(padded(plan.decode_slots, size, self.sink), self._grants(plan, size))

    def _grants(self, plan: StepPlan, num_slots: int) -> np.ndarray:
        grants = np.zeros((num_slots * self.num_groups, 4), np.int32)
        grants[:, 0] = self.sink
        for i, grant in enumerate(plan.page_grants):
            grants[i] = grant.slot, grant.group, grant.page_index, grant.page_id
        return grants

    def tiles(self, plan: StepPlan, shape: StepShape) -> Iterator[TileBatch]:
        """All rows of a step in tiles, decoding slots first; one of padding where there are none."""
        chunks, size = plan.prefill_chunks, shape.num_decode_slots
        lens = [len(chunk.token_ids) for chunk in chunks]
        slots = np.concatenate([plan.decode_slots, np.repeat([chunk.slot for chunk in chunks], lens)])
        newest = np.full(len(plan.decode_slots), UNUSED)
        tokens = np.concatenate([newest, *(chunk.token_ids for chunk in chunks)])
        positions = np.concatenate([newest, *(c.num_history_tokens + np.arange(len(c.token_ids)) for c in chunks)])
        grants = self._grants(plan, self.sink)
        for first in range(0, max(1, len(slots)), size):
            part = slice(first, first + size)
            yield TileBatch(
                padded(slots[part], size, self.sink), padded(tokens[part], size, UNUSED),
                padded(positions[part], size, UNUSED), grants, np.int32(first),
            )  # fmt: skip

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

    def rules(self, joins: Sequence[SlotJoin]) -> Iterator[RuleJoins]:
        """What calls take, one after the other: the rules of slots, then tokens to count behind the last of them."""
        seen = np.concatenate([np.zeros((0, 3), np.int32), *(seen_by(join) for join in joins)])
        groups = [joins[first : first + JOINS_PER_CALL] for first in range(0, len(joins), JOINS_PER_CALL)] or [()]
        for group in groups[:-1]:
            yield self._rules_of(group, seen[:0])
        for first in range(0, max(1, len(seen)), SEEN_PER_CALL):
            yield self._rules_of(() if first else groups[-1], seen[first : first + SEEN_PER_CALL])

    def _rules_of(self, joins: Sequence[SlotJoin], seen: np.ndarray) -> RuleJoins:
        size = JOINS_PER_CALL
        penalties = np.tile(np.array([1, 0, 0], np.float32), (size, 1))
        biased_ids = np.full((size, self.num_biased_tokens), UNUSED, np.int32)
        bias = np.zeros((size, self.num_biased_tokens), np.float32)
        processor, params = np.full(size, UNUSED, np.int32), np.zeros((size, self.num_processor_params), np.float32)
        for row, sampling in enumerate([join.sampling for join in joins]):
            penalties[row] = sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty
            values = dict(sampling.logit_bias) | dict.fromkeys(sampling.bad_token_ids, -np.inf)
            biased_ids[row, : len(values)], bias[row, : len(values)] = list(values), list(values.values())
            if sampling.processor is not None:
                processor[row] = self.processors.index(sampling.processor)
                flat = [np.asarray(values, np.float32).reshape(-1) for values in sampling.processor_params]
                given = np.concatenate([np.zeros(0, np.float32), *flat])
                params[row, : len(given)] = given
        nowhere = np.full((SEEN_PER_CALL, 3), self.sink + 1, np.int32)
        nowhere[: len(seen)] = seen
        slots = padded([join.slot for join in joins], size, self.sink)
        repetition, presence, frequency = penalties.T.copy()
        return RuleJoins(slots, repetition, presence, frequency, biased_ids, bias, processor, params, nowhere)

    def pick(self, rows: Sequence[tuple[int, int, int, bool]], shape: PickShape) -> PickBatch:
        """Of `SampledRow`s."""
        size, columns = shape.num_rows, list(zip(*rows, strict=True)) or [()] * 4
        is_last = np.zeros(size, bool)
        is_last[: len(rows)] = columns[3]
        return PickBatch(
            padded(columns[0], size, 0), padded(columns[1], size, self.sink), padded(columns[2], size, 0), is_last
        )

    def masks(self, masks: Mapping[int, np.ndarray], num_rows: int) -> np.ndarray:
        """uint32 [M, ceil(V / 32)], bit masks by row; whoever has none may sample every token."""
        out = np.full((num_rows, -(-self.num_vocab // 32)), ALL_ALLOWED, np.uint32)
        for row, mask in masks.items():
            out[row] = mask
        return out

    def targets(self, token_ids: Sequence[int] | np.ndarray, num_rows: int) -> np.ndarray:
        """int32 [M], see `pick_processed`."""
        return padded(token_ids, num_rows, UNUSED)

    def copies(self, copies: Sequence[PageCopy]) -> Copies:
        """At most COPIES_PER_CALL of them."""
        columns = ([c.source_id for c in copies], [c.target_id for c in copies], [c.num_tokens for c in copies])
        return Copies(*(padded(column, COPIES_PER_CALL, 0) for column in columns))


def seen_by(join: SlotJoin) -> np.ndarray:
    """int32 [T, 3] of (slot, token, count) of a sequence so far, see `LogitRules.counts`; empty where nobody asks."""
    if not join.sampling.counts_tokens:
        return np.zeros((0, 3), np.int32)
    assert join.prompt_ids is not None
    assert join.output_ids is not None
    ids, times = np.unique(join.output_ids, return_counts=True)
    counts = dict(zip(ids.tolist(), np.minimum(times, COUNT_LIMIT).tolist(), strict=True))
    for token in np.unique(join.prompt_ids).tolist():
        counts[token] = counts.get(token, 0) | IN_PROMPT
    return np.array([(join.slot, token, count) for token, count in counts.items()], np.int32).reshape(-1, 3)
