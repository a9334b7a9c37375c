"""What an answer must be: content of a form, calls of tools with arguments of their schemas, reasoning before them.

The engine bounds an answer as a whole. Where its content alone has a form, or calls are forced or strict, the whole is
written here as a grammar: in the model's own style, so that the parser reads it as it would any answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from turbojax.errors import InvalidFieldError
from turbojax.guided import bounded_blanks
from turbojax.serve.parsing.reasoning import TAGS, is_opened
from turbojax.serve.parsing.styles import Styles, writes_name_before_arguments
from turbojax.serve.parsing.tool_styles import ARGS, PYTHON_TAG, TOOL_CALL, TOOL_CALL_END, TOOL_CALLS

if TYPE_CHECKING:
    from turbojax.tokenizer import Tokenizer

Tools = Sequence[Mapping[str, Any]]
Form = Mapping[str, Any]
"""A response format of `turbojax.response_format`."""

# Of one answer that must call tools: small models do not find an end by themselves.
MAX_FORCED_CALLS = 8
# Llama's templates take one call for each answer.
STYLES_OF_ONE_CALL = ("llama3",)


def is_forced(choice: Any) -> bool:
    """Whether a tool_choice wants a call whatever the model thinks."""
    return choice == "required" or isinstance(choice, Mapping)


def answer_format(
    content: Form | None,
    choice: Any,
    tools: Tools,
    styles: Styles,
    tokenizer: Tokenizer,
    *,
    prompt: str = "",
    parallel_tool_calls: bool = True,
) -> dict[str, Any] | None:
    """The response format of a whole answer; None where it may be anything.

    Args:
        content: the response format that was asked for: of the content, not of reasoning and calls.
        choice: "none", "auto", "required", or {"type": "function", "function": {"name": ...}}.
        tools: in OpenAI's form; the arguments of a strict one fit its schema whenever it is called.
        styles: of the model.
        tokenizer: of the model: tags that are tokens must come as tokens.
        prompt: as the chat template wrote it; it may have opened or closed the reasoning.
        parallel_tool_calls: "required" may give several calls.

    Raises:
        InvalidFieldError: what is asked for contradicts itself, or nobody knows how the model writes calls.
    """
    content = None if content is None or content["type"] == "text" else content
    is_bound = is_forced(choice) or any(tool["function"].get("strict") for tool in tools)
    is_open = is_opened(prompt, styles.reasoning)
    callable_tools = chosen_tools(choice, tools) if styles.tool is not None else ()
    _check(content, choice, styles, is_bound=is_bound, is_whole=not callable_tools and not is_open)
    may_think = styles.reasoning is not None and is_open is not False
    if not is_bound and (content is None or content["type"] == "grammar" or not (may_think or callable_tools)):
        return None if content is None else dict(content)
    writer = _Writer(tokenizer, callable_tools)
    thought = writer.thought(TAGS[styles.reasoning], is_open=bool(is_open)) if styles.reasoning and may_think else ""
    is_one = choice != "required" or not parallel_tool_calls or styles.tool in STYLES_OF_ONE_CALL
    most_calls = 0 if not is_forced(choice) else 1 if is_one else MAX_FORCED_CALLS
    body = writer.answer(content, styles.tool, most_calls)
    return {"type": "grammar", "grammar": "\n".join([f"start: {thought}{body}", *writer.rules])}


def _check(content: Form | None, choice: Any, styles: Styles, *, is_bound: bool, is_whole: bool) -> None:
    """
    Args:
        content, choice, styles: see `answer_format`.
        is_bound: calls are forced or strict.
        is_whole: the answer is content and nothing else.

    Raises:
        InvalidFieldError: these do not go together.
    """
    if is_bound and styles.tool is None:
        param = "tool_choice" if is_forced(choice) else "tools"
        accepted = "tools that are neither required nor strict, or a server that is told its tool_call_parser"
        raise InvalidFieldError(param, f"how the model writes calls is not known; accepted: {accepted}")
    if is_forced(choice) and content is not None:
        raise InvalidFieldError("response_format", "a form of content beside a tool_choice that leaves none")
    if content is not None and content["type"] == "grammar" and not is_whole:
        accepted = "another form, or neither tools nor reasoning that the prompt has opened"
        raise InvalidFieldError("response_format", f"a grammar of the whole answer; accepted: {accepted}")


def chosen_tools(choice: Any, tools: Tools) -> Tools:
    """Those that may be called.

    Raises:
        InvalidFieldError: none, where one must be.
    """
    chosen = tools
    if isinstance(choice, Mapping):
        chosen = [tool for tool in tools if _name(tool) == choice["function"]["name"]]
    if is_forced(choice) and not chosen:
        names = ", ".join(map(_name, tools)) or "none"
        raise InvalidFieldError("tool_choice", f"no tool of this name; tools: {names}")
    return chosen


class _Writer:
    """Writes rules of llguidance's Lark. Methods give what stands for a part; `rules` are what that refers to."""

    def __init__(self, tokenizer: Tokenizer, tools: Tools) -> None:
        self._tokenizer, self._tools = tokenizer, tools
        self.rules = [f"args_{i}: %json {json.dumps(_schema(tool))}" for i, tool in enumerate(tools)]

    def thought(self, tags: tuple[str, str], *, is_open: bool) -> str:
        """Reasoning: it must come where the prompt has opened it, else it may."""
        opening, closing = tags
        self.rules += [r"SPACE: /[ \t\n]{0,8}/", f"think: {self._through(closing, 'thought')} SPACE"]
        return "think " if is_open else f"({self._tag(opening)} think)? "

    def answer(self, content: Form | None, style: str | None, most_calls: int) -> str:
        """What comes behind the reasoning: `most_calls` where they are forced (else 0), or content and calls."""
        if most_calls:
            return self.calls(style, most_calls)
        if content is None:
            return self.text_and_calls(style)
        if not self._tools:
            return self.content(content)
        return f"({self.content(content)} | {self.calls(style, MAX_FORCED_CALLS, is_beside_json=True)})"

    def content(self, form: Form) -> str:
        kind = form["type"]
        match kind:
            case "json_object":
                self.rules.append(f"content: %json {json.dumps(bounded_blanks({'type': 'object'}))}")
            case "json_schema":
                schema = json.loads(form[kind]) if isinstance(form[kind], str) else form[kind]
                self.rules.append(f"content: %json {json.dumps(bounded_blanks(schema.get('schema', schema)))}")
            case "regex_schema":
                self.rules.append(f"content: /{_in_slashes(form[kind])}/")
            case _:
                self.rules.append(f"content: {' | '.join(map(_literal, form[kind]))}")
        return "content"

    def calls(self, style: str | None, max_calls: int, *, is_beside_json: bool = False) -> str:
        """Calls and nothing else. Beside JSON that is content, Llama's stand behind a tag as well."""
        if style == "llama3":
            return (
                f"{self._tag(PYTHON_TAG)} {self._objects('parameters')}"
                if is_beside_json
                else self._objects("parameters")
            )
        tag, step, separator = self._step(style, max_calls)
        if max_calls == 1 or separator is None:
            return f"{tag} {step}"
        return f"{tag} {step} ({separator}{tag} {step}){{0,{max_calls - 1}}}"

    def text_and_calls(self, style: str | None) -> str:
        """Any text that has no call, and calls in it."""
        if style == "llama3":
            self.rules.append(rf"TEXT: /\s*[^\s{{](.|\n)*/ & ~/(.|\n)*{_escaped(PYTHON_TAG)}(.|\n)*/")
            objects = self._objects("parameters")
            return f"(TEXT? ({self._tag(PYTHON_TAG)} {objects})? | {objects})"
        opening = TOOL_CALLS if style == "mistral" else TOOL_CALL
        _, step, _ = self._step(style, MAX_FORCED_CALLS)
        self.rules += [f"step: {self._through(opening, 'before')} {step}", f"TAIL: {_without(opening)}"]
        return "step* TAIL?"

    def _step(self, style: str | None, max_calls: int) -> tuple[str, str, str | None]:
        """The tag of calls; what comes behind it; what stands before the next tag, None where one tag is for all."""
        if style in ("hermes", "qwen3_coder"):
            # Qwen3-Coder's own form has no place for a schema; what parses it takes objects too.
            return self._tag(TOOL_CALL), f'"\\n" {self._objects()} "\\n" {self._tag(TOOL_CALL_END)}', '"\\n" '
        tag = self._tag(TOOL_CALLS)
        if writes_name_before_arguments(self._tokenizer.chat_template):
            args = self._tag(ARGS)
            named = [f"{_literal(_name(tool))} {args} args_{i}" for i, tool in enumerate(self._tools)]
            return tag, f"({' | '.join(named)})", ""
        objects = self._objects()
        more = "" if max_calls == 1 else f' (", " {objects}){{0,{max_calls - 1}}}'
        return tag, f'"[" {objects}{more} "]"', None

    def _objects(self, key: str = "arguments") -> str:
        """One of {"name": ..., key: ...}, spaced as templates write it."""
        names = (json.dumps(_name(tool)) for tool in self._tools)
        forms = [_literal(f'{{"name": {name}, "{key}": ') + f" args_{i}" for i, name in enumerate(names)]
        return f'({" | ".join(forms)}) "}}"'

    def _through(self, tag: str, name: str) -> str:
        """Any text without a tag, and then the tag."""
        token = self._token(tag)
        if token is None:
            self.rules.append(f"{name}[lazy]: /(.|\\n)*{_escaped(tag)}/")
            return name
        self.rules.append(f"{name.upper()}: {_without(tag)}")
        return f"{name.upper()}? <[{token}]>"

    def _token(self, tag: str) -> int | None:
        backend = self._tokenizer.backend
        return None if backend is None else backend.token_to_id(tag)

    def _tag(self, tag: str) -> str:
        """The token of a tag, or its text where it is none."""
        token = self._token(tag)
        return _literal(tag) if token is None else f"(<[{token}]> | {_literal(tag)})"


def _name(tool: Mapping[str, Any]) -> str:
    name: str = tool["function"]["name"]
    return name


def _schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object always; a root of its own, so that its references hold."""
    schema = dict(tool["function"].get("parameters") or {})
    return bounded_blanks({"type": "object"} | schema)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _without(tag: str) -> str:
    """A terminal: text that does not have the tag."""
    return rf"/(.|\n)+/ & ~/(.|\n)*{_escaped(tag)}(.|\n)*/"


def _escaped(tag: str) -> str:
    return "".join(f"\\{char}" if char in "[]/|" else char for char in tag)


def _in_slashes(pattern: str) -> str:
    """A pattern as it stands between slashes."""
    shown, is_escaped = "", False
    for char in pattern.replace("\n", "\\n"):
        shown += "\\/" if char == "/" and not is_escaped else char
        is_escaped = char == "\\" and not is_escaped
    return shown
