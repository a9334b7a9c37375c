"""OpenAI's messages and tools as chat templates take them, and what is refused, by its path."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turbojax.errors import InvalidFieldError, InvalidPromptError, MissingTokenizerError
from turbojax.serve import bounds
from turbojax.serve.messages import render, template_messages, template_tools
from turbojax.tokenizer import Tokenizer

USER = {"role": "user", "content": "What is the weather in Paris?"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
ASKS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "Sunny"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
# As Qwen2.5 writes conversations, shortened.
TEMPLATE = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer as Backend
    from tokenizers import models
    from transformers import PreTrainedTokenizerFast

    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=Backend(models.BPE({"a": 0}, []))), TEMPLATE)


def test_a_conversation_with_a_tool_is_rendered(tokenizer):
    text = render([{"role": "developer", "content": "Be brief."}, USER, ASKS, RESULT], [WEATHER], None, tokenizer)
    assert text == (
        "<|im_start|>system\n"
        '{"type": "function", "function": {"name": "get_weather", "description": "The weather in a city", '
        '"parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}\n<|im_end|>\n'
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is the weather in Paris?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>tool\nSunny<|im_end|>\n<|im_start|>assistant\n"
    )


def test_arguments_are_texts_for_templates_that_want_them_so(tokenizer):
    """As DeepSeek's: `'```json\\n' + call.function.arguments`."""
    joins = tokenizer.with_chat_template(
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ '(' + c.function.arguments + ')' }}{% endfor %}"
        "{% if m.content == 'no' %}{{ raise_exception('refused') }}{% endif %}{% endfor %}"
    )
    assert render([USER, ASKS], [], None, joins) == '({"city": "Paris"})'
    with pytest.raises(InvalidPromptError, match="refused"):
        render([USER, ASKS, {"role": "user", "content": "no"}], [], None, joins)


def test_template_arguments_reach_the_template(tokenizer):
    assert render([USER], [], {"enable_thinking": False}, tokenizer).endswith("assistant\n<think>\n\n</think>\n\n")
    assert render([USER], [], {}, tokenizer).endswith("assistant\n")


def test_the_last_message_can_be_continued(tokenizer):
    chat = [USER, {"role": "assistant", "content": "It is"}]
    text = render(chat, [], None, tokenizer, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nIt is")
    with pytest.raises(InvalidFieldError, match="add_generation_prompt"):
        render(chat, [], None, tokenizer, continue_final_message=True)


def test_messages_are_made_as_templates_take_them():
    made = template_messages([
        {"role": "system", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]},
        {"role": "user", "content": "", "name": "ada"},
        {"role": "assistant", "content": "Hm", "reasoning_content": "So", "refusal": None, "annotations": [],
         "audio": None, "function_call": None, "tool_calls": None},
        {**ASKS, "tool_calls": [{**CALL, "function": {"name": "f", "arguments": ""}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "ok"}], "name": None},
    ])  # fmt: skip
    assert made == [
        {"role": "system", "content": "One\ntwo"},
        {"role": "user", "content": "", "name": "ada"},
        {"role": "assistant", "content": "Hm", "reasoning_content": "So"},
        {"role": "assistant", "content": "",
         "tool_calls": [{"type": "function", "id": "call_1", "function": {"name": "f", "arguments": {}}}]},
        {"role": "tool", "content": "ok", "tool_call_id": "call_1"},
    ]  # fmt: skip


def test_what_the_model_is_told_of_a_tool_is_what_it_was_trained_on():
    tool = {"function": {"strict": True, "parameters": {"a": 1}, "name": "f", "description": None}, "type": "function"}
    (made,) = template_tools([tool])
    assert json.dumps(made) == '{"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}'


def of_user(content):
    return [{"role": "user", "content": content}]


def of_call(**change):
    return [USER, {**ASKS, "tool_calls": [CALL | change]}]


def function(**change):
    return {"function": CALL["function"] | change}


nested = [[]]
for _ in range(bounds.MAX_JSON_DEPTH):
    nested = [nested]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([USER] * (bounds.MAX_MESSAGES + 1), "messages"),
        (["Hi"], "messages[0]"),
        ([{"content": "Hi"}], "messages[0].role"),
        ([USER, {"role": "robot", "content": "Hi"}], "messages[1].role"),
        ([{"role": ["user"], "content": "Hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        (of_user(None), "messages[0].content"),
        (of_user(7), "messages[0].content"),
        (of_user([]), "messages[0].content"),
        (of_user(["Hi"]), "messages[0].content[0]"),
        (of_user([{"type": "text", "text": "a"}, {"type": "text"}]), "messages[0].content[1].text"),
        (of_user([{"type": "text", "text": "a", "cache": 1}]), "messages[0].content[0].cache"),
        (of_user([{"type": "text", "text": "a"}] * (bounds.MAX_CONTENT_PARTS + 1)), "messages[0].content"),
        (of_user("\ud83d"), "messages[0].content"),
        ([{**USER, "tool_calls": [CALL]}], "messages[0].tool_calls"),
        ([{**USER, "name": "a b"}], "messages[0].name"),
        ([{"role": "assistant"}], "messages[0].content"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "messages[0].content"),
        ([{"role": "assistant", "content": "", "refusal": "No"}], "messages[0].refusal"),
        ([{"role": "assistant", "content": "", "function_call": {"name": "f"}}], "messages[0].function_call"),
        ([{"role": "assistant", "content": "", "reasoning_content": 1}], "messages[0].reasoning_content"),
        ([{**ASKS, "tool_calls": CALL}], "messages[0].tool_calls"),
        ([{**ASKS, "tool_calls": [CALL] * (bounds.MAX_TOOL_CALLS + 1)}], "messages[0].tool_calls"),
        (of_call(type="custom"), "messages[1].tool_calls[0].type"),
        (of_call(id=""), "messages[1].tool_calls[0].id"),
        (of_call(id="a" * (bounds.MAX_ID_LEN + 1)), "messages[1].tool_calls[0].id"),
        (of_call(function=None), "messages[1].tool_calls[0].function"),
        (of_call(**function(name="")), "messages[1].tool_calls[0].function.name"),
        (of_call(**function(arguments="{")), "messages[1].tool_calls[0].function.arguments"),
        (of_call(**function(arguments="[1]")), "messages[1].tool_calls[0].function.arguments"),
        (of_call(**function(arguments=None)), "messages[1].tool_calls[0].function.arguments"),
        (of_call(**function(arguments={"a": nested})), "messages[1].tool_calls[0].function.arguments"),
        (of_call(**function(arguments="[" * 100_000)), "messages[1].tool_calls[0].function.arguments"),
        (of_call(**function(more=1)), "messages[1].tool_calls[0].function.more"),
        ([{"role": "tool", "content": "Sunny"}], "messages[0].tool_call_id"),
        ([{**RESULT, "is_error": True}], "messages[0].is_error"),
    ],
)
def test_messages_that_are_none_are_refused_by_their_path(messages, param):
    with pytest.raises(InvalidFieldError) as caught:
        template_messages(messages)
    assert caught.value.param == param
    assert str(caught.value).startswith(f"{param}: ")


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url", "input_image"])
def test_what_is_no_text_is_refused_by_its_kind(kind):
    with pytest.raises(InvalidFieldError, match=re.escape(f"messages[0].content[0].type: '{kind}'; accepted: 'text'")):
        template_messages(of_user([{"type": kind, kind: {"url": "data:,"}}]))


def tool(**change):
    return {"type": "function", "function": {"name": "f", **change}}


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([1], "tools[0]"),
        ([{"type": "custom", "function": {}}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([tool(), tool(name="a b")], "tools[1].function.name"),
        ([tool(name="a" * (bounds.MAX_NAME_LEN + 1))], "tools[0].function.name"),
        ([tool(), tool(name="g"), tool()], "tools[2].function.name"),
        ([tool(description=1)], "tools[0].function.description"),
        ([tool(parameters=[])], "tools[0].function.parameters"),
        ([tool(parameters={"a": nested})], "tools[0].function.parameters"),
        ([tool(parameters={"enum": [1] * bounds.MAX_SCHEMA_VALUES})], "tools[0].function.parameters"),
        ([tool(parameters={"properties": {str(i): {} for i in range(513)}})], "tools[0].function.parameters"),
        ([tool(parameters={"a": {"multipleOf": 123456789}})], "tools[0].function.parameters"),
        ([tool(parameters={"allOf": [{"multipleOf": 997}, {"multipleOf": 0.991}]})], "tools[0].function.parameters"),
        ([tool(parameters={"multipleOf": 10**400 + 1})], "tools[0].function.parameters"),
        ([tool(returns={})], "tools[0].function.returns"),
        ([tool(name=f"f{i}") for i in range(bounds.MAX_TOOLS + 1)], "tools"),
    ],
)
def test_tools_that_are_none_are_refused_by_their_path(tools, param):
    with pytest.raises(InvalidFieldError) as caught:
        template_tools(tools)
    assert caught.value.param == param


@pytest.mark.parametrize("multiple", [2, 0.05, 1e9, 10_000, -25, 0, float("nan"), float("inf"), "3", None, True, {}])
def test_schemas_may_want_multiples_of_few_digits(multiple):
    bounds.check_schema("schema", {"a": {"multipleOf": multiple}, "b": {"multipleOf": 40}})


@pytest.mark.parametrize(
    ("kwargs", "param"),
    [
        ({"thinking": True}, "chat_template_kwargs.thinking"),
        ({"messages": []}, "chat_template_kwargs.messages"),
        ({"chat_template": "{{ 1 }}"}, "chat_template_kwargs.chat_template"),
        ({"enable_thinking": nested}, "chat_template_kwargs.enable_thinking"),
        ({str(i): 1 for i in range(bounds.MAX_TEMPLATE_KWARGS + 1)}, "chat_template_kwargs"),
    ],
)
def test_template_arguments_that_nobody_reads_are_refused(tokenizer, kwargs, param):
    with pytest.raises(InvalidFieldError) as caught:
        render([USER], [], kwargs, tokenizer)
    assert caught.value.param == param


def test_a_template_without_tools_says_what_to_do(tokenizer):
    plain = tokenizer.with_chat_template("{{ messages }}")
    with pytest.raises(InvalidFieldError, match="--chat-template") as caught:
        render([USER], [WEATHER], None, plain)
    assert caught.value.param == "tools"


def test_what_a_template_says_of_messages_is_passed_on(tokenizer):
    strict = tokenizer.with_chat_template(
        "{% if messages | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}"
    )
    with pytest.raises(InvalidPromptError, match="one at a time"):
        render([USER, USER], [], None, strict)


def test_without_a_tokenizer_there_are_no_messages():
    with pytest.raises(MissingTokenizerError):
        render([USER], [], None, None)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "tool_calls", "function", "name", "arguments", "id"])
            | st.text(max_size=2),
            inner | st.sampled_from(["user", "assistant", "tool", "text", "function", "{}"]),
            max_size=5,
        )
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(st.lists(json_values, max_size=3), st.lists(json_values, max_size=2))
def test_whatever_json_comes_is_made_or_refused(messages, tools):
    for make, came in ((template_messages, messages), (template_tools, tools)):
        try:
            made = make(came)
        except InvalidFieldError:
            continue
        assert len(made) == len(came)
        json.dumps(made).encode()
