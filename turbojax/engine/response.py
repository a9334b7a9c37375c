"""What a request gives back: a Response, whole or as a piece of a stream."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from turbojax.engine.plan import RowOutputs, TokenLogprobs
from turbojax.engine.request import Progress
from turbojax.engine.wants import cut, stacked

LogprobOf = dict[int, float]
"""By token id."""


@dataclass(slots=True)  # not frozen, which would make it three times as slow to make: each streamed token does
class Response:
    """What came of a prompt; in a stream, what came since the piece before.

    Attributes:
        text: generated text, without stop words and stop tokens unless they were asked for; empty for a model without
            a tokenizer.
        token_ids: generated tokens, the stop token included.
        finish_reason: `stop` (a stop token, stop word or repetition stop), `length` (max_new_tokens or session_len),
            `timeout` (timeout_s is over), `error`; None in a stream that goes on.
        num_input_tokens: of the prompt.
        num_generated_tokens: so far, the stop token included.
        error: what went wrong, if it did.
        error_type: the kind of it: the name of a class in `turbojax.errors`, or of another exception.
        index: of the prompt in its list.
        sample_index: of the sample, 0 .. n - 1.
        num_cached_tokens: of the prompt, found in the prefix cache.
        started_s: by `time.monotonic`, when its request first took a slot; None where it never did.
        first_token_s: by the same clock, when its first token came; None before.
        made_s: when this was made.
        logprobs: for each token, the natural logarithms of probabilities by token id: of the likeliest tokens by the
            model's own logits, likeliest first, and of the token itself.
        processed_logprobs: the same tokens by the logits that were sampled from, before the temperature: after
            penalties, bias, processor and mask; without those that could not come.
        prompt_logprobs: for each token of the prompt, as `logprobs`; None for the first, which nothing precedes.
        logits: float32 [T, V], the model's own: row i is what token i was sampled from; with 'all' those of the prompt
            come first, T - 1 of them for T tokens.
        last_hidden_state: float32 [T, D], behind the final norm; the same rows.
    """

    text: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    num_input_tokens: int = 0
    num_generated_tokens: int = 0
    error: str | None = None
    index: int = 0
    sample_index: int = 0
    num_cached_tokens: int = 0
    started_s: float | None = field(default=None, compare=False)
    first_token_s: float | None = field(default=None, compare=False)
    made_s: float = field(default=0.0, compare=False)
    logprobs: list[LogprobOf] | None = None
    processed_logprobs: list[LogprobOf] | None = None
    prompt_logprobs: list[LogprobOf | None] | None = None
    logits: np.ndarray | None = None
    last_hidden_state: np.ndarray | None = None
    error_type: str | None = None


class Answer:
    """Collects what comes of a request until it is handed on; tokens and text alone take a short way."""

    def __init__(
        self, prompt_ids: Sequence[int] | np.ndarray, index: int, sample_index: int, *, wants_prompt_logprobs: bool
    ) -> None:
        self._prompt_ids, self._index, self._sample_index = prompt_ids, index, sample_index
        # No row of a prompt of one token has a log-probability, so none comes that would bring the list.
        self._owes_first = wants_prompt_logprobs and len(prompt_ids) == 1
        self._num_prompt_tokens, self._num_tokens = len(prompt_ids), 0
        self.token_ids: list[int] = []
        self._text, self._first_token_s = "", None  # type: str, float | None
        self._outputs: list[RowOutputs] = []
        self._prompt_outputs: list[RowOutputs] = []

    def add(self, progress: Progress, num_tokens: int, text: str = "") -> None:
        """Takes in progress, the first `num_tokens` of its tokens, and their text."""
        if self._first_token_s is None and num_tokens:
            self._first_token_s = time.monotonic()
        token_ids = progress.token_ids
        self.token_ids += token_ids if num_tokens == len(token_ids) else token_ids[:num_tokens]
        self._text += text
        if progress.outputs is not None:
            self._outputs.append(cut(progress.outputs, 0, num_tokens))
        if progress.prompt_outputs is not None:
            self._prompt_outputs.append(progress.prompt_outputs)

    def hand_on(self, finish_reason: str | None, error: str | None, progress: Progress) -> Response:
        """All that has come since the last time, up to this progress."""
        tokens, text = self.token_ids, self._text
        self.token_ids, self._text = [], ""
        self._num_tokens += len(tokens)
        wanted = self._wanted(tokens) if self._outputs or self._prompt_outputs or self._owes_first else {}
        if progress.error is not None:
            wanted["error_type"] = type(progress.error).__name__
        return Response(
            text, tokens, finish_reason, self._num_prompt_tokens, self._num_tokens, error,
            self._index, self._sample_index, progress.num_cached_tokens, progress.started_s, self._first_token_s,
            time.monotonic(), **wanted,
        )  # fmt: skip

    def _wanted(self, tokens: list[int]) -> dict[str, Any]:
        """The fields of what was wanted beside tokens."""
        rows, prompt_rows = logprob_rows(self._outputs), logprob_rows(self._prompt_outputs)
        if self._owes_first:
            prompt_rows, self._owes_first = [], False
        parts = [*self._prompt_outputs, *self._outputs]
        self._outputs, self._prompt_outputs = [], []
        return {
            "logprobs": None if rows is None else list(map(raw_logprobs, tokens, rows)),
            "processed_logprobs": None if rows is None else list(map(processed_logprobs, tokens, rows)),
            "prompt_logprobs": None
            if prompt_rows is None
            else [None, *map(raw_logprobs, self._prompt_ids[1:], prompt_rows)],
            "logits": stacked(part.logits for part in parts),
            "last_hidden_state": stacked(part.hidden for part in parts),
        }


def logprob_rows(parts: Sequence[RowOutputs]) -> list[TokenLogprobs] | None:
    """Those of several steps, one behind the other; None where none were wanted."""
    found = [part.logprobs for part in parts if part.logprobs is not None]
    return [row for part in found for row in part] if found else None


def raw_logprobs(token: int, row: TokenLogprobs) -> LogprobOf:
    return dict(zip(row.top_ids, row.top_logprobs, strict=True)) | {int(token): row.logprob}


def processed_logprobs(token: int, row: TokenLogprobs) -> LogprobOf:
    found = dict(zip(row.top_ids, row.top_processed_logprobs, strict=True)) | {int(token): row.processed_logprob}
    return {i: logprob for i, logprob in found.items() if logprob > -math.inf}
