"""Text to token ids and back: one small face for Hugging Face folders and GGUF files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turbojax.chat_template import kwargs_of, variables_of
from turbojax.errors import InvalidPromptError, TokenizerError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


class Tokenizer:
    """A transformers tokenizer, reduced to what generation needs."""

    def __init__(self, inner: Any, chat_template: str | None = None) -> None:
        """`chat_template` is one to use in place of the tokenizer's own."""
        self._inner, self._chat_template = inner, chat_template
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
        return self.chat_template is not None

    @property
    def chat_template(self) -> str | None:
        """The Jinja template that conversations are written with; of several, the one that knows tools."""
        own = self._inner.chat_template
        if isinstance(own, Mapping):
            own = own.get("tool_use", own.get("default"))
        return self._chat_template or own

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template shows tools to the model."""
        return self.chat_template is not None and "tools" in variables_of(self.chat_template)

    @property
    def template_kwargs(self) -> frozenset[str]:
        """What a conversation can set in its chat template beside messages and tools, as `enable_thinking`."""
        if self.chat_template is None:
            return frozenset()
        return kwargs_of(self.chat_template, self._inner.special_tokens_map)

    def with_chat_template(self, chat_template: str) -> Tokenizer:
        """The same tokenizer with another template."""
        return Tokenizer(self._inner, chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the start token where the model wants one.

        Raises:
            InvalidPromptError: it has half a surrogate pair, which JSON can name and no tokenizer takes.
        """
        try:
            return self._inner.encode(text, add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeError) as error:
            if text.isascii():
                raise
            raise InvalidPromptError("the text has half a surrogate pair, which is no character") from error

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

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The text that the model's chat template makes of a conversation.

        transformers renders it in jinja2's immutable sandbox: a template reaches no file, no module and no attribute
        that begins with an underscore, and changes none of its arguments. Its loops are bounded by what it is given
        and by ranges of 100,000; nested ones are not, so a template is to be trusted as much as the model it is of.

        Args:
            messages: with `role` and `content`.
            tools: that the model may call, in OpenAI's form.
            template_kwargs: variables for the template, of `template_kwargs`.
            add_generation_prompt: the text ends where the assistant's answer begins.
            continue_final_message: it ends within the last message, which the model then goes on with.

        Raises:
            InvalidPromptError: the model has no chat template, or it refuses the messages, takes no tools, or does not
                know a variable.
        """
        if self.chat_template is None:
            raise InvalidPromptError("the model has no chat template: give a text or token ids instead of messages")
        try:
            self._check_template_takes(tools, template_kwargs or {})
            return self._inner.apply_chat_template(
                [dict(m) for m in messages],
                tools=[dict(tool) for tool in tools] or None,
                chat_template=self._chat_template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(template_kwargs or {}),
            )
        except InvalidPromptError:
            raise
        except Exception as error:  # a template is a program, and can fail in all the ways that one does
            raise InvalidPromptError(f"the model's chat template refuses the messages: {error}") from error

    def _check_template_takes(self, tools: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any]) -> None:
        if tools and not self.takes_tools:
            raise InvalidPromptError("the model's chat template takes no tools")
        unknown = sorted(set(template_kwargs) - self.template_kwargs)
        if unknown:
            accepted = ", ".join(sorted(self.template_kwargs)) or "none"
            raise InvalidPromptError(f"the model's chat template does not read {unknown[0]!r}; accepted: {accepted}")


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
