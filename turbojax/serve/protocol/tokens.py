"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from turbojax.serve import bounds
from turbojax.serve.protocol.base import Strict
from turbojax.serve.protocol.chat import Messages, Tool
from turbojax.serve.protocol.sampling import TokenId


class TokenizeText(Strict):
    """A text as it is; `add_special_tokens` is for a start token, where the model wants one."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChat(Strict):
    """A conversation, as the chat template writes it."""

    model: str | None = None
    messages: Messages
    tools: Annotated[list[Tool], Field(max_length=bounds.MAX_TOOLS)] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class Tokenized(BaseModel):
    """`max_model_len` is the most tokens of a sequence, prompt and answer."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=1 << 20)]
    skip_special_tokens: bool = False


class Detokenized(BaseModel):
    prompt: str
