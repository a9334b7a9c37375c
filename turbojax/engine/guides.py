"""What a guide is: it reads a request's tokens as they come, and says which ones may come next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from turbojax.errors import GuideError

WORD_BITS = 32


class Guide(Protocol):
    """Bounds the tokens of one sequence. Not shared: it knows where its sequence stands."""

    vocab_size: int

    def advance(self, token_ids: Sequence[int]) -> None:
        """Takes in generated tokens.

        Raises:
            GuideError: the guide does not allow them.
        """

    def mask(self) -> np.ndarray:
        """uint32 [ceil(V / 32)]: bit i % 32 of word i // 32 is set where token i may come next.

        Raises:
            GuideError: no token may.
        """

    @property
    def is_finished(self) -> bool:
        """Nothing can follow: the answer is complete, and the request ends without an end-of-sequence token."""


class AllOf:
    """Several guides at once: a token may come where all of them allow it.

    None of them looks ahead for the others, so together they can lead to a place without a token.
    """

    def __init__(self, guides: Sequence[Guide]) -> None:
        self._guides = tuple(guides)
        self.vocab_size = self._guides[0].vocab_size

    def advance(self, token_ids: Sequence[int]) -> None:
        for guide in self._guides:
            guide.advance(token_ids)

    def mask(self) -> np.ndarray:
        mask = np.bitwise_and.reduce([guide.mask() for guide in self._guides])
        if not mask.any():
            raise GuideError("no token follows both the response format and the bad words here")
        return mask

    @property
    def is_finished(self) -> bool:
        return any(guide.is_finished for guide in self._guides)


def num_mask_words(vocab_size: int) -> int:
    return -(-vocab_size // WORD_BITS)


def any_token(vocab_size: int) -> np.ndarray:
    """A mask that allows every token."""
    return np.full(num_mask_words(vocab_size), 0xFFFFFFFF, np.uint32)


def as_mask(allowed: np.ndarray) -> np.ndarray:
    """bool [V] as a mask."""
    bits = np.zeros(num_mask_words(len(allowed)) * WORD_BITS, bool)
    bits[: len(allowed)] = allowed
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32, copy=False)
