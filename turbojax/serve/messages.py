"""OpenAI's messages and tools to the prompt that the model's chat template makes of them."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from turbojax.errors import InvalidFieldError, InvalidPromptError, MissingTokenizerError
from turbojax.serve import bounds

if TYPE_CHECKING:
    from turbojax.tokenizer import Tokenizer

JsonObject = Mapping[str, Any]

_NAME = re.compile(rf"[a-zA-Z0-9_.-]{{1,{bounds.MAX_NAME_LEN}}}")
# What clients send back with an answer that they got, and that says nothing here.
_ECHOED = ("refusal", "audio", "function_call", "annotations")
_FIELDS = {
    "system": ("name",),
    "user": ("name",),
    "assistant": ("name", "tool_calls", "reasoning_content", *_ECHOED),
    "tool": ("name", "tool_call_id"),
}
# Templates know no developer: newer models' name for the system.
_SAME_ROLE = {"developer": "system"}


def render(
    messages: Sequence[JsonObject],
    tools: Sequence[JsonObject],
    template_kwargs: JsonObject | None,
    tokenizer: Tokenizer | None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> str:
    """The prompt. It has the template's own special tokens: encode it without adding any.

    Args:
        messages: in OpenAI's form.
        tools: likewise; those that the model is told of.
        template_kwargs: what else the template is to know, as Qwen3's `enable_thinking`.
        tokenizer: of the model.
        add_generation_prompt: the prompt ends where the answer begins.
        continue_final_message: it ends within the last message, which the answer goes on with.

    Raises:
        InvalidFieldError: names the path of what is wrong.
        InvalidPromptError: the template refuses the messages.
        MissingTokenizerError: there is no tokenizer.
    """
    if tokenizer is None:
        raise MissingTokenizerError("messages: the model has no tokenizer; /v1/completions takes token ids")
    kwargs = dict(template_kwargs or {})
    check_template_kwargs(kwargs, tokenizer)
    if tools and not tokenizer.takes_tools:
        hint = "a server started with --chat-template FILE can use one that does"
        raise InvalidFieldError("tools", f"the model's chat template shows no tools; accepted: none, or {hint}")
    if add_generation_prompt and continue_final_message:
        accepted = "False beside continue_final_message"
        raise InvalidFieldError("add_generation_prompt", f"True; accepted: {accepted}")
    write = functools.partial(
        tokenizer.render_chat,
        tools=template_tools(tools),
        template_kwargs=kwargs,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
    )
    made = template_messages(messages)
    try:
        return write(made)
    except InvalidPromptError as error:
        if isinstance(error.__cause__, TypeError) and any("tool_calls" in message for message in made):
            return write([_with_texts(message) for message in made])
        raise


def _with_texts(message: JsonObject) -> dict[str, Any]:
    """The same with arguments of calls as texts of JSON: DeepSeek's templates put them between other texts."""
    calls = [dict(call) for call in message.get("tool_calls", ())]
    for call in calls:
        call["function"] = {
            **call["function"],
            "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
        }
    return {**message, "tool_calls": calls} if calls else dict(message)


def check_template_kwargs(kwargs: JsonObject, tokenizer: Tokenizer) -> None:
    """
    Raises:
        InvalidFieldError: the template does not read one, or they are too many or too large.
    """
    param = "chat_template_kwargs"
    bounds.check_count(param, kwargs, bounds.MAX_TEMPLATE_KWARGS)
    known = tokenizer.template_kwargs
    for name, value in kwargs.items():
        if name not in known:
            accepted = ", ".join(sorted(known)) or "nothing"
            raise InvalidFieldError(
                f"{param}.{name}", f"the model's chat template does not read it; it reads {accepted}"
            )
        bounds.check_json(f"{param}.{name}", value)


