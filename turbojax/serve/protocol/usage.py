"""The tokens that a request took."""

from __future__ import annotations

from pydantic import BaseModel


class PromptTokensDetails(BaseModel):
    """`cached_tokens` of the prompt were found in the prefix cache."""

    cached_tokens: int = 0


class CompletionTokensDetails(BaseModel):
    """`reasoning_tokens` of the answer came before what it says."""

    reasoning_tokens: int = 0


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
