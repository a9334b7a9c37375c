"""One request: its tokens, its limits, and where it stands."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from turbojax.engine.guides import Guide
from turbojax.engine.plan import PrefillChunk, RowOutputs, SamplingParams, SlotJoin
from turbojax.engine.prefix_cache import Trail
from turbojax.engine.wants import NOTHING, Wants

Sink = Callable[["Progress"], bool]


class Status(enum.Enum):
    """WAITING for a slot; RUNNING in one; YIELDING it once no step in flight names it, to wait again; RETIRING
    likewise, to end; FINISHED."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    YIELDING = enum.auto()
    RETIRING = enum.auto()
    FINISHED = enum.auto()


class Progress(NamedTuple):
    """New tokens of a request; the last one carries a finish reason (`stop`, `length`, `timeout`, `error`).

    Attributes:
        num_cached_tokens: of its prompt, found in the prefix cache.
        outputs: what it wants of the tokens, one row each or more.
        prompt_outputs: what it wants of the next rows of its prompt; the last row of all belongs to the first token.
        started_s: by `time.monotonic`, when it first took a slot; None before that.
    """

    token_ids: list[int]
    finish_reason: str | None = None
    error: Exception | None = None
    num_cached_tokens: int = 0
    outputs: RowOutputs | None = None
    prompt_outputs: RowOutputs | None = None
    started_s: float | None = None


@dataclass(eq=False, slots=True)  # a step looks at every running request: slots are half of the memory to read
class Request:
    """A sequence to complete.

    Attributes:
        request_id: unique in its engine.
        prompt_ids: int32 [T].
        sampling: how to pick tokens.
        stop_token_ids: the first of these ends it.
        max_len: it ends once prompt and generated tokens together count this many.
        min_len: no stop token before it is this long.
        wants: what it wants beside tokens.
        guide: says which tokens may come next.
        priority: lower ones are admitted first; see `WaitingQueue`.
        cache_salt: pages are shared only among requests of one salt.
        reads_cache: False computes the whole prompt, for what is wanted of each of its rows.
        deadline_s: by `time.monotonic`, when it ends with reason `timeout`; None is never.
        sink: receives its progress, in the engine's thread; returns True to end the request there (a stop word).
        generated_ids: tokens so far, those of committed steps.
        slot, page_ids: what it holds while it has a slot.
        num_held_tokens: tokens that its pages have room for.
        num_prefilled_tokens: known tokens whose K and V are in the pool, or will be by the steps in flight.
        num_committed_tokens: those of them whose steps are committed.
        started_s: by `time.monotonic`, when it first took a slot.
        num_cached_tokens: tokens of the prompt that the prefix cache had then.
        num_reported_rows: rows of the prompt whose outputs its sink has.
        num_planned_tokens: its length once the steps in flight have all given their tokens.
        num_steps_in_flight: steps that name its slot and are not committed.
        is_dirty: its pages hold numbers that are not finite.
        served_at: when its priority had been served last as it took its slot, in admissions.
    """

    request_id: int
    prompt_ids: np.ndarray
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    max_len: int
    min_len: int = 0
    wants: Wants = NOTHING
    guide: Guide | None = None
    priority: int = 0
    cache_salt: Hashable = None
    reads_cache: bool = True
    deadline_s: float | None = None
    sink: Sink = lambda progress: False
    generated_ids: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    slot: int = -1
    page_ids: list[int] = field(default_factory=list)
    num_held_tokens: int = 0
    num_prefilled_tokens: int = 0
    num_committed_tokens: int = 0
    started_s: float | None = None
    num_cached_tokens: int = 0
    num_reported_rows: int = 0
    num_planned_tokens: int = 0
    num_steps_in_flight: int = 0
    is_dirty: bool = False
    served_at: int = 0
    finish_reason: str | None = None
    trail: Trail = field(default_factory=Trail)
    _is_plain: bool | None = field(default=None, init=False, repr=False)

    @property
    def is_plain(self) -> bool:
        """Several of its tokens may come of one call: nothing beside them is wanted, nor done to their logits."""
        if self._is_plain is None:
            self._is_plain = self.sampling.is_plain and self.guide is None and not self.wants.of_tokens
        return self._is_plain

    @property
    def num_tokens(self) -> int:
        """Known tokens, prompt and generated."""
        return len(self.prompt_ids) + len(self.generated_ids)

    @property
    def is_prefilled(self) -> bool:
        """All tokens that were known when it took its slot are in the pool, so it can decode."""
        return self.num_prefilled_tokens >= self.num_prefill_tokens

    num_prefill_tokens: int = 0
    """Known tokens when it took its slot."""

    def token_ids(self, start: int, end: int) -> np.ndarray:
        """Known tokens start .. end, int32."""
        num_prompt = len(self.prompt_ids)
        if end <= num_prompt:
            return self.prompt_ids[start:end]
        generated = np.asarray(self.generated_ids[max(0, start - num_prompt) : end - num_prompt], np.int32)
        return np.concatenate([self.prompt_ids[start:num_prompt], generated])

    def as_join(self) -> SlotJoin:
        """What the device needs to know of it as it takes its slot."""
        counts_tokens = self.sampling.counts_tokens
        return SlotJoin(
            slot=self.slot,
            page_ids=(tuple(self.page_ids),),
            sampling=self.sampling,
            stop_token_ids=self.stop_token_ids,
            max_len=self.max_len,
            min_len=self.min_len,
            admitted_len=len(self.prompt_ids),
            num_logprobs=self.wants.num_logprobs,
            output_logits=self.wants.logits is not None,
            output_hidden=self.wants.hidden is not None,
            has_guide=self.guide is not None,
            prompt_ids=self.prompt_ids if counts_tokens else None,
            output_ids=np.asarray(self.generated_ids, np.int32) if counts_tokens else None,
        )

    def as_chunk(self, start: int, end: int) -> PrefillChunk:
        """Its known tokens start .. end as the next chunk, with what is wanted of rows that were not reported yet.

        The prompt's last row is the one that the first token is sampled from, and comes with that token.
        """
        is_last, token_ids = end == self.num_prefill_tokens, self.token_ids(start, end)
        if not self.wants.of_prompt or not start < len(self.prompt_ids) - 1 or end <= self.num_reported_rows:
            return PrefillChunk(self.slot, token_ids, start, is_last)
        return PrefillChunk(
            self.slot, token_ids, start, is_last,
            num_prompt_logprobs=self.wants.num_prompt_logprobs,
            next_token_id=int(self.token_ids(end, end + 1)[0]) if end < self.num_tokens else -1,
            output_logits=self.wants.logits == "all",
            output_hidden=self.wants.hidden == "all",
        )  # fmt: skip

    def check(self) -> None:
        """The lengths keep their order."""
        assert self.num_tokens <= self.max_len, self
        if self.status is Status.RUNNING:
            assert self.num_prefilled_tokens <= self.num_prefill_tokens <= self.num_tokens, self
            assert self.num_committed_tokens < self.num_tokens, self
            assert self.num_tokens <= self.num_planned_tokens <= self.max_len, self
