"""The text of one choice of /v1/completions as it grows, and the table of its tokens' log-probabilities."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from turbojax.engine.response import LogprobOf, Response
from turbojax.serve.protocol.completions import CompletionLogprobs
from turbojax.serve.token_texts import TokenTexts, as_json_number


@dataclass
class Echo:
    """The prompt as it comes back: its text and its tokens."""

    text: str
    token_ids: Sequence[int]


class CompletionText:
    """Reads the pieces of one choice. With an echo, the first piece has the prompt before its own text.

    Args:
        tokens: names of tokens.
        echo: the prompt, where it was asked for.
        num_top: so many of the likeliest tokens are listed for each; None: no log-probabilities.
        hides_special: special tokens are no part of the text.
        has_answer: False leaves out what was generated.
    """

    def __init__(
        self, tokens: TokenTexts, echo: Echo | None, *, num_top: int | None, hides_special: bool, has_answer: bool
    ) -> None:
        self._tokens, self._echo, self._num_top = tokens, echo, num_top
        self._hides_special, self._has_answer = hides_special, has_answer
        self._num_chars = 0  # of all text up to the next token
        self._decoder = new_decoder()

    def read(self, piece: Response) -> tuple[str, CompletionLogprobs | None]:
        """The text that a piece adds, and the rows of its tokens."""
        echo, self._echo = self._echo, None
        text = "" if echo is None else echo.text
        table = None if self._num_top is None else empty_table()
        if echo is not None:
            if table is not None:
                self._add_prompt(table, echo, piece.prompt_logprobs or [None] * len(echo.token_ids))
            self._num_chars, self._decoder = len(echo.text), new_decoder()
        if self._has_answer:
            text += piece.text
            if table is not None:
                for token, found in zip(piece.token_ids, piece.logprobs or (), strict=True):
                    self._add(table, token, found)
                    if not (self._hides_special and self._tokens.is_special(token)):
                        self._num_chars += len(self._decoder.decode(self._tokens.bytes_of(token)))
        return text, table

    def _add_prompt(self, table: CompletionLogprobs, echo: Echo, rows: Sequence[LogprobOf | None]) -> None:
        """A start token that the tokenizer added, or a space, is not found in the text and takes no room in it."""
        for token, found in zip(echo.token_ids, rows, strict=True):
            self._add(table, token, found)
            text = self._decoder.decode(self._tokens.bytes_of(token))
            for written in (text, text.lstrip()):
                if echo.text.startswith(written, self._num_chars):
                    self._num_chars += len(written)
                    break

    def _add(self, table: CompletionLogprobs, token: int, found: Mapping[int, float] | None) -> None:
        assert self._num_top is not None
        table.tokens.append(self._tokens.name_of(token))
        table.text_offset.append(self._num_chars)
        table.token_logprobs.append(None if found is None else as_json_number(found[token]))
        names = None
        if found is not None:
            likeliest = list(found.items())[: self._num_top]
            names = {self._tokens.name_of(one): as_json_number(logprob) for one, logprob in likeliest}
        table.top_logprobs.append(names)


def empty_table() -> CompletionLogprobs:
    return CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])


def new_decoder() -> codecs.IncrementalDecoder:
    """Of bytes to text as tokenizers have it; a character comes with the last of its bytes."""
    return codecs.getincrementaldecoder("utf-8")("replace")


def joined(tables: Sequence[CompletionLogprobs]) -> CompletionLogprobs | None:
    """The tables of a choice's pieces as one; None where there are none."""
    if not tables:
        return None
    whole = empty_table()
    for table in tables:
        whole.tokens += table.tokens
        whole.token_logprobs += table.token_logprobs
        whole.top_logprobs += table.top_logprobs
        whole.text_offset += table.text_offset
    return whole
