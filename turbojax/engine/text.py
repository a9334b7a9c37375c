"""What a request says as it runs: its tokens as text, cut at stop words, handed on piece by piece."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from turbojax.engine.detokenizer import Detokenizer
from turbojax.engine.request import Progress
from turbojax.engine.response import Answer, Response
from turbojax.engine.stopping import NgramStop, StopRules, StopWords

Decode = Callable[[Sequence[int]], str]

NO_RULES = StopRules()

log = logging.getLogger(__name__)


class Piece(NamedTuple):
    """The text of some tokens; `num_tokens` of them belong to it, the rest came behind a stop. `is_end`: a stop."""

    text: str
    num_tokens: int
    is_end: bool


class TextReader:
    """Reads tokens as they come; gives the text that is safe to show, and ends it as its rules say."""

    def __init__(self, decode: Decode | None, rules: StopRules, decode_stop: Decode | None = None) -> None:
        self._rules, self._decode_stop = rules, decode_stop
        self._detokenizer = None if decode is None else Detokenizer(decode)
        self._stop_words = StopWords(rules.words) if rules.words else None
        self._ngrams = NgramStop(rules.ngram_size, rules.ngram_threshold) if rules.ngram_size else None
        self._watches = self._stop_words is not None or self._ngrams is not None
        self._num_tokens = 0

    def read(self, token_ids: Sequence[int], *, is_last: bool) -> Piece:
        """The piece that these tokens give; after the last ones nothing is held back any more."""
        text = ""
        if self._watches:
            for i, token in enumerate(token_ids, start=1):
                text += self._push(token)
                if self._found_word:
                    return Piece(text + self._stop_text(token), i, True)
                if self._repeats(token):
                    return Piece(text + self._flush(), i, True)
        elif self._detokenizer is not None:  # at once, which costs a fraction of one by one
            text = self._detokenizer.push([token for token in token_ids if token not in self._rules.token_ids])
        if not is_last:
            return Piece(text, len(token_ids), False)
        text += self._flush()
        last = token_ids[-1] if token_ids else None
        if self._found_word or last in self._rules.token_ids:
            text += self._stop_text(last)
        return Piece(text, len(token_ids), self._found_word)

    @property
    def _found_word(self) -> bool:
        return self._stop_words is not None and self._stop_words.found is not None

    @property
    def _may_stop(self) -> bool:
        return self._num_tokens > self._rules.min_new_tokens

    def _push(self, token: int) -> str:
        self._num_tokens += 1
        if self._detokenizer is None or token in self._rules.token_ids:
            return ""
        text = self._detokenizer.push_token(token)
        return self._stop_words.push(text) if self._stop_words is not None and self._may_stop else text

    def _repeats(self, token: int) -> bool:
        return self._ngrams is not None and self._ngrams.push(token) and self._may_stop

    def _flush(self) -> str:
        """The text that was held back: the beginning of a character, or of a stop word."""
        rest = "" if self._detokenizer is None else self._detokenizer.flush()
        return rest if self._stop_words is None else self._stop_words.push(rest) + self._stop_words.flush()

    def _stop_text(self, last: int | None) -> str:
        """The stop word or stop token as text, where it is to be seen."""
        if not self._rules.shows_stop:
            return ""
        if self._stop_words is not None and self._stop_words.found is not None:
            return self._stop_words.found
        return "" if self._decode_stop is None or last is None else self._decode_stop([last])


class TextSink:
    """A request's sink: turns progress into response pieces and delivers them, all in the engine's thread."""

    def __init__(
        self,
        deliver: Callable[[Response], None],
        decode: Decode | None,
        rules: StopRules = NO_RULES,
        *,
        decode_stop: Decode | None = None,
        prompt_ids: Sequence[int] | np.ndarray = (),
        index: int = 0,
        sample_index: int = 0,
        whole: bool = False,
        wants_prompt_logprobs: bool = False,
    ) -> None:
        """`whole` delivers one piece, at the end; unless a rule reads the tokens, it is decoded only then."""
        self._deliver, self._decode, self._rules, self._decode_stop = deliver, decode, rules, decode_stop
        self._reader = TextReader(decode, rules, decode_stop)
        self._answer, self._index = (
            Answer(prompt_ids, index, sample_index, wants_prompt_logprobs=wants_prompt_logprobs),
            index,
        )
        self._whole, self._reads_tokens = whole, not whole or rules.reads_tokens

    def __call__(self, progress: Progress) -> bool:
        """Delivers the piece; True if a rule ended the text or nobody listens: the request must end too."""
        is_last = progress.finish_reason is not None
        if not is_last and not (self._reads_tokens and progress.token_ids):
            self._answer.add(progress, len(progress.token_ids))
            return False
        try:
            piece = self._read(progress, is_last)
        except Exception as error:  # a decoder's failure ends this request, not the engine's thread
            self._send("error", f"{type(error).__name__}: {error}", progress)
            return True
        self._answer.add(progress, piece.num_tokens, piece.text)
        reason = "stop" if piece.is_end else progress.finish_reason
        if self._whole and reason is None:
            return False
        failure = None if progress.error is None else str(progress.error)
        heard = self._send(reason, failure, progress)
        return piece.is_end or not heard

    def _read(self, progress: Progress, is_last: bool) -> Piece:
        """The next piece; where nothing was read so far, the whole: what the pieces of a stream give together."""
        if self._reads_tokens:
            return self._reader.read(progress.token_ids, is_last=is_last)
        ids = [*self._answer.token_ids, *progress.token_ids]
        shown = [token for token in ids if token not in self._rules.token_ids]
        text = "" if self._decode is None else self._decode(shown)
        if self._rules.shows_stop and self._decode_stop is not None and ids and ids[-1] in self._rules.token_ids:
            text += self._decode_stop(ids[-1:])
        return Piece(text, len(progress.token_ids), False)

    def _send(self, reason: str | None, error: str | None, progress: Progress) -> bool:
        """Whether the piece was taken: a listener that is gone (a closed event loop) must not take the engine along."""
        try:
            self._deliver(self._answer.hand_on(reason, error, progress))
        except Exception as gone:
            log.warning("prompt %d ends, its listener is gone: %s: %s", self._index, type(gone).__name__, gone)
            return False
        return True
