"""Answers as the models' documentation shows them, with what they consist of, written by hand."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from turbojax.serve.parsing import Content, Delta, Reasoning, Styles, ToolCallArguments, ToolCallStart, make_parser

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "hourly": {"type": "boolean"},
                    "units": {"type": ["string", "null"]},
                    "at": {"type": "object"},
                    "step": {"type": ["string", "integer"]},
                    "span": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "get_time"}},
]


class Found(NamedTuple):
    """All that came of an answer: texts, and (name, arguments) of each call."""

    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    reasoning: str = ""
    num_malformed: int = 0


def pieces_of(text: str, cuts: Iterable[int]) -> list[str]:
    edges = [0, *sorted(cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def deltas_of(
    styles: Styles, pieces: Iterable[str], *, tools: Sequence[dict] = TOOLS, prompt: str = "", parallel: bool = True
) -> tuple[list[Delta], int]:
    ids = iter(f"id{i}" for i in range(1000))
    parser = make_parser(
        styles, tools, prompt=prompt, parallel_tool_calls=parallel, new_call_id=lambda: next(ids)
    )  # fmt: skip
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return deltas + parser.finish(), parser.num_malformed_calls


def gather(deltas: Iterable[Delta], num_malformed: int = 0) -> Found:
    """Everything of each kind; checks that calls are numbered in order and begin before their arguments."""
    content, reasoning, names, arguments = "", "", list[str](), list[str]()
    for delta in deltas:
        match delta:
            case Content(text):
                content += text
            case Reasoning(text):
                assert not content
                assert not names, "reasoning comes first"
                reasoning += text
            case ToolCallStart(index, call_id, name):
                assert index == len(names)
                assert call_id == f"id{index}"
                names.append(name)
                arguments.append("")
            case ToolCallArguments(index, text):
                assert index == len(names) - 1
                arguments[index] += text
    return Found(content, tuple(zip(names, arguments, strict=True)), reasoning, num_malformed)


def found(styles: Styles, pieces: Iterable[str], **options) -> Found:
    return gather(*deltas_of(styles, pieces, **options))


HERMES, CODER, LLAMA, MISTRAL = (Styles(tool) for tool in ("hermes", "qwen3_coder", "llama3", "mistral"))
QWEN3, MAGISTRAL = Styles("hermes", "think"), Styles("mistral", "mistral")
PARIS = ("get_weather", '{"city": "Paris"}')

# name: (styles, text, what it consists of)
ANSWERS: dict[str, tuple[Styles, str, Found]] = {
    "hermes: one call": (
        HERMES,
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        Found("", (PARIS,)),
    ),
    "hermes: text, then two calls": (
        HERMES,
        "Let me look.\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
        Found("Let me look.", (PARIS, ("get_time", "{}"))),
    ),
    "hermes: arguments keep their text": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": '
        '{ "a" : [1.50, {"b":"}</tool_call>\\" \\u00e9"}],\n "c": null } }</tool_call>',
        Found("", (("f", '{ "a" : [1.50, {"b":"}</tool_call>\\" \\u00e9"}],\n "c": null }'),)),
    ),
    "hermes: arguments before the name, other keys": (
        HERMES,
        '<tool_call>{"id": 3, "arguments": {"a": 1}, "type": "function", "name": "f"}</tool_call>',
        Found("", (("f", '{"a": 1}'),)),
    ),
    "hermes: arguments as a text": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\u00fc\\"}"}</tool_call>',
        Found("", (("f", '{"a": "ü"}'),)),
    ),
    "hermes: no arguments": (HERMES, '<tool_call>{"name": "f"}</tool_call>', Found("", (("f", "{}"),))),
    "hermes: null for arguments": (
        HERMES,
        '<tool_call>{"arguments": null, "name": "f"}</tool_call>',
        Found("", (("f", "{}"),)),
    ),
    "hermes: a list in one tag": (
        HERMES,
        '<tool_call>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"x": 1}}]</tool_call>',
        Found("", (("f", "{}"), ("g", '{"x": 1}'))),
    ),
    "hermes: text behind a call": (
        HERMES,
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n\nDone, I think. ',
        Found("Done, I think. ", (("f", "{}"),)),
    ),
    "hermes: the closing tag is missing": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {}}\n',
        Found("", (("f", "{}"),)),
    ),
    "hermes: the text ends within the closing tag": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {}}\n</tool_',
        Found("", (("f", "{}"),)),
    ),
    "hermes: the text ends within the arguments": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"city": "Par',
        Found("", (("f", '{"city": "Par'),), num_malformed=1),
    ),
    "hermes: the text ends before the name": (
        HERMES,
        'Well <tool_call>{"na',
        Found('Well <tool_call>{"na', num_malformed=1),
    ),
    "hermes: no JSON": (
        HERMES,
        "See: <tool_call>get_weather(Paris)</tool_call> ok",
        Found("See: <tool_call>get_weather(Paris)</tool_call> ok", num_malformed=1),
    ),
    "hermes: no name": (
        HERMES,
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        Found('<tool_call>{"arguments": {"a": 1}}</tool_call>', num_malformed=1),
    ),
    "hermes: a number for a name": (
        HERMES,
        '<tool_call>{"name": 3}</tool_call>',
        Found('<tool_call>{"name": 3}</tool_call>', num_malformed=1),
    ),
    "hermes: JSON goes wrong behind the name": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>!',
        Found("}}!", (("f", '{"a": oops'),), num_malformed=1),
    ),
    "hermes: arguments that are no object": (
        HERMES,
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        Found("}", (("f", ""),), num_malformed=1),
    ),
    "hermes: one brace too many": (
        HERMES,
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}}\n</tool_call>',
        Found("}", (("f", '{"a": 1}'),), num_malformed=1),
    ),
    "hermes: a call after one that went wrong": (
        HERMES,
        '<tool_call>nope</tool_call>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        Found("<tool_call>nope</tool_call>", (("f", "{}"),), num_malformed=1),
    ),
    "hermes: beginnings of tags are text": (HERMES, "a < b <tool <tool_cal > <", Found("a < b <tool <tool_cal > <")),
    "hermes: only space": (HERMES, " \n", Found(" \n")),
    "qwen3: reasoning, then text": (
        QWEN3,
        "<think>\nThe user greets.\n\nSo do I.\n</think>\n\nHello!",
        Found("Hello!", reasoning="The user greets.\n\nSo do I."),
    ),
    "qwen3: reasoning, then a call": (
        QWEN3,
        "<think>\nI need <tool_call>.\n</think>\n\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        Found("", (PARIS,), "I need <tool_call>."),
    ),
    "qwen3: empty reasoning": (QWEN3, "<think>\n\n</think>\n\nHi", Found("Hi")),
    "qwen3: no reasoning": (QWEN3, "\nHi <think>there</think>", Found("\nHi <think>there</think>")),
    "qwen3: the text ends within the reasoning": (QWEN3, "<think>\nHm, ", Found(reasoning="Hm, ")),
    "qwen3: beginnings of tags in the reasoning": (
        QWEN3,
        "<think>a </thin b</ </think>c",
        Found("c", reasoning="a </thin b</"),
    ),
    "coder: one call": (
        CODER,
        "I will look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        Found("I will look.", (("get_weather", '{"city": "Paris", "days": 3}'),)),
    ),
    "coder: values by their types": (
        CODER,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n12\n</parameter>\n<parameter=hourly>\nTrue\n</parameter>\n"
        '<parameter=units>\n5\n</parameter>\n<parameter=at>\n{"lat": 1.5}\n</parameter>\n<parameter=days>\nmany\n'
        "</parameter>\n<parameter=other>\n[1]\n</parameter>\n</function>\n</tool_call>",
        Found(
            "",
            (
                (
                    "get_weather",
                    '{"city": "12", "hourly": true, "units": "5", "at": {"lat": 1.5}, "days": "many", "other": [1]}',
                ),
            ),
        ),
    ),
    "coder: values of one of several types": (
        CODER,
        "<tool_call>\n<function=get_weather>\n<parameter=units>\nnull\n</parameter>\n<parameter=step>\n5\n</parameter>\n"
        "<parameter=span>\nNone\n</parameter>\n</function>\n</tool_call>",
        Found("", (("get_weather", '{"units": null, "step": 5, "span": null}'),)),
    ),
    "coder: numbers that JSON does not have": (
        CODER,
        "<function=f>\n<parameter=a>\nNaN\n</parameter>\n<parameter=b>\n1e999\n</parameter>\n</function>",
        Found("", (("f", '{"a": "NaN", "b": "1e999"}'),)),
    ),
    "coder: texts of several lines": (
        CODER,
        '<tool_call>\n<function=get_time>\n<parameter=code>\n\nif a < b:\n    print("</x>")\n\n</parameter>\n'
        "</function>\n</tool_call>",
        Found("", (("get_time", '{"code": "\\nif a < b:\\n    print(\\"</x>\\")\\n"}'),)),
    ),
    "coder: no parameters, two calls": (
        CODER,
        "<tool_call>\n<function=get_time>\n</function>\n</tool_call>\n<tool_call>\n<function=f>\n</function>\n</tool_call>",
        Found("", (("get_time", "{}"), ("f", "{}"))),
    ),
    "coder: the outer tag is missing": (
        CODER,
        "Now <function=get_time>\n</function>\n</tool_call>",
        Found("Now", (("get_time", "{}"),)),
    ),
    "coder: the text ends within a value": (
        CODER,
        "<tool_call>\n<function=get_weather>\n<parameter=days>\n3\n</parameter>\n<parameter=city>\nPar",
        Found("", (("get_weather", '{"days": 3, "city": "Par'),), num_malformed=1),
    ),
    "coder: text between parameters": (
        CODER,
        "<tool_call><function=f>\nhm</function></tool_call>",
        Found("hm</function>", (("f", ""),), num_malformed=1),
    ),
    "coder: a JSON object": (CODER, '<tool_call>{"name": "f", "arguments": {}}</tool_call>', Found("", (("f", "{}"),))),
    "llama: one call": (LLAMA, '{"name": "get_weather", "parameters": {"city": "Paris"}}', Found("", (PARIS,))),
    "llama: type first": (
        LLAMA,
        '\n{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}',
        Found("", (PARIS,)),
    ),
    "llama: several calls": (
        LLAMA,
        '{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "get_time", "parameters": {}}',
        Found("", (PARIS, ("get_time", "{}"))),
    ),
    "llama: behind the tag, of any name": (
        LLAMA,
        '<|python_tag|>{"name": "f", "parameters": {"city": "Paris"}}',
        Found("", (("f", '{"city": "Paris"}'),)),
    ),
    "llama: text, the tag, two calls": (
        LLAMA,
        'One moment. <|python_tag|>{"name": "f", "parameters": {}};{"name": "g", "arguments": {"x": "; {"}} ;',
        Found("One moment.", (("f", "{}"), ("g", '{"x": "; {"}'))),
    ),
    "llama: JSON that is no call": (LLAMA, '{"city": "Paris", "name": "x"}', Found('{"city": "Paris", "name": "x"}')),
    "llama: JSON that names no tool": (
        LLAMA,
        '{"name": "Ada", "parameters": {}} and more',
        Found('{"name": "Ada", "parameters": {}} and more'),
    ),
    "llama: a call within text": (
        LLAMA,
        'It is {"name": "get_time", "parameters": {}}',
        Found('It is {"name": "get_time", "parameters": {}}'),
    ),
    "llama: code behind the tag": (
        LLAMA,
        '<|python_tag|>brave_search.call(query="x")',
        Found('<|python_tag|>brave_search.call(query="x")', num_malformed=1),
    ),
    "llama: text behind a call": (
        LLAMA,
        '{"name": "get_time", "parameters": {}}\nThat is it',
        Found("That is it", (("get_time", "{}"),)),
    ),
    "mistral: a list": (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, '
        '{"name": "get_time", "arguments": {}, "id": "9Ae3bDc2F"}]',
        Found("", (PARIS, ("get_time", "{}"))),
    ),
    "mistral: text, then a list": (
        MISTRAL,
        'I will check.[TOOL_CALLS][{"arguments": {"city": "Paris"}, "name": "get_weather"}]',
        Found("I will check.", (PARIS,)),
    ),
    "mistral: names before arguments": (
        MISTRAL,
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[ARGS]{}',
        Found("", (PARIS, ("get_time", "{}"))),
    ),
    "mistral: with an id": (
        MISTRAL,
        '[TOOL_CALLS]get_weather[CALL_ID]9Ae3bDc2F[ARGS]{"city": "Paris"}',
        Found("", (PARIS,)),
    ),
    "mistral: without the tag of arguments": (
        MISTRAL,
        'Ok[TOOL_CALLS]get_weather{"city": "Paris"}',
        Found("Ok", (PARIS,)),
    ),
    "mistral: the list ends early": (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "get_time", "arguments": {}}, {"na',
        Found(', {"na', (("get_time", "{}"),), num_malformed=1),
    ),
    "mistral: no arguments": (
        MISTRAL,
        "[TOOL_CALLS]get_time and so on",
        Found("and so on", (("get_time", ""),), num_malformed=1),
    ),
    "mistral: brackets are text": (MISTRAL, "a[0] [TOOL_ [TOOL_CALLS", Found("a[0] [TOOL_ [TOOL_CALLS")),
    "magistral: reasoning, text, a call": (
        MAGISTRAL,
        '[THINK]Hm [1].[/THINK]Sure.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}',
        Found("Sure.", (PARIS,), "Hm [1]."),
    ),
    "no style: all is text": (
        Styles(),
        '<think>a</think> <tool_call>{"name": "f"}</tool_call> [TOOL_CALLS]',
        Found('<think>a</think> <tool_call>{"name": "f"}</tool_call> [TOOL_CALLS]'),
    ),
}
