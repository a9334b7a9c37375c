"""The guide of a request: its response format and its bad words, from what one model needs but once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from turbojax.engine.bad_words import BadWords, Vocabulary
from turbojax.engine.guides import AllOf, Guide
from turbojax.errors import ConfigError, MissingTokenizerError, TokenizerError
from turbojax.generation import GenerationConfig

if TYPE_CHECKING:
    from turbojax.guided import GuideCompiler
    from turbojax.tokenizer import Tokenizer


class GuideMaker:
    """Makes the guides of one model. Any thread may call it; the tokenizer's tables are made when first needed."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, tuple(eos_ids)
        self._lock = threading.Lock()
        self._compiler: GuideCompiler | None = None
        self._vocabularies: dict[bool, Vocabulary] = {}  # by skip_special_tokens

    def guide(self, config: GenerationConfig) -> Guide | None:
        """A fresh guide; None where the config has nothing to bound its tokens.

        Raises:
            MissingTokenizerError: the model has no tokenizer.
            MissingExtraError: the package for response formats is not installed.
            ConfigError: the response format does not compile, or the tokenizer's tokens cannot be read.
        """
        guides: list[Guide] = []
        if config.response_format is not None and config.response_format["type"] != "text":
            guides.append(self._compiled().guide(config.response_format))
        if config.bad_words:
            vocabulary = self._vocabulary(config.skip_special_tokens)
            guides.append(BadWords(config.bad_words, vocabulary, self._vocab_size))
        return AllOf(guides) if len(guides) > 1 else guides[0] if guides else None

    def _compiled(self) -> GuideCompiler:
        with self._lock:
            if self._compiler is None:
                from turbojax.guided import GuideCompiler

                self._compiler = GuideCompiler(self._needed("response_format"), self._vocab_size, self._eos_ids)
            return self._compiler

    def _vocabulary(self, skip_special_tokens: bool) -> Vocabulary:
        with self._lock:
            if skip_special_tokens not in self._vocabularies:
                from turbojax.vocabulary import vocabulary_of

                tokenizer = self._needed("bad_words")
                try:
                    found = vocabulary_of(tokenizer, skip_special_tokens=skip_special_tokens)
                except TokenizerError as error:
                    raise ConfigError("GenerationConfig", "bad_words", "given", f"(): {error}") from error
                self._vocabularies[skip_special_tokens] = found
            return self._vocabularies[skip_special_tokens]

    def _needed(self, field: str) -> Tokenizer:
        if self._tokenizer is None:
            raise MissingTokenizerError(f"{field}: the model has no tokenizer, so its tokens have no text")
        return self._tokenizer
