"""What a chat template asks for, and whether it is one; rendering is transformers', in an immutable sandbox."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turbojax.errors import ConfigError

if TYPE_CHECKING:
    from jinja2.parser import Parser

# Written by the renderer itself, or set by the tokenizer: no request may say what they are.
RENDERED = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")
)
FUNCTIONS = frozenset(("raise_exception", "strftime_now", "namespace", "range", "dict", "lipsum", "cycler", "joiner"))
MAX_CHAT_TEMPLATE_BYTES = 1 << 20


@functools.lru_cache(maxsize=16)
def variables_of(template: str) -> frozenset[str]:
    """The variables that a template reads and does not set itself.

    Raises:
        jinja2.TemplateError: it is no template.
    """
    from jinja2 import meta, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks the assistant's text for training."""

        tags = {"generation"}  # noqa: RUF012 (jinja2 wants a class attribute)

        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(extensions=[Generation, loopcontrols])
    return frozenset(meta.find_undeclared_variables(environment.parse(template)))


def kwargs_of(template: str, special_tokens: Any = ()) -> frozenset[str]:
    """The variables that a request may set, as Qwen3's `enable_thinking`."""
    return variables_of(template) - RENDERED - FUNCTIONS - frozenset(special_tokens)


def read_chat_template(path: str | Path) -> str:
    """The template in a file, which is read now and never again.

    Raises:
        ConfigError: the file cannot be read, or holds no template.
    """
    from jinja2 import TemplateError

    def refusal(accepted: str) -> ConfigError:
        return ConfigError("ServeConfig", "chat_template", str(path), accepted)

    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise refusal(f"a file with a Jinja template: {error.strerror}") from error
    if len(data) > MAX_CHAT_TEMPLATE_BYTES:
        raise refusal(f"a template of at most {MAX_CHAT_TEMPLATE_BYTES} bytes; it has {len(data)}")
    try:
        text = data.decode()
        reads = variables_of(text)
    except UnicodeDecodeError as error:
        raise refusal("a file in UTF-8") from error
    except (TemplateError, RecursionError) as error:
        raise refusal(f"a Jinja template: line {getattr(error, 'lineno', '?')}: {error}") from error
    if "messages" not in reads:
        raise refusal("a chat template: this one does not read `messages`")
    return text
