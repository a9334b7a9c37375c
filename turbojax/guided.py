"""Guided decoding: response formats as guides, through llguidance (the extra `guided`)."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from turbojax.engine.guides import Guide, num_mask_words
from turbojax.errors import ConfigError, GuideError, MissingExtraError

if TYPE_CHECKING:
    from turbojax.tokenizer import Tokenizer

# JSON lets white space go on for ever between two tokens, and small models take the invitation: they break lines where
# they should write. One blank is what separates words in JSON as programs write it.
WHITESPACE = r"[ \n]?"
MAX_KEPT_GRAMMARS = 64
# A tenth of llguidance's own: "(a{1000}){1000}" is then refused after a third of a second instead of 11.
LEXER_FUEL = 100_000


class GuideCompiler:
    """Makes guides for one model; the tokenizer is read once. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """
        Raises:
            MissingExtraError: llguidance is not installed.
            ConfigError: the tokenizer cannot be read by it.
        """
        if importlib.util.find_spec("llguidance") is None:
            raise MissingExtraError("response_format needs llguidance: pip install 'turbojax[guided]'")
        from llguidance import LLTokenizer

        if tokenizer.backend is None:
            raise ConfigError("GenerationConfig", "response_format", "given", "None: the tokenizer is no fast one")
        text, self._vocab_size = tokenizer.backend.to_str(), vocab_size
        try:
            self._tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_ids) or None)
        except ValueError as error:
            accepted = f"None: llguidance cannot read the tokenizer: {error}"
            raise ConfigError("GenerationConfig", "response_format", "given", accepted) from error
        self._matcher = functools.lru_cache(MAX_KEPT_GRAMMARS)(self._compiled)

    def guide(self, response_format: Mapping[str, Any]) -> Guide:
        """A fresh guide, at the beginning of an answer. The same format is compiled once.

        Raises:
            ConfigError: it does not compile, and why.
        """
        try:
            text = json.dumps(dict(response_format))
        except (TypeError, ValueError) as error:
            raise _refusal(response_format, str(error)) from error
        return GrammarGuide(self._matcher(text).deep_copy(), self._vocab_size)

    def _compiled(self, response_format: str) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        parts = json.loads(response_format)
        try:
            grammar = _grammar(parts)
        except ValueError as error:  # a schema that is no JSON
            raise _refusal(parts, str(error)) from error
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._tokenizer)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LLParserLimits(initial_lexer_fuel=LEXER_FUEL))
        if failed or matcher.is_error():
            raise _refusal(parts, messages[0] if messages else matcher.get_error())
        try:
            self._try(GrammarGuide(matcher.deep_copy(), self._vocab_size))
        except GuideError as error:
            raise _refusal(parts, str(error)) from error
        return matcher

    def _try(self, guide: GrammarGuide) -> None:
        """Goes one token on: a grammar that is too complex to follow shows at once, and not in the middle of an answer.

        Raises:
            GuideError: it is.
        """
        words = guide.mask()
        first_word = int(np.flatnonzero(words)[0])
        first_bit = int(words[first_word]) & -int(words[first_word])
        guide.advance([32 * first_word + first_bit.bit_length() - 1])
        if not guide.is_finished:
            guide.mask()


class GrammarGuide:
    """Follows a grammar; an end-of-sequence token may come where the text can end."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self.vocab_size = matcher, vocab_size

    def advance(self, token_ids: Sequence[int]) -> None:
        if not self._matcher.consume_tokens(list(token_ids)):
            raise GuideError(f"tokens {list(token_ids)} do not follow the response format")

    def mask(self) -> np.ndarray:
        mask = np.zeros(num_mask_words(self.vocab_size), np.uint32)
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error() or not mask.any():
            raise GuideError(f"no token follows the response format here: {_first_line(self._matcher.get_error())}")
        return mask

    @property
    def is_finished(self) -> bool:
        return self._matcher.is_stopped()


def _grammar(response_format: Mapping[str, Any]) -> str:
    """llguidance's own form of a response format."""
    from llguidance import LLMatcher

    kind = response_format["type"]
    rest: Any = response_format.get(kind)
    match kind:
        case "regex_schema":
            return LLMatcher.grammar_from_regex(rest)
        case "grammar":
            return LLMatcher.grammar_from_lark(rest)
        case "choice":
            return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in rest))
        case "json_object":
            schema: Any = {"type": "object"}
        case _:
            schema = json.loads(rest) if isinstance(rest, str) else rest
            schema = schema.get("schema", schema) if isinstance(schema, Mapping) else schema
    if not isinstance(schema, Mapping):
        raise ValueError("a JSON schema is an object")
    return LLMatcher.grammar_from_json_schema(bounded_blanks(schema))


def bounded_blanks(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with `WHITESPACE`, where it does not say itself what may stand between two tokens."""
    given = schema.get("x-guidance", {})
    if not isinstance(given, Mapping):
        return dict(schema)  # llguidance says what is wrong with it
    return {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE, **given}}


def _refusal(response_format: Mapping[str, Any], reason: str) -> ConfigError:
    accepted = f"a {response_format['type']} that compiles: {_first_line(reason)}"
    return ConfigError("GenerationConfig", "response_format", dict(response_format), accepted)


def _first_line(text: str) -> str:
    return " ".join(text.split("<state>")[0].split())