def template_messages(messages: Sequence[JsonObject]) -> list[dict[str, Any]]:
    """Messages as chat templates take them: contents are texts, arguments of calls are objects.

    Raises:
        InvalidFieldError: names the path of what is wrong.
    """
    if not messages:
        raise InvalidFieldError("messages", "an empty list; accepted: at least one message")
    bounds.check_count("messages", messages, bounds.MAX_MESSAGES)
    return [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _message(path: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _refused(path, message, "an object with role and content")
    role = _SAME_ROLE.get(str(message.get("role")), message.get("role"))
    if not isinstance(role, str) or role not in _FIELDS:
        raise _refused(f"{path}.role", message.get("role"), f"one of {', '.join((*_FIELDS, *_SAME_ROLE))}")
    for key, value in message.items():
        if key not in ("role", "content", *_FIELDS[role]):
            raise InvalidFieldError(f"{path}.{key}", f"unknown in a message of role {role}")
        if key in _ECHOED and value not in (None, []):
            raise _refused(f"{path}.{key}", value, "null: this server takes and gives none")
    made: dict[str, Any] = {"role": role}
    for key, read in _READERS.items():
        if message.get(key) is not None:
            made[key] = read(f"{path}.{key}", message[key])
    if not made.get("tool_calls"):
        made.pop("tool_calls", None)
    if "content" not in made:
        if "tool_calls" not in made:
            raise _refused(f"{path}.content", message.get("content"), "a text, or a list of parts of type text")
        made["content"] = ""  # templates write a null out
    if role == "tool" and "tool_call_id" not in made:
        raise _refused(f"{path}.tool_call_id", None, "the id of the call that this is the result of")
    return made


def _content(path: str, content: Any) -> str:
    """Parts of text, each on a line of its own."""
    if isinstance(content, str):
        return _utf8(path, content)
    if not isinstance(content, list) or not content:
        raise _refused(path, content, "a text, or a list of parts of type text")
    bounds.check_count(path, content, bounds.MAX_CONTENT_PARTS)
    return "\n".join(_part(f"{path}[{i}]", part) for i, part in enumerate(content))


def _part(path: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str):
        raise _refused(path, part, 'an object {"type": "text", "text": ...}')
    if kind != "text":
        raise InvalidFieldError(f"{path}.type", f"{kind[:40]!r}; accepted: 'text', since the model takes text alone")
    for key in part:
        if key not in ("type", "text"):
            raise InvalidFieldError(f"{path}.{key}", "unknown in a part of type text")
    if not isinstance(part.get("text"), str):
        raise _refused(f"{path}.text", part.get("text"), "a text")
    return _utf8(f"{path}.text", part["text"])


def _tool_calls(path: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _refused(path, calls, "a list of tool calls")
    bounds.check_count(path, calls, bounds.MAX_TOOL_CALLS)
    return [_tool_call(f"{path}[{i}]", call) for i, call in enumerate(calls)]


def _tool_call(path: str, call: Any) -> dict[str, Any]:
    _check_keys(path, call, ("id", "type", "function", "index"))
    if call.get("type", "function") != "function":
        raise _refused(f"{path}.type", call["type"], "'function'")
    function, made = call.get("function"), {"type": "function"}
    _check_keys(f"{path}.function", function, ("name", "arguments"))
    if call.get("id") is not None:
        made["id"] = _id(f"{path}.id", call["id"])
    name = _name(f"{path}.function.name", function.get("name"))
    return {**made, "function": {"name": name, "arguments": _arguments(f"{path}.function.arguments", function)}}


def _arguments(path: str, function: JsonObject) -> JsonObject:
    """An object; OpenAI writes it as a text, templates want it as it is."""
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise InvalidFieldError(path, f"a text that is no JSON ({error}); accepted: a JSON object") from error
    if not isinstance(arguments, Mapping):
        raise _refused(path, arguments, "a JSON object, or its text")
    bounds.check_json(path, arguments)
    return arguments


def _text(path: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _refused(path, value, "a text")
    return _utf8(path, value)


def _id(path: str, value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= bounds.MAX_ID_LEN:
        raise _refused(path, value, f"a text of 1 .. {bounds.MAX_ID_LEN} characters")
    return _utf8(path, value)


def _name(path: str, value: Any) -> str:
    if not isinstance(value, str) or _NAME.fullmatch(value) is None:
        raise _refused(path, value, f"1 .. {bounds.MAX_NAME_LEN} letters, digits, underscores, dots and dashes")
    return value


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "content": _content,
    "reasoning_content": _text,
    "tool_calls": _tool_calls,
    "tool_call_id": _id,
    "name": _name,
}


def template_tools(tools: Sequence[JsonObject]) -> list[dict[str, Any]]:
    """Tools as templates print them: type and function, of the function its name, description and parameters.

    Raises:
        InvalidFieldError: names the path of what is wrong.
    """
    bounds.check_count("tools", tools, bounds.MAX_TOOLS)
    made = [_tool(f"tools[{i}]", tool) for i, tool in enumerate(tools)]
    names = [tool["function"]["name"] for tool in made]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise InvalidFieldError(f"tools[{i}].function.name", f"{name!r} again; accepted: names that differ")
    return made


def _tool(path: str, tool: Any) -> dict[str, Any]:
    _check_keys(path, tool, ("type", "function"))
    if tool.get("type") != "function":
        raise _refused(f"{path}.type", tool.get("type"), "'function'")
    function, path = tool.get("function"), f"{path}.function"
    _check_keys(path, function, ("name", "description", "parameters", "strict"))
    made: dict[str, Any] = {"name": _name(f"{path}.name", function.get("name"))}
    if function.get("description") is not None:
        made["description"] = _text(f"{path}.description", function["description"])
    parameters = function.get("parameters")
    if parameters is not None:
        if not isinstance(parameters, Mapping):
            raise _refused(f"{path}.parameters", parameters, "a JSON schema, which is an object")
        bounds.check_schema(f"{path}.parameters", parameters)
        made["parameters"] = parameters
    return {"type": "function", "function": made}


def _check_keys(path: str, value: Any, known: Sequence[str]) -> None:
    if not isinstance(value, Mapping):
        raise _refused(path, value, f"an object with {', '.join(known)}")
    for key in value:
        if key not in known:
            raise InvalidFieldError(f"{path}.{key}", f"unknown; accepted: {', '.join(known)}")


def _utf8(path: str, text: str) -> str:
    """JSON can name half a character, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidFieldError(path, f"half a surrogate pair at {error.start}; accepted: text of Unicode") from error
    return text


def _refused(path: str, value: Any, accepted: str) -> InvalidFieldError:
    shown = repr(value)
    return InvalidFieldError(path, f"{shown if len(shown) <= 80 else type(value).__name__}; accepted: {accepted}")
