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
    """The static shape of one step: B decode slots, R prefill tokens in C chunks, several steps per call."""

    num_decode_slots: int = 0
    num_prefill_tokens: int = 0
    num_chunks: int = 0
    num_decode_steps: int = 1


@dataclass(frozen=True)
class Buckets:
    """Every shape of step there is.

    Attributes:
        decode_slots: sizes of a pure decode batch.
        prefill_tokens: sizes of the tokens of all chunks of a step together.
        chunks: how many chunks a pure prefill step may hold (few: one prompt pays for one logits row).
        mixed_decode_slots: sizes of the decode batch beside chunks (coarse, to keep executables few).
        decode_steps: tokens per call of a pure decode step.
    """

    decode_slots: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    chunks: tuple[int, ...]
    mixed_decode_slots: tuple[int, ...]
    decode_steps: tuple[int, ...]

    @classmethod
    def of(
        cls, *, max_batch_size: int, max_prefill_tokens: int, num_decode_steps: int, min_prefill_tokens: int = 32
    ) -> Buckets:
        """Powers of two up to the limits; at most 40 shapes for 256 slots and 8,192 tokens from 128 on."""
        max_chunks = min(8, max_batch_size)
        return cls(
            decode_slots=powers_of_two(1, max_batch_size),
            prefill_tokens=powers_of_two(min(min_prefill_tokens, max_prefill_tokens), max_prefill_tokens),
            chunks=(1, max_chunks) if max_chunks > 1 else (1,),
            mixed_decode_slots=(max_batch_size,) if max_batch_size <= 16 else (16, max_batch_size),
            decode_steps=(1, num_decode_steps) if num_decode_steps > 1 else (1,),
        )

    def shape_of(self, num_decode_slots: int, num_prefill_tokens: int, num_chunks: int, num_steps: int) -> StepShape:
        """The smallest shape that holds a step."""
        if num_chunks == 0:
            size = smallest_at_least(self.decode_slots, num_decode_slots)
            return StepShape(size, num_decode_steps=num_steps)
        num_tokens = smallest_at_least(self.prefill_tokens, num_prefill_tokens)
        if num_decode_slots == 0:
            return StepShape(0, num_tokens, smallest_at_least(self.chunks, num_chunks))
        return StepShape(smallest_at_least(self.mixed_decode_slots, num_decode_slots), num_tokens, self.chunks[-1])

    def all_shapes(self) -> Iterator[StepShape]:
        """Every shape that `shape_of` can give."""
        for size in self.decode_slots:
            for steps in self.decode_steps:
                yield StepShape(size, num_decode_steps=steps)
        for num_tokens in self.prefill_tokens:
            for num_chunks in self.chunks:
                yield StepShape(0, num_tokens, num_chunks)
            for size in self.mixed_decode_slots:
                yield StepShape(size, num_tokens, self.chunks[-1])
