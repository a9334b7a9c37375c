"""Text to token ids and back: one small face for Hugging Face folders and GGUF files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turbojax.errors import InvalidPromptError, TokenizerError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


class Tokenizer:
    """A transformers tokenizer, reduced to what generation needs."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        # transformers wraps it at four times the cost of a call, which streaming pays twice for every token.
        self._backend = getattr(inner, "backend_tokenizer", None)

    @property
    def vocab_size(self) -> int:
        return len(self._inner)

    @property
    def backend(self) -> Any:
        """The `tokenizers.Tokenizer` behind it; None for one that is written in Python."""
        return self._backend

    @property
    def bos_id(self) -> int | None:
        return self._inner.bos_token_id

    @property
    def eos_id(self) -> int | None:
        return self._inner.eos_token_id

    @property
    def has_chat_template(self) -> bool:
        return self._inner.chat_template is not None

    @property
    def chat_template(self) -> str | None:
        """The Jinja template that conversations are written with."""
        return self._inner.chat_template

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the start token where the model wants one."""
        return self._inner.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids, as it is: spaces before punctuation stay."""
        if self._backend is not None:
            return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return self._inner.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def save(self, folder: Path) -> None:
        """Writes tokenizer and chat template as Hugging Face files, which `load_tokenizer` reads."""
        self._inner.save_pretrained(folder)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation; see `render_chat` for what it raises."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt)
        # The template writes the start token itself.
        return self.encode(text, add_special_tokens=False)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The text that the model's chat template makes of a conversation.

        Raises:
            InvalidPromptError: the model has no chat template, or it refuses the messages.
        """
        from jinja2 import TemplateError

        if not self.has_chat_template:
            raise InvalidPromptError("the model has no chat template: give a text or token ids instead of messages")
        try:
            return self._inner.apply_chat_template(
                [dict(m) for m in messages], tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except (TemplateError, KeyError, TypeError, ValueError) as error:
            raise InvalidPromptError(f"the model's chat template refuses the messages: {error}") from error


def quiet_transformers() -> None:
    """At import, transformers would advise to install torch, which is not needed."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def load_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint; None for a folder that has none, which serves token ids.

    Raises:
        TokenizerError: its files are broken, or of a kind that is not supported.
    """
    if path.suffix == ".gguf":
        quiet_transformers()
        from turbojax.gguf_tokenizer import gguf_tokenizer

        return Tokenizer(gguf_tokenizer(path))
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        return None
    quiet_transformers()
    from transformers import AutoTokenizer

    try:
        return Tokenizer(AutoTokenizer.from_pretrained(path, local_files_only=True))
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TokenizerError(f"{path}: the tokenizer cannot be loaded: {reason}") from error
