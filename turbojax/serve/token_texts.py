"""Tokens one by one, as log-probabilities name them: their bytes and their text."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from turbojax.errors import TokenizerError

if TYPE_CHECKING:
    from turbojax.tokenizer import Tokenizer

MAX_KEPT_TOKENS = 1 << 16
# What JSON, which has no infinity, says of a token that cannot come; OpenAI's.
LEAST_LOGPROB = -9999.0


def as_json_number(logprob: float) -> float:
    return max(float(logprob), LEAST_LOGPROB)


class TokenTexts:
    """The bytes of each token of one tokenizer; a token may be a part of a character."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.bytes_of = lru_cache(MAX_KEPT_TOKENS)(lambda token_id: self._read(token_id))

    def text_of(self, token_id: int) -> str:
        """For readers: what is no whole character becomes U+FFFD."""
        return self.bytes_of(token_id).decode(errors="replace")

    def name_of(self, token_id: int) -> str:
        """As OpenAI's completions name tokens, no two alike: the bytes of those that are no whole characters."""
        found = self.bytes_of(token_id)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    def is_special(self, token_id: int) -> bool:
        """Whether a text that leaves special tokens out leaves this one out."""
        return token_id in self._special_ids

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        backend = None if self._tokenizer is None else self._tokenizer.backend
        added = {} if backend is None else backend.get_added_tokens_decoder()
        return frozenset(token for token, found in added.items() if found.special)

    @cached_property
    def _read(self) -> Callable[[int], bytes]:
        """By the vocabulary; where that cannot be read, by what the tokenizer makes of a token alone."""
        from turbojax.vocabulary import token_reader

        tokenizer = self._tokenizer
        if tokenizer is None:
            return lambda token_id: f"token_id:{token_id}".encode()
        try:
            return token_reader(tokenizer)
        except TokenizerError:
            return lambda token_id: tokenizer.decode([token_id], skip_special_tokens=False).encode()
