"""What a step does, as plain data: the only thing that passes between the scheduler and the runner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class SamplingParams:
    """How a slot picks its tokens. Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sample_index: int = 0


@dataclass(frozen=True)
class SlotJoin:
    """A sequence takes a slot before the step runs.

    Attributes:
        slot: the slot, 0 .. max_batch_size - 1.
        page_ids: for each page group the pages of the sequence so far, in order.
        sampling: how to pick tokens.
        stop_token_ids: the slot stops on the device after it sampled one of these.
        max_len: the slot stops once prompt and generated tokens together count this many.
        min_len: while the sequence is shorter than this, stop tokens cannot be sampled.
        admitted_len: prompt length at first admission; a preempted sequence keeps it (length-dependent RoPE reads it).
    """

    slot: int
    page_ids: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    max_len: int
    min_len: int = 0
    admitted_len: int = 0


@dataclass(frozen=True)
class PageGrant:
    """Page `page_id` becomes entry `page_index` of the slot's block table in page group `group`."""

    slot: int
    page_index: int
    page_id: int
    group: int = 0


@dataclass(frozen=True)
class PageCopy:
    """The first `num_tokens` of page `source_id` become those of page `target_id`, which is its sequence's own."""

    source_id: int
    target_id: int
    num_tokens: int


@dataclass(frozen=True)
class PrefillChunk:
    """A run of known tokens of one sequence whose K and V the step computes.

    Attributes:
        slot: the sequence's slot.
        token_ids: int32 [T].
        num_history_tokens: tokens of the sequence that the pool holds already.
        is_last: the step samples the sequence's next token after this chunk.
    """

    slot: int
    token_ids: np.ndarray
    num_history_tokens: int
    is_last: bool


@dataclass(frozen=True)
class StepPlan:
    """One step. Dirty pages are zeroed first, then come copies, joins, grants, and then the device work.

    `dirty_pages` held numbers that are not finite, which attention would spread: a hidden key has probability 0, and
    0 * NaN is NaN. `decode_slots` decode `num_decode_steps` tokens each (1 when there are prefill chunks too); pages
    for all of them have been granted, and none of them has more than `max_decode_pages`. A chunk that is last yields
    one token for its slot.
    """

    step_id: int
    dirty_pages: tuple[int, ...] = ()
    page_copies: tuple[PageCopy, ...] = ()
    joins: tuple[SlotJoin, ...] = ()
    page_grants: tuple[PageGrant, ...] = ()
    decode_slots: tuple[int, ...] = ()
    num_decode_steps: int = 1
    max_decode_pages: int = 0
    prefill_chunks: tuple[PrefillChunk, ...] = ()

    @property
    def is_empty(self) -> bool:
        return not self.decode_slots and not self.prefill_chunks


@dataclass(frozen=True)
class StepResult:
    """Tokens of one step: `tokens[slot]` lists those the slot produced, in order, stop token included.

    A decoding slot that had stopped before the step, or within it, has fewer than `num_decode_steps`. A slot of
    `not_finite` stopped because its logits were not finite; its tokens are those before.
    """

    step_id: int
    tokens: dict[int, list[int]]
    not_finite: frozenset[int] = frozenset()


class Runner(Protocol):
    """The device, as the host side sees it. A step that raises, in `dispatch` or in `fetch`, has lost all state."""

    max_prefill_chunks: int

    def dispatch(self, plan: StepPlan) -> Any:
        """Starts the step and returns a handle without waiting for the device."""

    def fetch(self, handle: Any) -> StepResult:
        """Waits for the step's tokens."""

    def reset(self) -> None:
        """Makes fresh state, in which no slot is taken, and proves on it that the device still runs steps.

        Raises:
            Exception: whatever the device raises; it is lost then.
        """
