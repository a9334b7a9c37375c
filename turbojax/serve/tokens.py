"""POST /tokenize and /detokenize: what the model's tokenizer and chat template make of texts, and back."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends

from turbojax.errors import MissingTokenizerError
from turbojax.serve.generation import naming
from turbojax.serve.messages import render
from turbojax.serve.models import check_model
from turbojax.serve.openai_errors import ApiError
from turbojax.serve.protocol.tokens import Detokenized, DetokenizeRequest, TokenizeChat, Tokenized, TokenizeText
from turbojax.serve.replies import documented
from turbojax.serve.service import Service, service_of
from turbojax.tokenizer import Tokenizer

router = APIRouter(tags=["tokens"])
ServiceArg = Annotated[Service, Depends(service_of)]


@router.post("/tokenize", responses=documented(Tokenized))
async def tokenize(body: TokenizeText | TokenizeChat, service: ServiceArg) -> Tokenized:
    """Token ids of a text or of a conversation."""
    tokenizer = checked(service, body.model)
    with naming("prompt" if isinstance(body, TokenizeText) else "messages"):
        ids = await asyncio.to_thread(encode, service, tokenizer, body)
    names = await asyncio.to_thread(names_of, service, ids) if body.return_token_strs else None
    return Tokenized(count=len(ids), max_model_len=service.pipe.session_len, tokens=ids, token_strs=names)


@router.post("/detokenize", responses=documented(Detokenized))
async def detokenize(body: DetokenizeRequest, service: ServiceArg) -> Detokenized:
    """The text of token ids."""
    tokenizer = checked(service, body.model)
    wrong = next((token for token in body.tokens if token >= tokenizer.vocab_size), None)
    if wrong is not None:
        message = f"token id {wrong} is outside the tokenizer's vocabulary of {tokenizer.vocab_size}"
        raise ApiError(400, message, param="tokens")
    decode = tokenizer.decode
    text = await asyncio.to_thread(decode, body.tokens, skip_special_tokens=body.skip_special_tokens)
    return Detokenized(prompt=text)


def encode(service: Service, tokenizer: Tokenizer, body: TokenizeText | TokenizeChat) -> list[int]:
    if isinstance(body, TokenizeText):
        return tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    kwargs, wants_prompt = body.chat_template_kwargs, body.add_generation_prompt
    text = render(body.messages, tools, kwargs, tokenizer, add_generation_prompt=wants_prompt)
    return tokenizer.encode(text, add_special_tokens=False)


def names_of(service: Service, token_ids: list[int]) -> list[str]:
    """Takes half a second for each million tokens, so not in the event loop."""
    return [service.token_texts.name_of(token) for token in token_ids]


def checked(service: Service, model: str | None) -> Tokenizer:
    """The tokenizer of the model that a request names, if it names one.

    Raises:
        ApiError: 404, another model.
        MissingTokenizerError: it has none.
    """
    if model is not None:
        check_model(model, service)
    if service.tokenizer is None:
        raise MissingTokenizerError("the model has no tokenizer; give token ids to /v1/completions")
    return service.tokenizer
