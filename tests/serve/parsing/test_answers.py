"""Tool calls and reasoning in the styles of several models: whole, cut at every character, and cut anywhere."""

import json
import logging
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.parsing.answers import (
    ANSWERS,
    CODER,
    HERMES,
    LLAMA,
    MAGISTRAL,
    MISTRAL,
    PARIS,
    QWEN3,
    TOOLS,
    Found,
    deltas_of,
    found,
    gather,
    pieces_of,
)
from turbojax.serve.bounds import MAX_CALL_NAME_LEN, MAX_JSON_DEPTH
from turbojax.serve.parsing import Content, Styles, ToolCallArguments, ToolCallStart, make_parser

TAGS = {
    "hermes": "<tool_call>", "qwen3_coder": "<tool_call>", "llama3": "<|python_tag|>", "mistral": "[TOOL_CALLS]",
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_consists_of_what_its_model_s_format_says(name):
    styles, text, expected = ANSWERS[name]
    assert found(styles, [text]) == expected


@pytest.mark.parametrize("name", ANSWERS)
def test_cut_at_every_character_it_gives_the_same(name):
    styles, text, expected = ANSWERS[name]
    assert found(styles, list(text)) == expected
    for at in range(len(text)):
        assert found(styles, [text[:at], "", text[at:]]) == expected, at


@settings(deadline=None)
@given(st.sampled_from(sorted(ANSWERS)), st.data())
def test_cut_anywhere_it_gives_the_same(name, data):
    styles, text, expected = ANSWERS[name]
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    assert found(styles, pieces_of(text, cuts)) == expected


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<tool", "_call>", "<function=f>", "<parameter=a>", "</parameter>", "</function>",
    "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>", "</think>", "[THINK]", "[/THINK]", "</", "<",
    '{"name": "get_time", "arguments": ', '{"name": "', '"parameters": {"a": 1}}', '{"a": [1, "x\\n"]}',
    '"{\\"a\\": 1}"', "{", "}", "[", "]", ",", ";", ":", '"', "\\",
    "\\u00", "null", "-1.5e3", "get_time", "é", "\n", " ", "{}", "\\ud83d",
]  # fmt: skip
anything = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=14).map("".join)
any_style = st.builds(Styles, st.sampled_from([None, *TAGS]), st.sampled_from([None, "think", "mistral"]))


@settings(deadline=None)
@given(any_style, anything, st.sampled_from(["", "<think>\n", "[THINK]", "<think>\n\n</think>\n\n"]), st.data())
def test_whatever_the_text_is_cuts_change_nothing_and_it_can_be_sent(styles, text, prompt, data):
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=20))
    whole = deltas_of(styles, [text], prompt=prompt)
    assert found(styles, pieces_of(text, cuts), prompt=prompt) == gather(*whole)
    assert found(styles, list(text), prompt=prompt) == gather(*whole)
    for delta in whole[0]:
        if isinstance(delta, ToolCallStart):
            delta.name.encode()


@settings(deadline=None)
@given(any_style, anything)
def test_text_without_a_tag_is_content_as_it_is(styles, text):
    known = ("<tool_call>", "<function=", "<|python_tag|>", "[TOOL_CALLS]", "<think>", "[THINK]")
    for tag in known:
        text = text.replace(tag, "")
    if any(tag in text for tag in known) or text.strip().startswith("{"):
        return
    assert found(styles, list(text)) == Found(text)


arguments = st.dictionaries(
    st.text(max_size=4),
    st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=6), st.lists, max_leaves=4),
    max_size=3,
)
calls = st.tuples(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), arguments, st.sampled_from([None, 1]), st.booleans())
words = st.text("ab <>/[]{}\n\t_", max_size=8).filter(lambda text: "<tool_call>" not in text)


@settings(deadline=None)
@given(words, st.lists(st.tuples(calls, words), max_size=3), st.data())
def test_texts_and_calls_that_were_written_are_read(first, rest, data):
    """What lies between two calls comes without white space at its ends; everything else as it was written."""
    text, expected = first, []
    for (name, values, indent, ascii_only), words_behind in rest:
        written = json.dumps(values, indent=indent, ensure_ascii=ascii_only)
        text += f'<tool_call>\n{{"name": "{name}", "arguments": {written}}}\n</tool_call>{words_behind}'
        expected.append((name, written))
    texts = [first, *(words_behind for _, words_behind in rest)]
    content = "".join(
        (one.lstrip(" \n\t") if i else one).rstrip(" \n\t") if i < len(rest) else one.lstrip(" \n\t") if i else one
        for i, one in enumerate(texts)
    )
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=10))
    assert found(HERMES, pieces_of(text, cuts)) == Found(content, tuple(expected))


@pytest.mark.parametrize(
    ("styles", "before"),
    [
        (HERMES, '<tool_call>\n{"name": "get_time"'),
        (LLAMA, '{"name": "get_time"'),
        (LLAMA, '<|python_tag|>{"name": "get_time"'),
        (MISTRAL, '[TOOL_CALLS] [{"name": "get_time"'),
        (MISTRAL, "[TOOL_CALLS]get_time["),
        (CODER, "<tool_call>\n<function=get_time>"),
    ],
)
def test_a_call_begins_as_soon_as_its_name_is_known(styles, before):
    parser = make_parser(styles, TOOLS)
    assert parser.feed(before[:-1]) == []
    (start,) = parser.feed(before[-1])
    assert isinstance(start, ToolCallStart)
    assert start.name == "get_time"


