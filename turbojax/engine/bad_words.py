"""Texts that a request must never say, whatever tokens would spell them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from turbojax.engine.guides import as_mask

MAX_KEPT_WORDS = 1024


class Vocabulary:
    """The bytes that each token adds to a text, and which tokens begin with or contain some.

    Args:
        token_bytes: of token i; empty where it adds nothing (special tokens that are left out of the text).
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self.token_bytes = token_bytes
        self._order = sorted(range(len(token_bytes)), key=token_bytes.__getitem__)
        self._sorted = [token_bytes[i] for i in self._order]
        self.containing = lru_cache(MAX_KEPT_WORDS)(self._containing)

    def __len__(self) -> int:
        return len(self.token_bytes)

    def beginning_with(self, prefix: bytes) -> np.ndarray:
        """Ids of the tokens that begin with this, O(log V); they stand together in byte order."""
        start = end = bisect_left(self._sorted, prefix)
        while end < len(self._sorted) and self._sorted[end].startswith(prefix):
            end += 1
        return np.asarray(self._order[start:end], np.int64)

    def _containing(self, part: bytes) -> np.ndarray:
        """Ids of the tokens that contain this: a look at each of them, 20 ms for 49k tokens, once for a word."""
        return np.asarray([i for i, text in enumerate(self.token_bytes) if part in text], np.int64)


class BadWords:
    """A guide that keeps words out of the text: a token may come unless it completes one of them.

    A word is completed by a token that contains it, or by one that begins with the rest of it behind a text that ends
    with its beginning.
    """

    is_finished = False

    def __init__(self, words: Iterable[str], vocabulary: Vocabulary, vocab_size: int) -> None:
        """`vocab_size` is the model's, which may be larger than the tokenizer's."""
        self._words = tuple(dict.fromkeys(word.encode() for word in words))
        self._vocabulary, self.vocab_size = vocabulary, vocab_size
        self._allowed = np.ones(vocab_size, bool)
        for word in self._words:
            self._allowed[vocabulary.containing(word)] = False
        self._tail, self._max_tail = b"", max(map(len, self._words)) - 1

    def advance(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if token < len(self._vocabulary):
                self._tail += self._vocabulary.token_bytes[token]
        self._tail = self._tail[max(0, len(self._tail) - self._max_tail) :]

    def mask(self) -> np.ndarray:
        allowed = self._allowed.copy()
        for word in self._words:
            for num_said in range(1, min(len(word), len(self._tail) + 1)):
                if self._tail.endswith(word[:num_said]):
                    allowed[self._vocabulary.beginning_with(word[num_said:])] = False
        return as_mask(allowed)
