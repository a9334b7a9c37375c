"""What a step left on the device, brought to the host in the words of `StepResult`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import numpy as np

from turbojax.core.split import PickOutputs
from turbojax.engine.plan import PrefillChunk, RowOutputs, SlotJoin, TokenLogprobs


@dataclass(frozen=True)
class Wish:
    """What is wanted of some rows beside tokens, see `SlotJoin`."""

    num_logprobs: int | None = None
    logits: bool = False
    hidden: bool = False

    @classmethod
    def of(cls, wanted: SlotJoin | PrefillChunk) -> Wish:
        """Of the tokens that a slot samples, or of the rows of a chunk."""
        if isinstance(wanted, PrefillChunk):
            return cls(wanted.num_prompt_logprobs, wanted.output_logits, wanted.output_hidden)
        return cls(wanted.num_logprobs, wanted.output_logits, wanted.output_hidden)

    @property
    def is_none(self) -> bool:
        return self.num_logprobs is None and not self.logits and not self.hidden

    def __or__(self, other: Wish) -> Wish:
        """What either wants; only whether there are log-probabilities, not how many."""
        has_logprobs = self.num_logprobs is not None or other.num_logprobs is not None
        return Wish(0 if has_logprobs else None, self.logits or other.logits, self.hidden or other.hidden)


class SampledRow(NamedTuple):
    """A row of a split step that stands at the end of what its slot knows.

    Attributes:
        number: of the row within the step.
        slot: its slot.
        length: tokens of the sequence before the next one, where it ends a chunk; negative for a decoding slot.
        is_last: it ends the last chunk.
    """

    number: int
    slot: int
    length: int = -1
    is_last: bool = False

    @property
    def counts(self) -> bool:
        """The token that is sampled behind it counts."""
        return self.is_last or self.length < 0


def sampled_rows(decode_slots: Sequence[int], chunks: Sequence[PrefillChunk], num_before: int) -> list[SampledRow]:
    """Those of decode slots, then of chunks, whose rows come behind `num_before` others."""
    rows = [SampledRow(number, slot) for number, slot in enumerate(decode_slots)]
    for chunk in chunks:
        num_tokens = len(chunk.token_ids)
        num_before += num_tokens
        rows.append(SampledRow(num_before - 1, chunk.slot, chunk.num_history_tokens + num_tokens, chunk.is_last))
    return rows


@dataclass(frozen=True)
class Outputs:
    """Rows of one `pick`, as far as somebody wants them; on their way to the host."""

    logprobs: tuple[jax.Array, ...] | None
    logits: jax.Array | np.ndarray | None
    hidden: jax.Array | None

    @classmethod
    def start(cls, outputs: PickOutputs, wish: Wish) -> Outputs:
        """Starts the copies; what is not wanted is let go."""
        found = outputs.logprobs
        logprobs = found.of_token, found.processed_of_token, found.top_ids, found.top, found.processed_top
        kept = cls(
            logprobs if wish.num_logprobs is not None else None,
            outputs.logits if wish.logits else None,
            outputs.hidden if wish.hidden else None,
        )
        jax.tree.map(lambda array: array.copy_to_host_async(), (kept.logprobs, kept.logits, kept.hidden))
        return kept

    def with_logits_on_host(self) -> Outputs:
        """Waits for the logits, so that the device has room for the next ones."""
        return self if self.logits is None else replace(self, logits=np.array(self.logits))

    def rows(self, rows: Sequence[int], wish: Wish) -> RowOutputs:
        """Of some rows, what they want; waits for the device."""
        logprobs = logits = hidden = None
        if wish.num_logprobs is not None:
            assert self.logprobs is not None
            columns = [np.asarray(array)[rows] for array in self.logprobs]
            columns = [column[:, : wish.num_logprobs] if column.ndim == 2 else column for column in columns]
            logprobs = [TokenLogprobs(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
        if wish.logits:
            logits = np.asarray(self.logits)[rows]
        if wish.hidden:
            hidden = np.asarray(self.hidden)[rows].astype(np.float32)
        return RowOutputs(logprobs, logits, hidden)


def joined(parts: Sequence[RowOutputs], *, num_logprobs: int) -> RowOutputs:
    """Rows of several calls, one behind the other; log-probabilities of the first so many alone."""
    first = parts[0]
    return RowOutputs(
        None if first.logprobs is None else [one for part in parts for one in part.logprobs or ()][:num_logprobs],
        None if first.logits is None else np.concatenate([part.logits for part in parts if part.logits is not None]),
        None if first.hidden is None else np.concatenate([part.hidden for part in parts if part.hidden is not None]),
    )
