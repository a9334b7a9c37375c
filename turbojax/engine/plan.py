"""What a step does, as plain data: the only thing that passes between the scheduler and the runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

# Likeliest tokens that a row can be asked for, and tokens that a slot can bias and forbid together.
MAX_LOGPROBS = 20
MAX_BIASED_TOKENS = 512


@dataclass(frozen=True)
class SamplingParams:
    """How a slot picks its tokens. Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off.

    Attributes:
        temperature, top_k, top_p, min_p: as in `GenerationConfig`.
        seed, sample_index: with the position of a token they are all its randomness.
        repetition_penalty: divides positive and multiplies negative logits of tokens of prompt and output; 1 is off.
        presence_penalty: taken off the logits of tokens that the output has.
        frequency_penalty: taken off them once for each time that the output has the token.
        logit_bias: (token id, what is added to its logit), each token once.
        bad_token_ids: never sampled; with those of `logit_bias` at most `MAX_BIASED_TOKENS`.
        processor: name of one of `EngineConfig.logits_processors`.
        processor_params: numbers or arrays of numbers, of the shapes that the processor declares.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sample_index: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_token_ids: tuple[int, ...] = ()
    processor: str | None = None
    processor_params: tuple[Any, ...] = ()

    @property
    def counts_tokens(self) -> bool:
        """The device counts the sequence's tokens: a penalty or a processor reads them."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return penalties != (1.0, 0.0, 0.0) or self.processor is not None

    @property
    def is_plain(self) -> bool:
        """Logits are sampled as the model gives them, so fused steps will do."""
        return not (self.counts_tokens or self.logit_bias or self.bad_token_ids)


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
        num_logprobs: so many of the likeliest tokens, at most `MAX_LOGPROBS`, come with each sampled one; 0: the
            log-probabilities of the sampled token alone; None: none.
        output_logits, output_hidden: the logits and the last hidden state that each token is sampled from are wanted.
        has_guide: each of its tokens is sampled under a mask that the host gives to `Runner.pick`.
        prompt_ids, output_ids: int32 [T], tokens of the sequence so far, where `sampling.counts_tokens`.
    """

    slot: int
    page_ids: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    max_len: int
    min_len: int = 0
    admitted_len: int = 0
    num_logprobs: int | None = None
    output_logits: bool = False
    output_hidden: bool = False
    has_guide: bool = False
    prompt_ids: np.ndarray | None = None
    output_ids: np.ndarray | None = None

    @property
    def is_plain(self) -> bool:
        """The slot wants tokens only, sampled from the logits as they are: its decode steps are fused."""
        wants_more = self.num_logprobs is not None or self.output_logits or self.output_hidden
        return self.sampling.is_plain and not wants_more and not self.has_guide


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
        num_prompt_logprobs: log-probabilities of the known token behind each row are wanted, with so many of the
            likeliest ones (at most `MAX_LOGPROBS`); None: none.
        next_token_id: the known token behind the chunk; negative where there is none.
        output_logits, output_hidden: logits and last hidden states of all rows are wanted.
    """

    slot: int
    token_ids: np.ndarray
    num_history_tokens: int
    is_last: bool
    num_prompt_logprobs: int | None = None
    next_token_id: int = -1
    output_logits: bool = False
    output_hidden: bool = False

    @property
    def is_plain(self) -> bool:
        """Nothing is wanted of its rows."""
        return self.num_prompt_logprobs is None and not self.output_logits and not self.output_hidden


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


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities at one place of a sequence.

    Attributes:
        logprob: of the token that stands there, by the model's own logits.
        processed_logprob: by the logits after penalties, bias, processor and mask, before the temperature.
        top_ids: the likeliest tokens by the model's own logits, likeliest first; as many as were asked for.
        top_logprobs, top_processed_logprobs: theirs.
    """

    logprob: float
    processed_logprob: float
    top_ids: list[int]
    top_logprobs: list[float]
    top_processed_logprobs: list[float]


@dataclass(frozen=True)
class RowOutputs:
    """What was wanted beside tokens, of rows of one slot in order; None where it was not.

    Attributes:
        logprobs: of T tokens.
        logits: float32 [T, V], the model's own.
        hidden: float32 [T, D], last hidden states behind the final norm.
    """

    logprobs: list[TokenLogprobs] | None = None
    logits: np.ndarray | None = None
    hidden: np.ndarray | None = None


@dataclass(frozen=True)
class StepResult:
    """Tokens of one step: `tokens[slot]` lists those the slot produced, in order, stop token included.

    A decoding slot that had stopped before the step, or within it, has fewer than `num_decode_steps`. A slot of
    `not_finite` stopped because its logits were not finite; its tokens are those before.

    Attributes:
        outputs: by slot, parallel to its tokens, where its `SlotJoin` wants any.
        prompt_outputs: by slot, parallel to the rows of its chunk, where the chunk wants any; the last row has no
            log-probability where no known token follows it.
    """

    step_id: int
    tokens: dict[int, list[int]]
    not_finite: frozenset[int] = frozenset()
    outputs: dict[int, RowOutputs] = field(default_factory=dict)
    prompt_outputs: dict[int, RowOutputs] = field(default_factory=dict)


class Runner(Protocol):
    """The device, as the host side sees it. A step that raises, in `dispatch` or in `fetch`, has lost all state."""

    max_prefill_chunks: int

    def dispatch(self, plan: StepPlan) -> Any:
        """Starts the step and returns a handle without waiting for the device.

        Where a slot that samples in this step has a guide, only the forward pass starts: `pick` does the rest.
        """

    def pick(self, handle: Any, masks: Mapping[int, np.ndarray]) -> None:
        """Starts the sampling of a step with guided slots, before any later step is dispatched; never waits.

        Args:
            handle: of `dispatch`.
            masks: for each guided slot that samples, uint32 [ceil(V / 32)]: bit i % 32 of word i // 32 is set where
                token i may be sampled.
        """

    def fetch(self, handle: Any) -> StepResult:
        """Waits for the step's tokens."""

    def reset(self) -> None:
        """Makes fresh state, in which no slot is taken, and proves on it that the device still runs steps.

        Raises:
            Exception: whatever the device raises; it is lost then.
        """

    def close(self) -> None:
        """Lets go of whoever runs steps beside this process; the engine calls it last."""
