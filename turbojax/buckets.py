"""The fixed shapes that steps are compiled for: a step takes the smallest that holds it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


def powers_of_two(first: int, last: int) -> tuple[int, ...]:
    """first, 2 * first, ... and `last` itself."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return (*sizes, last)


def smallest_at_least(sizes: tuple[int, ...], count: int) -> int:
    """The bucket for `count` things.

    Raises:
        ValueError: it is larger than the largest bucket.
    """
    for size in sizes:
        if size >= count:
            return size
    raise ValueError(f"{count} exceeds the largest bucket of {sizes}")


@dataclass(frozen=True)
class StepShape:
    """The static shape of one step: B decode slots, R prefill tokens in C chunks, several steps per call.

    `table_len` is how many pages of its slots a pure decode step can see; None is all.
    """

    num_decode_slots: int = 0
    num_prefill_tokens: int = 0
    num_chunks: int = 0
    num_decode_steps: int = 1
    table_len: int | None = None


# Programs of an engine, with those that only move slots and pages (`NUM_OTHER_PROGRAMS`).
MAX_PROGRAMS = 40
NUM_OTHER_PROGRAMS = 3
# Chunks of a step; each costs a row of logits and a block table whether it is used or not.
MAX_CHUNKS = 8
# A decode step of more slots takes longer than the host needs for the next one: several steps a call gain nothing.
# Where decode steps come in two widths, fewer make room for the wide ones.
MAX_MULTI_STEP_SLOTS, MAX_MULTI_STEP_SLOTS_OF_TWO_WIDTHS = 64, 8
# Tokens of the sequences that narrow decode steps can hold. Attention cuts its work by the width of the tables: at
# 131,072 tokens 16 short sequences get ranges that are too long for them, and 256 start 32 programs for one that works.
NARROW_LEN = 32768
WIDE_DECODE_SLOTS = (1, 16, 64)


@dataclass(frozen=True)
class Buckets:
    """Every shape of step there is.

    Chunks come in two kinds of steps: one alone, since a long prompt should pay for one row of logits and one block
    table, or `max_chunks` beside decode slots. Several chunks without decode slots take the smallest of the latter.

    Attributes:
        decode_slots: sizes of a pure decode batch.
        prefill_tokens: sizes of the tokens of all chunks of a step together.
        max_chunks: chunks of a step that may hold several.
        mixed_decode_slots: sizes of the decode batch beside them (coarse, to keep programs few).
        num_decode_steps: tokens per call of a pure decode step of up to `max_multi_step_slots`, beside 1.
        narrow_table_len: pages that those steps see; None is all. Sequences of more decode one token a call, in
            batches of `wide_decode_slots`.
    """

    decode_slots: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    max_chunks: int
    mixed_decode_slots: tuple[int, ...]
    num_decode_steps: int
    max_multi_step_slots: int = MAX_MULTI_STEP_SLOTS
    narrow_table_len: int | None = None
    wide_decode_slots: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, *, max_batch_size: int, max_prefill_tokens: int, num_decode_steps: int, min_prefill_tokens: int = 32,
        max_len: int = 0, page_len: int = 1,
    ) -> Buckets:  # fmt: skip
        """Powers of two up to the limits, with fewer small sizes of prefill where that would be too many programs.

        Sequences of up to `max_len` tokens, in pages of `page_len`; 0 is whatever fits narrow tables.
        """
        has_widths = max_len > NARROW_LEN
        wide = (*(size for size in WIDE_DECODE_SLOTS if size < max_batch_size), max_batch_size)
        while True:
            buckets = cls(
                decode_slots=powers_of_two(1, max_batch_size),
                prefill_tokens=powers_of_two(min(min_prefill_tokens, max_prefill_tokens), max_prefill_tokens),
                max_chunks=min(MAX_CHUNKS, max_batch_size),
                mixed_decode_slots=(max_batch_size,) if max_batch_size <= 16 else (16, max_batch_size),
                num_decode_steps=num_decode_steps,
                max_multi_step_slots=MAX_MULTI_STEP_SLOTS_OF_TWO_WIDTHS if has_widths else MAX_MULTI_STEP_SLOTS,
                narrow_table_len=max(1, NARROW_LEN // page_len) if has_widths else None,
                wide_decode_slots=wide if has_widths else (),
            )
            if buckets.num_programs <= MAX_PROGRAMS or len(buckets.prefill_tokens) == 1:
                return buckets
            min_prefill_tokens *= 2

    @property
    def num_programs(self) -> int:
        """What an engine compiles."""
        return len(list(self.all_shapes())) + NUM_OTHER_PROGRAMS

    def shape_of(
        self, num_decode_slots: int, num_prefill_tokens: int, num_chunks: int, num_steps: int, num_pages: int = 0
    ) -> StepShape:
        """The smallest shape that holds a step; `num_pages` are the most of any decode slot."""
        if num_chunks == 0:
            if self.narrow_table_len is not None and num_pages > self.narrow_table_len:
                return StepShape(smallest_at_least(self.wide_decode_slots, num_decode_slots))
            size = smallest_at_least(self.decode_slots, num_decode_slots)
            return StepShape(size, num_decode_steps=num_steps, table_len=self.narrow_table_len)
        num_tokens = smallest_at_least(self.prefill_tokens, num_prefill_tokens)
        if num_decode_slots == 0 and num_chunks == 1:
            return StepShape(0, num_tokens, 1)
        return StepShape(smallest_at_least(self.mixed_decode_slots, num_decode_slots), num_tokens, self.max_chunks)

    def all_shapes(self) -> Iterator[StepShape]:
        """Every shape that `shape_of` can give."""
        narrow = self.narrow_table_len
        for size in self.decode_slots:
            yield StepShape(size, table_len=narrow)
            if self.num_decode_steps > 1 and size <= self.max_multi_step_slots:
                yield StepShape(size, num_decode_steps=self.num_decode_steps, table_len=narrow)
        for size in self.wide_decode_slots:
            yield StepShape(size)
        for num_tokens in self.prefill_tokens:
            yield StepShape(0, num_tokens, 1)
            if self.max_chunks > 1:
                for size in self.mixed_decode_slots:
                    yield StepShape(size, num_tokens, self.max_chunks)
