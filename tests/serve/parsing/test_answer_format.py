"""The grammar of an answer takes what the model's format, schemas and the form of content allow, and nothing else."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.serve.parsing.answers import Found, found
from tests.serve.scripted import ADDED, make_tokenizer
from turbojax.errors import InvalidFieldError
from turbojax.guided import _grammar
from turbojax.serve.answer_format import MAX_FORCED_CALLS, answer_format
from turbojax.serve.parsing import Styles

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


def accepts(tokenizer, text, choice, styles, *, content=None, tools=TOOLS, **options):
    """Whether this text is a whole answer."""
    made = answer_format(content, choice, tools, styles, tokenizer, **options)
    assert made is not None
    backend = tokenizer.backend
    inner = LLTokenizer(backend.to_str(), n_vocab=backend.get_vocab_size(), eos_token=tokenizer.eos_id)
    matcher = LLMatcher(inner, _grammar(made), log_level=0)
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


@pytest.mark.parametrize("more", [{}, {"x-guidance": {"whitespace_pattern": " {0,2}"}}])
def test_arguments_and_content_have_one_blank_between_tokens_unless_the_schema_allows_more(tokenizer, more):
    tools = [{"type": "function", "function": {"name": "get", "parameters": CITY | more}}]
    content = {"type": "json_schema", "json_schema": CITY | more}
    for blanks, is_taken in ((" ", True), ("  ", bool(more)), ("   ", False)):
        city = f'{{"city":{blanks}"Paris"}}'
        assert accepts(tokenizer, hermes("get", city), "required", HERMES, tools=tools) == is_taken
        text = f"<think>a</think>{city}"
        assert accepts(tokenizer, text, "none", Styles("hermes", "think"), content=content, tools=[]) == is_taken


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
    made = answer_format(None, "required", tools, LLAMA, tokenizer)
    matcher = LLMatcher(LLTokenizer(tokenizer.backend.to_str()), _grammar(made), log_level=0)
    text = f'{{"name": {json.dumps(name)}, "parameters": {{}}}}'
    assert matcher.consume_tokens(tokenizer.encode(text, add_special_tokens=False))
    assert matcher.is_accepting()


@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_a_free_choice_bounds_nothing(tokenizer, choice):
    assert answer_format(None, choice, TOOLS, HERMES, tokenizer) is None


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
        answer_format(None, choice, tools, styles, tokenizer)
    assert caught.value.param == "tool_choice"


STRICT = [
    {"type": "function", "function": {"name": "get", "parameters": CITY, "strict": True}},
    {"type": "function", "function": {"name": "get_time"}},
]
BAD = '{"city": "Oslo"}'
AUTO = [
    (HERMES, "", lambda name, arguments: hermes(name, arguments)),
    (LLAMA, "", lambda name, arguments: f'<|python_tag|>{{"name": "{name}", "parameters": {arguments}}}'),
    (MISTRAL, "", lambda name, arguments: f'[TOOL_CALLS][{{"name": "{name}", "arguments": {arguments}}}]'),
    (MISTRAL, NEW_MISTRAL, lambda name, arguments: f"[TOOL_CALLS]{name}[ARGS]{arguments}"),
]


@pytest.mark.parametrize("added", [ADDED, ()])
@pytest.mark.parametrize(("styles", "template", "call"), AUTO)
def test_strict_tools_are_called_as_their_schemas_say_or_not_at_all(styles, template, call, added):
    tokenizer = make_tokenizer("{{ messages }}" + template, added=added)

    def is_answer(text):
        return accepts(tokenizer, text, "auto", styles, tools=STRICT)

    assert is_answer("Hello <tool [1] {")
    assert is_answer(call("get", PARIS))
    assert is_answer("One moment. " + call("get", PARIS))
    assert not is_answer(call("get", BAD))
    assert not is_answer("One moment. " + call("get", BAD))
    assert not is_answer(call("other", "{}"))
    assert is_answer(call("get_time", TIME)), "one that is not strict takes any object"
    assert found(styles, ["One moment. " + call("get", PARIS)], tools=STRICT) == Found("One moment.", (("get", PARIS),))


def test_llama_s_strict_calls_need_no_tag(tokenizer):
    call = '{{"name": "get", "parameters": {}}}'
    assert accepts(tokenizer, call.format(PARIS), "auto", LLAMA, tools=STRICT)
    for text in (call.format(BAD), "\n" + call.format(BAD), '{"a": 1}'):
        assert not accepts(tokenizer, text, "auto", LLAMA, tools=STRICT)


def test_text_may_stand_between_and_behind_strict_calls(tokenizer):
    text = f"One {hermes('get', PARIS)} two {hermes('get_time', TIME)}\nthree"
    assert accepts(tokenizer, text, "auto", HERMES, tools=STRICT)


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
JSON = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
FORMS = [
    (JSON, '{"n": 3}', '{"n": "x"}'),
    ({"type": "json_schema", "json_schema": json.dumps(SCHEMA)}, '{"n": 3}', "[]"),
    ({"type": "json_object"}, '{"a": [1]}', "[1]"),
    ({"type": "regex_schema", "regex_schema": r"a/b\\/[cd]\n?"}, "a/b\\/c", "a/b/c"),
    ({"type": "choice", "choice": ["yes/no", 'é\n"😀']}, 'é\n"😀', "yes"),
]


@pytest.mark.parametrize(("form", "right", "wrong"), FORMS)
def test_a_form_is_of_the_content_and_reasoning_comes_before(tokenizer, form, right, wrong):
    styles, options = Styles("hermes", "think"), {"content": form, "tools": []}
    for reasoning, prompt in [("<think>\nHm\n</think>\n\n", ""), ("", ""), ("Hm</think>", "<think>\n")]:
        assert accepts(tokenizer, reasoning + right, None, styles, prompt=prompt, **options)
        assert not accepts(tokenizer, reasoning + wrong, None, styles, prompt=prompt, **options)
    assert not accepts(tokenizer, right, None, styles, prompt="<think>\n", **options)


@pytest.mark.parametrize(("styles", "template", "call"), AUTO)
def test_with_tools_an_answer_is_content_of_its_form_or_calls(tokenizer, styles, template, call):
    tokenizer = tokenizer.with_chat_template("{{ messages }}" + template)
    assert accepts(tokenizer, '{"n": 3}', "auto", styles, content=JSON)
    assert accepts(tokenizer, call("get", PARIS), "auto", styles, content=JSON)
    for text in ("Hello", call("get", BAD), '{"n": 3}' + call("get", PARIS), ""):
        assert not accepts(tokenizer, text, "auto", styles, content=JSON)


@pytest.mark.parametrize(
    ("content", "styles", "prompt"),
    [
        (JSON, HERMES, ""),
        (JSON, Styles("hermes", "think"), "<think>\n\n</think>\n\n"),
        ({"type": "grammar", "grammar": 'start: "a"'}, HERMES, ""),
        ({"type": "grammar", "grammar": 'start: "a"'}, Styles("hermes", "think"), ""),
    ],
)
def test_a_form_of_content_that_is_the_whole_answer_stays_as_it_is(tokenizer, content, styles, prompt):
    assert answer_format(content, None, [], styles, tokenizer, prompt=prompt) == content


def test_a_text_is_no_form(tokenizer):
    assert answer_format({"type": "text"}, None, [], Styles("hermes", "think"), tokenizer) is None


@pytest.mark.parametrize(
    ("content", "choice", "tools", "styles", "prompt", "param"),
    [
        (JSON, "required", TOOLS, HERMES, "", "response_format"),
        ({"type": "grammar", "grammar": "start: X"}, "auto", TOOLS, HERMES, "", "response_format"),
        ({"type": "grammar", "grammar": "start: X"}, None, [], Styles(None, "think"), "<think>", "response_format"),
        (None, "auto", STRICT, Styles(), "", "tools"),
    ],
)
def test_forms_that_cannot_be_are_refused(tokenizer, content, choice, tools, styles, prompt, param):
    with pytest.raises(InvalidFieldError) as caught:
        answer_format(content, choice, tools, styles, tokenizer, prompt=prompt)
    assert caught.value.param == param
