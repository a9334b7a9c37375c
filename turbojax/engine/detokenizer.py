"""Token ids to text as they come: never half a character, stop words across token borders, amortised O(1) a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

# A decoder writes this for bytes that are no character (yet).
REPLACEMENT = "\ufffd"
# A UTF-8 character has at most 4 bytes: behind this many undecodable tokens no character will come.
MAX_PENDING_TOKENS = 8


class Detokenizer:
    """Decodes a growing sequence through a short window: a token adds decode(window + token) minus decode(window).

    The window keeps the tokens of the last emitted piece, since decoders treat a sequence's first token apart.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []  # tokens whose text is out, then those whose text is not
        self._num_out = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        text = ""
        for token in token_ids:
            self._window.append(token)
            text += self._advance(final=len(self._window) - self._num_out > MAX_PENDING_TOKENS)
        return text

    def flush(self) -> str:
        """The text of tokens that were held back: bytes that are no character show as the replacement character."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        before = self._decode(self._window[: self._num_out])
        after = self._decode(self._window)
        if len(after) <= len(before) or (after.endswith(REPLACEMENT) and not final):
            return ""
        self._window = self._window[self._num_out :]
        self._num_out = len(self._window)
        return after[len(before) :]


class StopWords:
    """Finds the first stop word in a growing text, and holds back what may become one."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = tuple(words)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """The text that is safe to show; once a stop word is found, what stood before it, and nothing after."""
        if self.found is not None:
            return ""
        text = self._held + text
        hits = [(at, word) for word in self._words if (at := text.find(word)) >= 0]
        if hits:
            at, self.found = min(hits)
            self._held = ""
            return text[:at]
        num_held = max((self._overlap(text, word) for word in self._words), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """The held-back text: no stop word came of it."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, word: str) -> int:
        """Length of the longest end of the text that begins the word."""
        longest = min(len(text), len(word) - 1)
        return next((n for n in range(longest, 0, -1) if text.endswith(word[:n])), 0)
