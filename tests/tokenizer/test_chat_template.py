"""Chat templates: what they may read, what they cannot reach, and what they can be told."""

import json

import pytest

from turbojax.chat_template import read_chat_template, variables_of
from turbojax.errors import ConfigError, InvalidPromptError
from turbojax.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def plain():
    """A tokenizer with one token and no template."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models
    from transformers import PreTrainedTokenizerFast

    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=Backend(models.BPE({"a": 0}, [])), eos_token="a"))


def test_tools_and_variables_reach_the_template(plain):
    template = (
        "{% for tool in tools %}{{ tool | tojson }}{% endfor %}|{{ enable_thinking }}|{{ messages[0].content }}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    tokenizer = plain.with_chat_template(template)
    assert tokenizer.takes_tools
    assert tokenizer.template_kwargs == {"enable_thinking"}
    text = tokenizer.render_chat(CHAT, tools=TOOLS, template_kwargs={"enable_thinking": False})
    assert text == json.dumps(TOOLS[0]) + "|False|Hi>"
    assert not plain.has_chat_template, "the other one stays as it was"


def test_the_last_message_can_be_continued(plain):
    tokenizer = plain.with_chat_template("{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}")
    chat = [*CHAT, {"role": "assistant", "content": "Hello the"}]
    text = tokenizer.render_chat(chat, add_generation_prompt=False, continue_final_message=True)
    assert text == "<user>Hi<end><assistant>Hello the"


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({"tools": TOOLS}, "takes no tools"),
        ({"template_kwargs": {"enable_thinking": True}}, "enable_thinking"),
        ({"template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template"),
        ({"template_kwargs": {"messages": []}}, "messages"),
        ({"template_kwargs": {"tokenize": True}}, "tokenize"),
        ({"template_kwargs": {"eos_token": "b"}}, "eos_token"),
        ({"template_kwargs": {"range": 1}}, "range"),
    ],
)
def test_what_the_template_does_not_read_is_refused_by_name(plain, asked, names):
    tokenizer = plain.with_chat_template("{{ messages[0].content }}{{ eos_token }}{% for i in range(1) %}{% endfor %}")
    with pytest.raises(InvalidPromptError, match=names):
        tokenizer.render_chat(CHAT, **asked)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'].loads('1') }}",
        "{{ self.__init__.__globals__.__builtins__.open('/etc/passwd').read() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ lipsum.__globals__['os'].listdir('/') }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
        "{{ ('{0.__class__}' | string).format_map({'0': messages}) }}",
        "{{ messages | map(attribute='__class__') | list | first }}",
        "{{ messages.append(messages[0]) }}",
        "{{ messages[0].update({'content': 'changed'}) }}",
        "{{ messages.clear() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os }}",
        "{% extends '/etc/passwd' %}",
        "{{ open('/etc/passwd') }}",
        "{{ __import__('os') }}",
    ],
)
def test_templates_reach_no_file_no_module_and_change_nothing(plain, attack):
    chat = [dict(CHAT[0])]
    tokenizer = plain.with_chat_template(attack + "{{ messages | length }}")
    try:
        text = tokenizer.render_chat(chat)
    except InvalidPromptError:
        text = "1"
    assert text == "1", "what an attribute with an underscore gives is undefined, which prints as nothing"
    assert chat == CHAT


def test_a_range_is_bounded(plain):
    with pytest.raises(InvalidPromptError, match="100000"):
        plain.with_chat_template("{% for i in range(10 ** 9) %}{% endfor %}{{ messages }}").render_chat(CHAT)


@pytest.mark.parametrize(
    "failing",
    ["{{ 1 / 0 }}", "{{ messages[7].role }}", "{{ raise_exception('roles must alternate') }}",
     "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ messages[0].content.nothing.more }}"],
)  # fmt: skip
def test_whatever_a_template_raises_is_a_refusal(plain, failing):
    with pytest.raises(InvalidPromptError, match="refuses the messages"):
        plain.with_chat_template(failing + "{{ messages }}").render_chat(CHAT)


def test_variables_are_those_a_template_does_not_set_itself():
    template = (
        "{%- set a = 1 %}{% for m in messages %}{% generation %}{{ m.content }}{{ a }}{% endgeneration %}"
        "{% if loop.last and thinking is defined %}{% break %}{% endif %}{% endfor %}{{ strftime_now('%Y') }}"
    )
    assert variables_of(template) == {"messages", "thinking", "strftime_now"}


def test_the_model_s_own_template_takes_no_tools(smollm2):
    from turbojax.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(smollm2)
    assert not tokenizer.takes_tools
    assert tokenizer.template_kwargs == frozenset()


def test_a_template_is_read_from_a_file(tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text("{% for m in messages %}{{ m.content }}ä{% endfor %}")
    assert read_chat_template(path) == path.read_text()


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (None, "No such file"),
        (b"{% for m in messages %}\n{{ m.content }}\n{% endif %}", "line 3"),
        (b"\xff{{ messages }}", "UTF-8"),
        (b"Hello", "messages"),
        (b"{{ messages }}" + b" " * (1 << 20), "1048576 bytes"),
    ],
)
def test_a_bad_template_file_is_named_with_the_reason(tmp_path, data, names):
    path = tmp_path / "chat.jinja"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(ConfigError, match=names) as caught:
        read_chat_template(path)
    assert caught.value.field == "chat_template"
    assert str(path) in str(caught.value)
