"""The fixed shapes that programs are compiled for: a step takes the smallest that holds it."""

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
    """The static shape of a step's forward pass: B decode slots, R prefill tokens in C chunks.

    Steps with chunks are split: they leave hidden states, and `PickShape` is the rest. So are decode steps where
    `is_split`; others sample too, several steps a call perhaps, and see `table_len` pages of their slots; None is all.
    """

    num_decode_slots: int = 0
    num_prefill_tokens: int = 0
    num_chunks: int = 0
    num_decode_steps: int = 1
    table_len: int | None = None
    is_split: bool = False

    @property
    def num_rows(self) -> int:
        """Of its forward pass."""
        return self.num_decode_slots + self.num_prefill_tokens

    @property
    def is_fused(self) -> bool:
        """Forward pass and sampling in one program."""
        return not (self.num_chunks or self.is_split)


@dataclass(frozen=True)
class PickShape:
    """The static shape of sampling behind a split step: so many rows, their logits as they are or processed."""

    num_rows: int
    is_plain: bool = True


# Programs of an engine, with those that only move slots, rules and pages (`NUM_OTHER_PROGRAMS`).
MAX_PROGRAMS = 40
NUM_OTHER_PROGRAMS = 3
# Chunks of a step; each costs a block table whether it is used or not.
MAX_CHUNKS = 8
# Sizes of calls of several decode steps. Larger steps take longer than the host needs for the next one, so that several
# a call gain nothing, and up to 16 rows cost a GPU the same.
MULTI_STEP_SLOTS = (1, 4, 16, 64)
# Where decode steps come in two widths, fewer make room for the wide ones.
MULTI_STEP_SLOTS_OF_TWO_WIDTHS = (1, 4, 8)
# Tokens of the sequences that narrow decode steps can hold. Attention cuts its work by the width of the tables: at
# 131,072 tokens 16 short sequences get ranges that are too long for them, and 256 start 32 programs for one that works.
NARROW_LEN = 32768
# Decode slots beside chunks where there are few; with this many times as many tokens, all slots cost little more.
FEW_SLOTS, FEW_SLOTS_FACTOR = 16, 8


