"""A conversation as token ids that only grow: what was computed for a turn stays the beginning of the next one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from turbojax.errors import EmptyPromptError, InvalidPromptError
from turbojax.prompts import FORMS, Message, Prompt, encode, is_one_prompt

if TYPE_CHECKING:
    from turbojax.tokenizer import Tokenizer

# Stands for an answer where the chat template is asked what it writes around one.
MARK = "answer-{}-58c1d0f7"


@dataclass(frozen=True)
class Turn:
    """What the model continues: the whole conversation with a new prompt.

    Attributes:
        token_ids: int32 [T].
        messages: those that are new; None for text without a template, and for token ids.
        rendered: what the template makes of the conversation, with marks for answers; None without a template.
    """

    token_ids: np.ndarray
    messages: tuple[Message, ...] | None = None
    rendered: str | None = None


class Conversation:
    """Token ids and messages so far.

    An answer stays as the tokens that the model gave, less the one that ended it: text that is tokenised again may
    come out differently, and then nothing behind it is found in the prefix cache. What a chat template writes between
    an answer and the next prompt is found by rendering the conversation with marks for the answers. A template that
    changes what came before (one that moves the system message, say) is followed: such a turn is tokenised anew.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: Sequence[int] = ()) -> None:
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, frozenset(eos_ids)
        self.token_ids = np.zeros(0, np.int32)
        self.messages: list[Message] = []
        self._marked: list[Message] = []  # the same with marks for answers
        self._rendered: str | None = None  # what the template made of it, up to the mark of the last answer

    def ask(self, prompt: Prompt, *, do_preprocess: bool = True) -> Turn:
        """The conversation with another prompt; nothing is kept before `answer`.

        Args:
            prompt: a text (the user's message, where the model has a chat template), messages, or token ids.
            do_preprocess: False takes a text as it is.

        Raises:
            RequestError: an invalid prompt, or one of another kind than those before.
        """
        if not is_one_prompt(prompt):
            raise InvalidPromptError(f"the prompt is {type(prompt).__name__}; accepted: {FORMS}")
        if len(prompt) == 0:
            raise EmptyPromptError("the prompt is empty")
        tokenizer, is_text = self._tokenizer, isinstance(prompt, str)
        is_chat = isinstance(prompt[0], Mapping)
        if is_text and do_preprocess and tokenizer is not None and tokenizer.has_chat_template:
            prompt, is_chat = [{"role": "user", "content": prompt}], True
        if len(self.token_ids) and is_chat != bool(self.messages):
            kinds = ("messages", "plain text or token ids")
            came, accepted = kinds if is_chat else kinds[::-1]
            raise InvalidPromptError(f"the prompt is {came}; this conversation began with, and accepts, {accepted}")
        if is_chat and tokenizer is not None:
            return self._ask_with_template(tokenizer, tuple(prompt))  # type: ignore[arg-type]
        if is_text and tokenizer is not None and len(self.token_ids):
            new = np.asarray(tokenizer.encode(prompt, add_special_tokens=False), np.int32)  # type: ignore[arg-type]
        else:
            new = encode(prompt, tokenizer, self._vocab_size, "the prompt", do_preprocess=False)
        return Turn(np.concatenate([self.token_ids, new]))

    def _ask_with_template(self, tokenizer: Tokenizer, new: tuple[Message, ...]) -> Turn:
        rendered = tokenizer.render_chat([*self._marked, *new])
        if self._rendered is None or not rendered.startswith(self._rendered):
            token_ids = np.asarray(tokenizer.apply_chat_template([*self.messages, *new]), np.int32)
            return Turn(token_ids, new, rendered)
        between = tokenizer.encode(rendered[len(self._rendered) :], add_special_tokens=False)
        return Turn(np.concatenate([self.token_ids, np.asarray(between, np.int32)]), new, rendered)

    def answer(self, turn: Turn, token_ids: Sequence[int], text: str, stop_token_ids: Sequence[int] = ()) -> None:
        """Takes in what came of a turn: its tokens, and their text without what stopped it.

        Args:
            turn: of the conversation as it is.
            token_ids: generated ones; a last one that ends sequences is left out, the template writes its own.
            text: of the answer.
            stop_token_ids: tokens that ended this answer beside the model's own.
        """
        if token_ids and (token_ids[-1] in self._eos_ids or token_ids[-1] in stop_token_ids):
            token_ids = token_ids[:-1]
        self.token_ids = np.concatenate([turn.token_ids, np.asarray(token_ids, np.int32)])
        if turn.messages is not None and turn.rendered is not None:
            mark = MARK.format(len(self.messages))
            self.messages += [*turn.messages, {"role": "assistant", "content": text}]
            self._marked += [*turn.messages, {"role": "assistant", "content": mark}]
            self._rendered = turn.rendered + mark
