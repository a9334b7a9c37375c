"""What a request gives back: a Response, whole or as a piece of a stream."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
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
        index: of the prompt in its list.
        sample_index: of the sample, 0 .. n - 1.
    """

    text: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    num_input_tokens: int = 0
    num_generated_tokens: int = 0
    error: str | None = None
    index: int = 0
    sample_index: int = 0
