"""A tool that must be called: the grammar takes what the model's format and the schemas allow, and nothing else."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.serve.parsing.answers import Found, found
from tests.serve.scripted import ADDED, make_tokenizer
from turbojax.errors import InvalidFieldError
from turbojax.guided import _grammar
from turbojax.serve.parsing import Styles
from turbojax.serve.tool_choice import MAX_FORCED_CALLS, tool_format

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"City": {"enum": ["Paris", "Rome"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "get", "parameters": CITY}},
    {"type": "function", "function": {"name": "get_time"}},
]
GET = {"type": "function", "function": {"name": "get"}}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def accepts(tokenizer, text, choice, styles, **options):
    """Whether this text is a whole answer; checks that it can end only where it may."""
    made = tool_format(choice, TOOLS, styles, tokenizer, **options)
    backend = tokenizer.backend
    matcher_tokenizer = LLTokenizer(backend.to_str(), n_vocab=backend.get_vocab_size(), eos_token=tokenizer.eos_id)
    matcher = LLMatcher(matcher_tokenizer, _grammar(made), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.consume_tokens(ids) and matcher.is_accepting()


HERMES, LLAMA, MISTRAL = Styles("hermes"), Styles("llama3"), Styles("mistral")
PARIS, TIME = ('{"city": "Paris"}', '{"zone": [1]}')
NEW_MISTRAL = "{{ tools }}[TOOL_CALLS]f[ARGS]"


def hermes(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


# styles, template, text, calls in it
RIGHT = [
    (HERMES, "", hermes("get", PARIS), [("get", PARIS)]),
    (HERMES, "", hermes("get_time", TIME) + "\n" + hermes("get", PARIS), [("get_time", TIME), ("get", PARIS)]),
    (Styles("qwen3_coder"), "", hermes("get", PARIS), [("get", PARIS)]),
    (Styles("hermes", "think"), "", "<think>\nHm.\n</think>\n\n" + hermes("get", PARIS), [("get", PARIS)]),
    (Styles("hermes", "think"), "", hermes("get", PARIS), [("get", PARIS)]),
    (LLAMA, "", f'{{"name": "get", "parameters": {PARIS}}}', [("get", PARIS)]),
    (
        MISTRAL, "",
        f'[TOOL_CALLS][{{"name": "get", "arguments": {PARIS}}}, {{"name": "get_time", "arguments": {TIME}}}]',
        [("get", PARIS), ("get_time", TIME)],
    ),
    (
        MISTRAL, NEW_MISTRAL,
        f"[TOOL_CALLS]get_time[ARGS]{TIME}[TOOL_CALLS]get[ARGS]{PARIS}",
        [("get_time", TIME), ("get", PARIS)],
    ),
    (Styles("mistral", "mistral"), NEW_MISTRAL, f"[THINK]Hm[/THINK][TOOL_CALLS]get[ARGS]{PARIS}", [("get", PARIS)]),
]  # fmt: skip


@pytest.mark.parametrize(("styles", "template", "text", "calls"), RIGHT)
def test_calls_in_the_model_s_own_style_are_taken_and_read(tokenizer, styles, template, text, calls):
    tokenizer = tokenizer.with_chat_template("{{ messages }}" + template)
    assert accepts(tokenizer, text, "required", styles)
    assert found(styles, list(text), tools=TOOLS).calls == tuple(calls)
    assert accepts(tokenizer, text, "required", styles, parallel_tool_calls=False) == (len(calls) == 1)
    assert accepts(tokenizer, text, GET, styles) == (calls == [("get", PARIS)])


@pytest.mark.parametrize(
    "text",
    [
        "Hello",
        "",
        hermes("get", PARIS) + " and so on",
        hermes("get", '{"city": "Oslo"}'),
        hermes("get", '{"city": "Paris", "days": 1.5}'),
        hermes("get", '{"city": "Paris", "more": 1}'),
        hermes("get", "{}"),
        hermes("get_time", "[1]"),
        hermes("other", "{}"),
        "<think>\n</think>\n\n" + hermes("get", PARIS),
    ],
)
def test_nothing_else_is_taken(tokenizer, text):
    assert not accepts(tokenizer, text, "required", HERMES)


@pytest.mark.parametrize("num_calls", [MAX_FORCED_CALLS, MAX_FORCED_CALLS + 1])
def test_an_answer_of_forced_calls_has_an_end(tokenizer, num_calls):
    text = "\n".join([hermes("get", PARIS)] * num_calls)
    assert accepts(tokenizer, text, "required", HERMES) == (num_calls <= MAX_FORCED_CALLS)


@pytest.mark.parametrize("added", [ADDED, ()])
def test_reasoning_that_the_prompt_opened_comes_first(added):
    tokenizer, styles = make_tokenizer(added=added), Styles("hermes", "think")
    text, prompt = "Let me <see> \n</think>\n\n" + hermes("get", PARIS), "assistant\n<think>\n"
    assert accepts(tokenizer, text, GET, styles, prompt=prompt)
    assert not accepts(tokenizer, hermes("get", PARIS), GET, styles, prompt=prompt)
    assert found(styles, [text], tools=TOOLS, prompt=prompt) == Found("", (("get", PARIS),), "Let me <see>")


def test_reasoning_that_the_prompt_closed_does_not_come(tokenizer):
    styles, prompt = Styles("hermes", "think"), "<think>\n\n</think>\n\n"
    assert accepts(tokenizer, hermes("get", PARIS), GET, styles, prompt=prompt)
    assert not accepts(tokenizer, "<think>a</think>" + hermes("get", PARIS), GET, styles, prompt=prompt)


def test_names_with_marks_of_grammars_are_text(tokenizer):
    name = 'a."\\|'
    tools = [{"type": "function", "function": {"name": name}}]
    made = tool_format("required", tools, LLAMA, tokenizer)
    matcher = LLMatcher(LLTokenizer(tokenizer.backend.to_str()), _grammar(made), log_level=0)
    text = f'{{"name": {json.dumps(name)}, "parameters": {{}}}}'
    assert matcher.consume_tokens(tokenizer.encode(text, add_special_tokens=False))
    assert matcher.is_accepting()


@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_a_free_choice_bounds_nothing(tokenizer, choice):
    assert tool_format(choice, TOOLS, HERMES, tokenizer) is None


@pytest.mark.parametrize(
    ("choice", "tools", "styles"),
    [
        ({"type": "function", "function": {"name": "other"}}, TOOLS, HERMES),
        ("required", [], HERMES),
        ("required", TOOLS, Styles(None, "think")),
    ],
)
def test_a_choice_that_cannot_be_forced_is_refused(tokenizer, choice, tools, styles):
    with pytest.raises(InvalidFieldError) as caught:
        tool_format(choice, tools, styles, tokenizer)
    assert caught.value.param == "tool_choice"
