"""Which styles of tool calls and of reasoning a model has, and what they ask of the generation."""

from __future__ import annotations

from typing import Any, NamedTuple

from turbojax.serve.parsing.reasoning import TAGS
from turbojax.serve.parsing.tool_styles import ARGS, PYTHON_TAG, READERS, TOOL_CALL, TOOL_CALLS

TOOL_STYLES = tuple(style for style in READERS if style is not None)
REASONING_STYLES = tuple(TAGS)

# Styles whose tags are special tokens, which are left out of texts by default.
_TOOL_STYLES_OF_SPECIAL_TOKENS = ("llama3", "mistral")
_REASONING_STYLES_OF_SPECIAL_TOKENS = ("mistral",)


class Styles(NamedTuple):
    """How a model writes tool calls and reasoning; None: it does not.

    Attributes:
        tool: one of `TOOL_STYLES`.
        reasoning: one of `REASONING_STYLES`.
    """

    tool: str | None = None
    reasoning: str | None = None


def detect_styles(chat_template: str | None) -> Styles:
    """Styles as the chat template, a Jinja text, shows them."""
    template = chat_template or ""
    return Styles(_tool_style(template), _reasoning_style(template))


def chosen_styles(tool_call_parser: str, reasoning_parser: str, detected: Styles) -> Styles:
    """Styles as a server is told them: one by name, "none", or "auto" for the one that was detected."""
    told = ((tool_call_parser, detected.tool), (reasoning_parser, detected.reasoning))
    return Styles(*(of_template if name == "auto" else None if name == "none" else name for name, of_template in told))


def _tool_style(template: str) -> str | None:
    if "tools" not in template:
        return None
    if TOOL_CALL in template:
        return "qwen3_coder" if "<function=" in template and "<parameter=" in template else "hermes"
    if TOOL_CALLS in template:
        return "mistral"
    if PYTHON_TAG in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return "llama3"
    return None


def _reasoning_style(template: str) -> str | None:
    for style, tags in TAGS.items():
        if tags.open in template or tags.close in template:
            return style
    return None


def generation_overrides(styles: Styles, has_tools: bool) -> dict[str, Any]:
    """Fields of GenerationConfig that a chat needs for its answer to be parsed.

    Tags that are special tokens must be in the text. Stop tokens are left out of it all the same.
    """
    of_tools = has_tools and styles.tool in _TOOL_STYLES_OF_SPECIAL_TOKENS
    if of_tools or styles.reasoning in _REASONING_STYLES_OF_SPECIAL_TOKENS:
        return {"skip_special_tokens": False}
    return {}


def writes_name_before_arguments(chat_template: str | None) -> bool:
    """Whether a Mistral model writes name[ARGS]{...}, as since version 11 of its tokenizer, and not a list."""
    return ARGS in (chat_template or "")