@pytest.mark.parametrize(
    ("styles", "before"),
    [
        (HERMES, '<tool_call>{"name": "get_time", "arguments": '),
        (LLAMA, '{"name": "get_time", "parameters": '),
        (MISTRAL, "[TOOL_CALLS]get_time[ARGS]"),
    ],
)
def test_arguments_come_as_they_are_written(styles, before):
    parser = make_parser(styles, TOOLS)
    parser.feed(before)
    for char in '{"city": "Pa\\n", "n": [-1.5, true]':
        assert parser.feed(char) == [ToolCallArguments(0, char)]


def test_text_comes_as_soon_as_it_cannot_be_a_tag():
    parser = make_parser(HERMES, TOOLS)
    assert parser.feed("a <tool") == [Content("a")]
    assert parser.feed("_x") == [Content(" <tool_x")]
    assert parser.feed("\n") == []
    assert parser.feed("b") == [Content("\nb")]
    assert parser.feed("<") == []
    assert parser.finish() == [Content("<")]


@pytest.mark.parametrize("tag", TAGS.values())
def test_no_prefix_shows_a_part_of_a_tag(tag):
    style = next(style for style, its in TAGS.items() if its == tag)
    parser = make_parser(Styles(style), TOOLS)
    text = "".join(delta.text for char in "Hi" + tag for delta in parser.feed(char))
    assert text == "Hi"


@pytest.mark.parametrize("prompt", ["<|im_start|>assistant\n<think>\n", "<think>"])
def test_a_prompt_may_open_the_reasoning(prompt):
    """DeepSeek-R1 and Qwen3's thinking models: the template writes the opening tag."""
    text = "Let me see.\n</think>\n\nFour."
    assert found(QWEN3, list(text), prompt=prompt) == Found("Four.", reasoning="Let me see.")
    assert found(QWEN3, list("<think>\n" + text), prompt=prompt) == Found("Four.", reasoning="Let me see.")


def test_reasoning_that_the_prompt_opened_comes_at_once():
    parser = make_parser(QWEN3, prompt="<think>\n")
    assert [delta.text for char in "Hm, no" for delta in parser.feed(char)] == ["H", "m", ",", " n", "o"]


def test_a_prompt_may_close_the_reasoning():
    """Qwen3 with enable_thinking=False."""
    prompt = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert found(QWEN3, ["<think> is a tag"], prompt=prompt) == Found("<think> is a tag")


def test_without_tools_calls_are_not_looked_for():
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call> \n'
    assert found(QWEN3, list("<think>a</think>" + text), tools=()) == Found(text, reasoning="a")


def test_without_parallel_calls_the_first_is_kept():
    styles, text, _ = ANSWERS["hermes: text, then two calls"]
    assert found(styles, list(text), parallel=False) == Found("Let me look.", (PARIS,))


def test_ids_differ_and_are_as_templates_take_them():
    one = '{"name": "get_time", "arguments": {}}'
    ids = {}
    for styles, text in [(HERMES, f"<tool_call>{one}</tool_call>" * 2), (MISTRAL, f"[TOOL_CALLS][{one}, {one}]")]:
        deltas = make_parser(styles, TOOLS).feed(text)
        ids[styles.tool] = [delta.call_id for delta in deltas if isinstance(delta, ToolCallStart)]
    assert len({*ids["hermes"], *ids["mistral"]}) == 4
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", one) for one in ids["mistral"])
    assert all(one.startswith("call_") for one in ids["hermes"])


def test_the_first_malformed_call_is_logged_without_its_text(caplog):
    with caplog.at_level(logging.WARNING):
        assert found(HERMES, ["<tool_call>nope</tool_call>" * 3]).num_malformed == 3
    (record,) = caplog.records
    assert record.getMessage() == "tool call 0 is malformed: character 'n' where '{' is expected"


@pytest.mark.parametrize("depth", [MAX_JSON_DEPTH, MAX_JSON_DEPTH + 1, 100_000])
def test_arguments_are_of_a_bounded_depth(depth):
    text = '<tool_call>{"name": "f", "arguments": ' + '{"a":' * (depth - 1) + "{" + "}" * depth + "}</tool_call>"
    is_read = found(HERMES, [text]).num_malformed == 0
    assert is_read == (depth <= MAX_JSON_DEPTH)


@pytest.mark.parametrize("name_len", [0, 1, MAX_CALL_NAME_LEN, MAX_CALL_NAME_LEN + 1])
def test_names_are_of_a_bounded_length(name_len):
    name = "f" * name_len
    json_call = f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'
    for styles, text in [
        (HERMES, json_call),
        (MISTRAL, f"[TOOL_CALLS]{name}[ARGS]{{}}"),
        (CODER, f"<function={name}></function>"),
    ]:
        expected = Found("", ((name, "{}"),)) if 0 < name_len <= MAX_CALL_NAME_LEN else None
        result = found(styles, [text])
        assert result == (expected or Found(text, num_malformed=1))
        assert found(styles, list(text)) == result


def test_half_a_character_in_a_name_is_no_name():
    text = '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>'
    assert found(HERMES, [text]) == Found(text, num_malformed=1)


def test_magistral_s_prompt_does_not_open_its_reasoning():
    assert found(MAGISTRAL, list("Hi"), prompt="[INST]Hi[/INST]") == Found("Hi")
