"""What every kind of answer takes from the pieces of a request: its end, and the tokens that it took."""

from __future__ import annotations

from turbojax.engine.response import Response
from turbojax.serve.openai_errors import failure_of
from turbojax.serve.protocol.usage import CompletionTokensDetails, PromptTokensDetails, Usage


class Tally:
    """Counts tokens over the pieces of all prompts and samples; a prompt counts once, however many samples it has."""

    def __init__(self, *, counts_answers: bool = True) -> None:
        """`counts_answers` is False where what was generated is left out of the answer."""
        self._counts_answers = counts_answers
        self._prompts: dict[int, tuple[int, int]] = {}  # tokens, cached tokens
        self._num_new: dict[tuple[int, int], int] = {}
        self.num_reasoning_tokens = 0

    def add(self, piece: Response) -> None:
        """Takes in a piece.

        Raises:
            ApiError: its request failed.
        """
        if piece.finish_reason == "error":
            raise failure_of(piece)
        if piece.sample_index == 0:  # other samples find the prompt of the first in the cache
            self._prompts[piece.index] = piece.num_input_tokens, piece.num_cached_tokens
        if self._counts_answers:
            self._num_new[piece.index, piece.sample_index] = piece.num_generated_tokens

    def usage(self) -> Usage:
        num_prompt = sum(num for num, _ in self._prompts.values())
        num_new = sum(self._num_new.values())
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_new,
            total_tokens=num_prompt + num_new,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(num for _, num in self._prompts.values())),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=self.num_reasoning_tokens),
        )
