"""Prompts in every form that users give them, to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from turbojax.errors import EmptyPromptError, InvalidPromptError, MissingTokenizerError

if TYPE_CHECKING:
    from turbojax.tokenizer import Tokenizer

Message = Mapping[str, Any]
Prompt = str | Sequence[Message] | Sequence[int] | np.ndarray
"""A text, chat messages, or token ids."""

FORMS = "a text, a list of chat messages (dicts with 'role' and 'content'), or a list of token ids"


def is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_one_prompt(prompts: Any) -> bool:
    """Whether this is one prompt and not a list of them. An empty list is one (empty) prompt of token ids."""
    if isinstance(prompts, str):
        return True
    if isinstance(prompts, np.ndarray):
        return prompts.ndim == 1
    return isinstance(prompts, Sequence) and all(isinstance(p, Mapping) or is_int(p) for p in prompts)


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, or several, as a list.

    Raises:
        InvalidPromptError: neither.
    """
    if is_one_prompt(prompts):
        return [prompts]  # type: ignore[list-item]
    if not isinstance(prompts, Sequence | np.ndarray):
        raise InvalidPromptError(f"a prompt is {type(prompts).__name__}; accepted: {FORMS}, or a list of these")
    for index, prompt in enumerate(prompts):
        if not is_one_prompt(prompt):
            raise InvalidPromptError(f"prompt {index} is {type(prompt).__name__}; accepted: {FORMS}")
    return list(prompts)


def encode(
    prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int, name: str, *, do_preprocess: bool = True
) -> np.ndarray:
    """Token ids of one prompt, int32 [T].

    Args:
        prompt: see `Prompt`.
        tokenizer: None if the model has none.
        vocab_size: ids are below it.
        name: of the prompt, for errors.
        do_preprocess: a text becomes the user's message of a chat, where the model has a chat template.

    Raises:
        EmptyPromptError: an empty text, even where the tokenizer would put a start token in front of it.
        MissingTokenizerError: text without a tokenizer.
        InvalidPromptError: token ids out of range, or messages that are none.
    """
    if isinstance(prompt, str) and not prompt:
        raise EmptyPromptError(f"{name}: the prompt is empty")
    if isinstance(prompt, str) or (len(prompt) and isinstance(prompt[0], Mapping)):
        if tokenizer is None:
            raise MissingTokenizerError(f"{name}: the model has no tokenizer; give a list of token ids")
        return np.asarray(encode_text(prompt, tokenizer, do_preprocess), np.int32)  # type: ignore[arg-type]
    ids = np.asarray(prompt if len(prompt) else np.zeros(0, np.int32))
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidPromptError(
            f"{name}: token ids are {ids.dtype} {list(ids.shape)}; a flat list of ints is expected"
        )
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if len(wrong):
        raise InvalidPromptError(f"{name}: token id {wrong[0]} is outside the vocabulary of {vocab_size}")
    return ids.astype(np.int32)


def encode_text(prompt: str | Sequence[Message], tokenizer: Tokenizer, do_preprocess: bool) -> Sequence[int]:
    """Token ids of a text or of chat messages."""
    if not isinstance(prompt, str):
        return tokenizer.apply_chat_template(prompt)
    if do_preprocess and tokenizer.has_chat_template:
        return tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    return tokenizer.encode(prompt)
