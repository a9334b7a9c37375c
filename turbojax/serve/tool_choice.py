"""A tool that must be called, as a grammar of the answer: in the model's own style, with arguments of its schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from turbojax.errors import InvalidFieldError
from turbojax.guided import WHITESPACE
from turbojax.serve.parsing.reasoning import TAGS, is_opened
from turbojax.serve.parsing.styles import Styles, writes_name_before_arguments
from turbojax.serve.parsing.tool_styles import ARGS, TOOL_CALL, TOOL_CALL_END, TOOL_CALLS

if TYPE_CHECKING:
    from turbojax.tokenizer import Tokenizer

Tools = Sequence[Mapping[str, Any]]

# Of one answer that must call tools: small models do not find an end by themselves.
MAX_FORCED_CALLS = 8


def is_forced(choice: Any) -> bool:
    """Whether a tool_choice wants a call whatever the model thinks."""
    return choice == "required" or isinstance(choice, Mapping)


def tool_format(
    choice: Any,
    tools: Tools,
    styles: Styles,
    tokenizer: Tokenizer,
    *,
    prompt: str = "",
    parallel_tool_calls: bool = True,
) -> dict[str, Any] | None:
    """The response format that makes an answer call tools; None where it may do as it likes.

    Args:
        choice: "none", "auto", "required", or {"type": "function", "function": {"name": ...}}.
        tools: in OpenAI's form.
        styles: of the model.
        tokenizer: of the model: tags that are tokens must come as tokens.
        prompt: as the chat template wrote it; reasoning that it opened comes before the call.
        parallel_tool_calls: "required" may give several calls.

    Raises:
        InvalidFieldError: no such tool, or nobody knows how the model writes calls.
    """
    if not is_forced(choice):
        return None
    if styles.tool is None:
        message = (
            "how the model writes calls is not known; accepted: 'none', 'auto', or a server with a tool_call_parser"
        )
        raise InvalidFieldError("tool_choice", message)
    chosen = tools
    if isinstance(choice, Mapping):
        name = choice["function"]["name"]
        chosen = [tool for tool in tools if tool["function"]["name"] == name]
    if not chosen:
        names = ", ".join(tool["function"]["name"] for tool in tools) or "none"
        raise InvalidFieldError("tool_choice", f"no tool of this name; tools: {names}")
    # Llama's templates take one call for each answer.
    is_one = choice != "required" or not parallel_tool_calls or styles.tool == "llama3"
    writer = _Writer(tokenizer, chosen, "" if is_one else f"{{0,{MAX_FORCED_CALLS - 1}}}")
    rules = [f"start: {writer.reasoning(styles.reasoning, prompt)}calls", *writer.calls(styles.tool), *writer.rules]
    return {"type": "grammar", "grammar": "\n".join(rules)}


class _Writer:
    """Writes rules of llguidance's Lark."""

    def __init__(self, tokenizer: Tokenizer, tools: Tools, more: str) -> None:
        """`more` repeats what comes after the first call; "" is nothing."""
        self._tokenizer, self._tools, self._more = tokenizer, tools, more
        self.rules = [f"args_{i}: %json {json.dumps(_schema(tool))}" for i, tool in enumerate(tools)]

    def reasoning(self, style: str | None, prompt: str) -> str:
        """What may come before the calls: reasoning, where the prompt has not ended it."""
        is_open = is_opened(prompt, style)
        if style is None or is_open is False:
            return ""
        tags = TAGS[style]
        self.rules.append(r"SPACE: /[ \t\n]{0,8}/")
        if self._token(tags.close) is not None:
            self.rules.append(f"think: /(.|\\n)*/ {self._tag(tags.close)} SPACE")
        else:
            self.rules += [
                "think: thought SPACE", f"thought[lazy]: /(.|\\n)*{_escaped(tags.close)}/",
            ]  # fmt: skip
        return "think " if is_open else f"({self._tag(tags.open)} think)? "

    def calls(self, style: str) -> list[str]:
        if style == "llama3":
            return [f"calls: {self._objects('parameters')}"]
        if style in ("hermes", "qwen3_coder"):
            # Qwen3-Coder's own form has no place for a schema; what parses it takes objects too.
            opening, closing = self._tag(TOOL_CALL), self._tag(TOOL_CALL_END)
            more = f' ("\\n" call){self._more}' if self._more else ""
            return [f"calls: call{more}", f'call: {opening} "\\n" object "\\n" {closing}', f"object: {self._objects()}"]
        tag = self._tag(TOOL_CALLS)
        if writes_name_before_arguments(self._tokenizer.chat_template):
            separator = self._tag(ARGS)
            named = [f"{json.dumps(_name(tool))} {separator} args_{i}" for i, tool in enumerate(self._tools)]
            more = f" call{self._more}" if self._more else ""
            return [f"calls: call{more}", f"call: {tag} ({' | '.join(named)})"]
        more = f' (", " object){self._more}' if self._more else ""
        return [f'calls: {tag} "[" object{more} "]"', f"object: {self._objects()}"]

    def _objects(self, key: str = "arguments") -> str:
        """One of {"name": ..., key: ...}, spaced as templates write it."""
        forms = []
        for i, tool in enumerate(self._tools):
            opening = f'{{"name": {json.dumps(_name(tool))}, "{key}": '
            forms.append(f"{json.dumps(opening)} args_{i}")
        return f'({" | ".join(forms)}) "}}"'

    def _token(self, tag: str) -> int | None:
        backend = self._tokenizer.backend
        return None if backend is None else backend.token_to_id(tag)

    def _tag(self, tag: str) -> str:
        """The token of a tag, or its text where it is none."""
        token = self._token(tag)
        return json.dumps(tag) if token is None else f"(<[{token}]> | {json.dumps(tag)})"


def _name(tool: Mapping[str, Any]) -> str:
    name: str = tool["function"]["name"]
    return name


def _schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object always; a root of its own, so that its references hold."""
    schema = dict(tool["function"].get("parameters") or {})
    if "type" not in schema:
        schema["type"] = "object"
    return schema | {"x-guidance": {"whitespace_pattern": WHITESPACE}}


def _escaped(tag: str) -> str:
    return "".join(f"\\{char}" if char in "[]/" else char for char in tag)
