"""What bounds a step and a sequence, and whether a prompt fits at all."""

from __future__ import annotations

import math
from dataclasses import dataclass

from turbojax.errors import EmptyPromptError, PromptTooLongError

# How much longer than the largest chunk without a history a step may take for the sake of a larger one; and the least
# share of that chunk, since a step has costs that do not shrink with it: weights and the whole history are read.
EVEN, LEAST_SHARE = 1.15, 4


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step.

    Attributes:
        num_slots: sequences that run at once.
        session_len: most tokens of a sequence.
        max_prefill_tokens: prompt tokens of one step.
        max_chunks: prefill chunks of one step.
        num_decode_steps: tokens per call while nothing waits or prefills.
        max_multi_step_slots: most decoding slots of such a call; None is all of them. A step of more takes longer
            than the host needs for the next one.
        max_multi_step_pages: most pages of any of them; None is all.
        max_queue_len: requests that the engine takes beyond those that run at once; None is any number.
        mixed: (decode slots, prompt tokens) that a step of several chunks or with decode slots can hold, fewest rows
            first; empty is `max_prefill_tokens` beside any slots.
        parity_len: tokens behind which the attention of one more takes as long as all else of it.
    """

    num_slots: int
    session_len: int
    max_prefill_tokens: int
    max_chunks: int
    num_decode_steps: int = 1
    max_multi_step_slots: int | None = None
    max_multi_step_pages: int | None = None
    max_queue_len: int | None = None
    mixed: tuple[tuple[int, int], ...] = ()
    parity_len: float = math.inf

    def most_prefill_tokens(self, num_decoding: int, history_len: int = 0) -> int:
        """Of all chunks of a step with so many decode slots, where it has any or several chunks.

        Decoding sequences wait for a step to end. The attention of a chunk to a long history would make that later and
        later, so chunks get smaller with it: a step should take about as long as the largest one without a history.
        """
        sizes = [(slots + tokens, tokens) for slots, tokens in self.mixed if slots >= num_decoding]
        if not sizes:
            return self.max_prefill_tokens
        num_rows, most = max(sizes, key=lambda size: size[1])
        if num_decoding == 0:
            return most
        sizes = [(rows, tokens) for rows, tokens in sizes if tokens * LEAST_SHARE >= most]
        # In the time that a row takes without a history.
        fits = [n for rows, n in sizes if rows + n * history_len / self.parity_len <= EVEN * num_rows]
        return max(fits, default=min(n for _, n in sizes))

    def steps_for(self, num_decoding: int, num_pages: int) -> int:
        """Tokens per call of a pure decode step of so many slots, of so many pages at most, while nothing waits."""
        for number, limit in ((num_decoding, self.max_multi_step_slots), (num_pages, self.max_multi_step_pages)):
            if limit is not None and number > limit:
                return 1
        return self.num_decode_steps


def check_prompt(num_prompt_tokens: int, name: str, session_len: int, pool_len: int) -> None:
    """Whether a prompt and one token behind it can ever run.

    Raises:
        EmptyPromptError, PromptTooLongError: it cannot; the message has the numbers.
    """
    if num_prompt_tokens == 0:
        raise EmptyPromptError(f"{name}: the prompt has no tokens")
    max_len = min(session_len, pool_len)
    if num_prompt_tokens + 1 > max_len:
        raise PromptTooLongError(
            f"{name}: {num_prompt_tokens} prompt tokens and one to generate exceed {max_len} "
            f"(session_len {session_len}, KV pool {pool_len} tokens); shorten it or raise them"
        )
