"""Which styles a model has, from what chat templates of the families write."""

import pytest

from turbojax.errors import ConfigError
from turbojax.serve.parsing import (
    REASONING_STYLES,
    TOOL_STYLES,
    Styles,
    chosen_styles,
    detect_styles,
    generation_overrides,
)
from turbojax.serve.settings import ServeConfig

QWEN = '{% if tools %}# Tools{% endif %}<tool_call>\\n{"name": "\' + tool_call.name }}</tool_call>'
TEMPLATES = {
    "qwen2.5": (QWEN, Styles("hermes", None)),
    "qwen3": (QWEN + "{{ '<think>\\n' + reasoning_content + '\\n</think>' }}", Styles("hermes", "think")),
    "qwen3-coder": (QWEN + "<function=' + name + '>\\n<parameter=' + key + '>'", Styles("qwen3_coder", None)),
    "llama3.1": (
        "{% if tools is not none %}<|start_header_id|>{{ '<|python_tag|>' + tool_call.name + '.call(' }}",
        Styles("llama3", None),
    ),
    "llama3.2": (
        "<|start_header_id|>assistant<|end_header_id|>{{ '{\"name\": ' }}{{ '\"parameters\": ' }}{{ tools }}",
        Styles("llama3", None),
    ),
    "mistral": ("{{ tools }}{{ '[TOOL_CALLS] [' }}", Styles("mistral", None)),
    "magistral": (
        "{{ tools }}[TOOL_CALLS]{{ name }}[ARGS]{{ '[THINK]' + x + '[/THINK]' }}",
        Styles("mistral", "mistral"),
    ),
    "deepseek-r1 distilled": ("{{ content.split('</think>')[-1] }}<|Assistant|><think>\\n", Styles(None, "think")),
    "smollm2": ("{% for message in messages %}{{ '<|im_start|>' + message['role'] }}{% endfor %}", Styles()),
    "none": (None, Styles()),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_tells(name):
    template, styles = TEMPLATES[name]
    assert detect_styles(template) == styles
    assert styles.tool in (None, *TOOL_STYLES)
    assert styles.reasoning in (None, *REASONING_STYLES)


def test_a_template_that_shows_tools_and_no_call_tells_nothing():
    assert detect_styles("{{ tools | tojson }}{{ messages }}") == Styles()


@pytest.mark.parametrize(
    ("styles", "has_tools", "needs_special_tokens"),
    [
        (Styles("hermes", "think"), True, False),  # Qwen's tags are added tokens that are not special
        (Styles("llama3", None), True, True),
        (Styles("llama3", None), False, False),
        (Styles("mistral", None), True, True),
        (Styles("mistral", "mistral"), False, True),
        (Styles(), True, False),
    ],
)
def test_tags_that_are_special_tokens_are_asked_for(styles, has_tools, needs_special_tokens):
    expected = {"skip_special_tokens": False} if needs_special_tokens else {}
    assert generation_overrides(styles, has_tools) == expected


@pytest.mark.parametrize(
    ("told", "styles"),
    [
        (("auto", "auto"), Styles("hermes", "think")),
        (("none", "auto"), Styles(None, "think")),
        (("mistral", "none"), Styles("mistral", None)),
    ],
)
def test_a_server_can_be_told_its_styles(told, styles):
    assert chosen_styles(*told, Styles("hermes", "think")) == styles


@pytest.mark.parametrize(
    "told", [{"tool_call_parser": "pythonic"}, {"reasoning_parser": None}, {"chat_template": ""}, {"chat_template": 3}]
)
def test_a_server_is_not_told_anything_else(told):
    (field,) = told
    with pytest.raises(ConfigError, match=field):
        ServeConfig(**told)
