"""Token ids to text as they come: never half a character, amortised O(1) a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

# A decoder writes this for bytes that are no character (yet).
REPLACEMENT = "\ufffd"
# Tokens that may wait for the rest of a character: it has 4 bytes at most, and a token has one at least.
MAX_PENDING_TOKENS = 4
# Tokens that are decoded together: the window holds as many, and is decoded again with the next ones.
MAX_AT_ONCE = 8


class Detokenizer:
    """Decodes a growing sequence through a short window: a token adds decode(window + token) minus decode(window).

    The window keeps the tokens of the last emitted piece, since decoders treat a sequence's first token apart. For a
    decoder of bytes all pieces together are exactly decode(all tokens), broken bytes included.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []  # tokens whose text is out, then those whose text is not
        self._num_out = 0
        self._text_out = ""  # decode(window[:num_out])

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        blocks = [token_ids[first : first + MAX_AT_ONCE] for first in range(0, len(token_ids), MAX_AT_ONCE)]
        return "".join([self._push_block(block) for block in blocks])

    def _push_block(self, token_ids: Sequence[int]) -> str:
        """Decodes them together where they end with a character: twice in all, as each of them would be alone."""
        if len(token_ids) > 1:
            text = self._decode([*self._window, *token_ids])
            if text != self._text_out and not text.endswith(REPLACEMENT):
                self._window += token_ids
                return self._emit(len(self._window), text)
        return "".join([self.push_token(token) for token in token_ids])

    def flush(self) -> str:
        """The text of tokens that were held back: bytes that are no character show as the replacement character."""
        return self._emit(len(self._window), self._decode(self._window))

    def push_token(self, token: int) -> str:
        """The text that this token completes."""
        self._window.append(token)
        text = self._decode(self._window)
        num_pending = len(self._window) - self._num_out
        if text == self._text_out:
            # A skipped special token. At the very start it may also be a space that the decoder strips: keep a few.
            if self._text_out or num_pending > MAX_PENDING_TOKENS:
                self._window.pop()
            return ""
        if not text.endswith(REPLACEMENT):
            return self._emit(len(self._window), text)
        return self._emit_broken(text) if num_pending > MAX_PENDING_TOKENS else ""

    def _emit_broken(self, text: str) -> str:
        """Bytes that no character will come of, up to the last token border that cuts none apart."""
        for cut in range(len(self._window) - 1, max(self._num_out, len(self._window) - MAX_PENDING_TOKENS - 1), -1):
            head = self._decode(self._window[:cut])
            if head + self._decode(self._window[cut:]) == text:
                return self._emit(cut, head)
        return ""

    def _emit(self, cut: int, text: str) -> str:
        """Moves the window on: tokens before `cut`, whose text this is, are out."""
        piece = text[len(self._text_out) :]
        if cut > self._num_out:
            self._window, self._num_out = self._window[self._num_out :], cut - self._num_out
            self._text_out = self._decode(self._window[: self._num_out])
        return piece