@dataclass(frozen=True)
class Buckets:
    """Every shape of program there is.

    Chunks come in two kinds of steps: one alone, since a long prompt should pay for one block table, or `max_chunks`
    beside decode slots. Several chunks without decode slots take the smallest of the latter.

    Attributes:
        decode_slots: sizes of a fused decode step of one token a call.
        multi_step_slots: sizes of one of `num_decode_steps` tokens a call.
        narrow_table_len: pages that both see; None is all. Sequences of more decode in split steps.
        split_decode_slots: sizes of a split decode step.
        prefill_tokens: sizes of the tokens of all chunks of a step together.
        max_chunks: chunks of a step that may hold several.
        mixed: (decode slots, prefill tokens) of such steps.
        pick_rows: sizes of sampling behind split steps.
        num_decode_steps: tokens a call, beside 1.
        tile_rows: rows of the one program that every step runs, as often as it takes; None where steps have shapes.
    """

    decode_slots: tuple[int, ...]
    multi_step_slots: tuple[int, ...]
    narrow_table_len: int | None
    split_decode_slots: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    max_chunks: int
    mixed: tuple[tuple[int, int], ...]
    pick_rows: tuple[int, ...]
    num_decode_steps: int
    tile_rows: int | None = None

    @classmethod
    def of_tiles(cls, *, max_batch_size: int, max_prefill_tokens: int, tile_rows: int) -> Buckets:
        """One program for all rows, and one that samples, in tiles of so many rows."""
        return cls(
            decode_slots=(), multi_step_slots=(), narrow_table_len=None, split_decode_slots=(max_batch_size,),
            prefill_tokens=(max_prefill_tokens,), max_chunks=min(MAX_CHUNKS, max_batch_size), mixed=(),
            pick_rows=(tile_rows,), num_decode_steps=1, tile_rows=tile_rows,
        )  # fmt: skip

    @classmethod
    def of(
        cls, *, max_batch_size: int, max_prefill_tokens: int, num_decode_steps: int, min_prefill_tokens: int = 32,
        max_len: int = 0, page_len: int = 1, split_slots: tuple[int, ...] = (1, 8), pick_rows: tuple[int, ...] = (1, 8),
    ) -> Buckets:  # fmt: skip
        """Powers of two up to the limits, with fewer small sizes of prefill where that would be too many programs.

        Args:
            max_batch_size, max_prefill_tokens, num_decode_steps: limits of a step.
            min_prefill_tokens: the smallest size of a prefill.
            max_len, page_len: most tokens of a sequence, and of a page; 0 is whatever fits narrow tables.
            split_slots, pick_rows: sizes of split decode steps and of sampling, beside the largest.
        """
        has_widths = max_len > NARROW_LEN
        multi = MULTI_STEP_SLOTS_OF_TWO_WIDTHS if has_widths else MULTI_STEP_SLOTS
        up_to_all = lambda sizes: (*(n for n in sizes if n < max_batch_size), max_batch_size)  # noqa: E731
        multi = tuple(n for n in up_to_all(multi) if n <= multi[-1])
        while True:
            prefill_tokens = powers_of_two(min(min_prefill_tokens, max_prefill_tokens), max_prefill_tokens)
            buckets = cls(
                decode_slots=powers_of_two(1, max_batch_size),
                multi_step_slots=multi if num_decode_steps > 1 else (),
                narrow_table_len=max(1, NARROW_LEN // page_len) if has_widths else None,
                split_decode_slots=up_to_all(split_slots),
                prefill_tokens=prefill_tokens,
                max_chunks=min(MAX_CHUNKS, max_batch_size),
                mixed=mixed_shapes(max_batch_size, prefill_tokens, page_len) if max_batch_size > 1 else (),
                pick_rows=up_to_all(pick_rows),
                num_decode_steps=num_decode_steps,
            )
            if buckets.num_programs <= MAX_PROGRAMS or len(prefill_tokens) == 1:
                return buckets
            min_prefill_tokens *= 2

    @property
    def num_programs(self) -> int:
        """What an engine compiles."""
        return len(list(self.all_shapes())) + len(list(self.all_picks())) + NUM_OTHER_PROGRAMS

    @property
    def max_rows(self) -> int:
        """Most rows of a split step."""
        if self.tile_rows is not None:
            num_rows = self.split_decode_slots[-1] + self.prefill_tokens[-1]
            return -(-num_rows // self.tile_rows) * self.tile_rows
        return max(shape.num_rows for shape in self.all_shapes() if not shape.is_fused)

    def shape_of(
        self, num_decode_slots: int, num_prefill_tokens: int, num_chunks: int, num_steps: int, num_pages: int = 0,
        *, is_plain: bool = True,
    ) -> StepShape:  # fmt: skip
        """The smallest shape that holds a step.

        Args:
            num_decode_slots, num_prefill_tokens, num_chunks, num_steps: of the step.
            num_pages: the most of any decode slot.
            is_plain: nothing but tokens is wanted, of logits as they are.
        """
        if self.tile_rows is not None:
            return StepShape(self.tile_rows, is_split=True)
        if num_chunks == 0:
            is_wide = self.narrow_table_len is not None and num_pages > self.narrow_table_len
            if is_wide or not is_plain:
                return StepShape(smallest_at_least(self.split_decode_slots, num_decode_slots), is_split=True)
            sizes = self.decode_slots if num_steps == 1 else self.multi_step_slots
            size = smallest_at_least(sizes, num_decode_slots)
            return StepShape(size, num_decode_steps=num_steps, table_len=self.narrow_table_len)
        if num_decode_slots == 0 and num_chunks == 1:
            return StepShape(0, smallest_at_least(self.prefill_tokens, num_prefill_tokens), 1)
        for slots, tokens in self.mixed:
            if slots >= num_decode_slots and tokens >= num_prefill_tokens:
                return StepShape(slots, tokens, self.max_chunks)
        raise ValueError(f"{num_decode_slots} slots, {num_prefill_tokens} tokens exceed the largest of {self.mixed}")

    def pick_of(self, num_rows: int, *, is_plain: bool) -> PickShape:
        """The smallest that samples so many rows."""
        return PickShape(smallest_at_least(self.pick_rows, num_rows), is_plain)

    def all_shapes(self) -> Iterator[StepShape]:
        """Every shape that `shape_of` can give."""
        if self.tile_rows is not None:
            yield StepShape(self.tile_rows, is_split=True)
            return
        narrow = self.narrow_table_len
        for size in self.decode_slots:
            yield StepShape(size, table_len=narrow)
        for size in self.multi_step_slots:
            yield StepShape(size, num_decode_steps=self.num_decode_steps, table_len=narrow)
        for size in self.split_decode_slots:
            yield StepShape(size, is_split=True)
        for num_tokens in self.prefill_tokens:
            yield StepShape(0, num_tokens, 1)
        for size, num_tokens in self.mixed:
            yield StepShape(size, num_tokens, self.max_chunks)

    def all_picks(self) -> Iterator[PickShape]:
        """Every shape that `pick_of` can give."""
        for size in self.pick_rows:
            yield PickShape(size)
            yield PickShape(size, is_plain=False)


def mixed_shapes(
    max_batch_size: int, prefill_tokens: tuple[int, ...], page_len: int = 1
) -> tuple[tuple[int, int], ...]:
    """(decode slots, tokens) of steps of several chunks, fewest rows first; coarse, to keep programs few.

    All slots come with no fewer tokens than slots, a few slots with few tokens. Together they are the rows of a size of
    prefill, which fill the tiles of kernels: 64 rows beside 512 cost linears 40 % more than 512 rows. What slots leave
    of a page stays empty, since chunks end at page edges. Slots come on top of sizes that they would take more than
    half of, or of which they would leave less than a page.
    """

    def beside(slots: int, size: int) -> tuple[int, int]:
        left = (size - slots) // page_len * page_len
        return slots, left if left >= max(slots, page_len) else size

    has_few, limit = max_batch_size > FEW_SLOTS, FEW_SLOTS_FACTOR * max_batch_size
    few = [(FEW_SLOTS, n) for n in prefill_tokens if has_few and n < limit]
    least = max_batch_size if few else 0
    every = [(max_batch_size, n) for n in prefill_tokens if n >= least or n == prefill_tokens[-1]]
    return tuple(sorted({beside(slots, n) for slots, n in (*few, *every)}, key=lambda shape: (sum(shape), shape)))
