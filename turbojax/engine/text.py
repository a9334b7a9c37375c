"""What a request says as it runs: its tokens as text, cut at stop words, handed on piece by piece."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from turbojax.engine.detokenizer import Detokenizer, StopWords
from turbojax.engine.request import Progress

Decode = Callable[[Sequence[int]], str]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Response:
    """What came of a prompt; in a stream, what came since the piece before.

    Attributes:
        text: generated text, without stop words and stop tokens; empty for a model without a tokenizer.
        token_ids: generated tokens, the stop token included.
        finish_reason: `stop` (a stop token or stop word), `length` (max_new_tokens or session_len), `error`; None in
            a stream that goes on.
        num_input_tokens: of the prompt.
        num_generated_tokens: so far, the stop token included.
        error: what went wrong, if it did.
        index: of the prompt in its list.
    """

    text: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    num_input_tokens: int = 0
    num_generated_tokens: int = 0
    error: str | None = None
    index: int = 0


class TextSink:
    """A request's sink: turns progress into response pieces and delivers them, all in the engine's thread."""

    def __init__(
        self,
        deliver: Callable[[Response], None],
        decode: Decode | None,
        *,
        stop_words: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        min_new_tokens: int = 0,
        num_input_tokens: int = 0,
        index: int = 0,
        whole: bool = False,
    ) -> None:
        """`whole` delivers one piece, at the end; where no stop word is looked for, it is decoded only then."""
        self._deliver, self._decode = deliver, decode
        self._detokenizer = None if decode is None else Detokenizer(decode)
        self._stop_words = StopWords(stop_words) if stop_words else None
        self._stop_token_ids = frozenset(stop_token_ids)
        self._min_new_tokens, self._num_input_tokens, self._index = min_new_tokens, num_input_tokens, index
        self._num_tokens = 0
        self._whole, self._reads_text = whole, not whole or bool(stop_words)
        self._held_text, self._held_ids = "", list[int]()

    def __call__(self, progress: Progress) -> bool:
        """Delivers the piece; True if a stop word ended the text or nobody listens: the request must end too."""
        if not self._reads_text and progress.finish_reason is None:
            self._held_ids += progress.token_ids
            return False
        try:
            text, token_ids, stopped = self._advance(progress) if self._reads_text else self._finish(progress)
        except Exception as error:  # a decoder's failure ends this request, not the engine's thread
            self._send("", [], "error", f"{type(error).__name__}: {error}")
            return True
        reason = "stop" if stopped else progress.finish_reason
        if self._whole:
            text, token_ids = self._held_text + text, self._held_ids + token_ids
            if reason is None:
                self._held_text, self._held_ids = text, token_ids
                return False
        heard = self._send(text, token_ids, reason, None if progress.error is None else str(progress.error))
        return stopped or not heard

    def _finish(self, progress: Progress) -> tuple[str, list[int], bool]:
        """The text of all tokens at once: it is what the pieces of a stream give together."""
        ids = [token for token in (*self._held_ids, *progress.token_ids) if token not in self._stop_token_ids]
        self._num_tokens = len(self._held_ids) + len(progress.token_ids)
        return "" if self._decode is None else self._decode(ids), progress.token_ids, False

    def _advance(self, progress: Progress) -> tuple[str, list[int], bool]:
        """The text and tokens of a piece, and whether it ran into a stop word; tokens behind one are dropped."""
        detokenizer, stop_words, text = self._detokenizer, self._stop_words, ""
        for i, token in enumerate(progress.token_ids):
            self._num_tokens += 1
            if detokenizer is None or token in self._stop_token_ids:
                continue
            piece = detokenizer.push_token(token)
            if stop_words is not None and self._num_tokens > self._min_new_tokens:
                piece = stop_words.push(piece)
                if stop_words.found is not None:
                    return text + piece, progress.token_ids[: i + 1], True
            text += piece
        if progress.finish_reason is not None and detokenizer is not None:
            rest = detokenizer.flush()
            if stop_words is not None:
                rest = stop_words.push(rest) + stop_words.flush()
                return text + rest, progress.token_ids, stop_words.found is not None
            text += rest
        return text, progress.token_ids, False

    def _send(self, text: str, token_ids: list[int], reason: str | None, error: str | None) -> bool:
        """Whether the piece was taken: a listener that is gone (a closed event loop) must not take the engine along."""
        piece = Response(text, token_ids, reason, self._num_input_tokens, self._num_tokens, error, self._index)
        try:
            self._deliver(piece)
        except Exception as gone:
            log.warning("prompt %d ends, its listener is gone: %s: %s", self._index, type(gone).__name__, gone)
            return False
        return True
