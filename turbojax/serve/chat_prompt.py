"""What the model reads of a chat: its messages and tools as the chat template writes them."""

from __future__ import annotations

from typing import Any, NamedTuple

from turbojax.errors import MissingTokenizerError
from turbojax.serve.answer_format import answer_format
from turbojax.serve.generation import as_engine_format
from turbojax.serve.messages import render
from turbojax.serve.openai_errors import ApiError
from turbojax.serve.protocol.chat import ChatRequest, NamedTool
from turbojax.serve.service import Service

EFFORT, THINKING = "reasoning_effort", "enable_thinking"


class ChatPrompt(NamedTuple):
    """A prompt as text and token ids; the tools that the model may call; the form of the whole answer.

    `is_form_of_tools`: it comes of their schemas alone.
    """

    text: str
    token_ids: list[int]
    tools: list[dict[str, Any]]
    response_format: dict[str, Any] | None
    is_form_of_tools: bool


def chat_prompt(service: Service, body: ChatRequest) -> ChatPrompt:
    """The prompt of a request. Takes milliseconds for each 10,000 tokens, so not in the event loop.

    Raises:
        ApiError, RequestError: a message, a tool or a template argument is none that the model can be told.
    """
    if service.tokenizer is None:
        raise MissingTokenizerError("the model has no tokenizer; use /v1/completions with token ids")
    tools = tools_of(body)
    kwargs = template_kwargs(body, service.tokenizer.chat_template or "")
    continues, begins = bool(body.continue_final_message), body.add_generation_prompt
    text = render(
        body.messages, tools, kwargs, service.tokenizer, continue_final_message=continues,
        add_generation_prompt=not continues if begins is None else begins,
    )  # fmt: skip
    choice = body.tool_choice.model_dump() if isinstance(body.tool_choice, NamedTool) else body.tool_choice
    content = None if body.response_format is None else as_engine_format(body.response_format)
    form = answer_format(
        content, choice, tools, service.styles, service.tokenizer, prompt=text,
        parallel_tool_calls=body.parallel_tool_calls is not False,
    )  # fmt: skip
    # The template writes the start token itself.
    token_ids = service.tokenizer.encode(text, add_special_tokens=False)
    return ChatPrompt(text, token_ids, tools, form, is_form_of_tools=body.response_format is None)


def tools_of(body: ChatRequest) -> list[dict[str, Any]]:
    """The tools that the model is told of, in OpenAI's form: none where it must not call any.

    Raises:
        ApiError: what is said of tools contradicts itself.
    """
    if not body.tools:
        for name in ("tool_choice", "parallel_tool_calls"):
            if getattr(body, name) not in (None, "none"):
                raise ApiError(400, f"{name} goes with tools", param=name)
        return []
    return [] if body.tool_choice == "none" else [tool.model_dump(exclude_none=True) for tool in body.tools]


def template_kwargs(body: ChatRequest, template: str) -> dict[str, Any]:
    """What the chat template is told beside messages and tools.

    Raises:
        ApiError: reasoning is asked for in a way that the template does not know.
    """
    kwargs = dict(body.chat_template_kwargs or {})
    if body.enable_thinking is not None:
        if THINKING not in template:
            raise ApiError(400, f"the model's chat template has no {THINKING}", param=THINKING)
        kwargs[THINKING] = body.enable_thinking
    effort = body.reasoning_effort
    if effort is not None:
        if EFFORT in template:
            kwargs[EFFORT] = effort
        elif THINKING in template and effort == "none":
            kwargs[THINKING] = False
        else:
            accepted = "'none'" if THINKING in template else "null"
            message = f"{EFFORT} is '{effort}'; the model's chat template knows no levels, accepted: {accepted}"
            raise ApiError(400, message, param=EFFORT)
    return kwargs
