"""What a generated text consists of: reasoning, content and tool calls, in the styles of several model families."""

from turbojax.serve.parsing.deltas import Content, Delta, Reasoning, ToolCallArguments, ToolCallStart
from turbojax.serve.parsing.output import OutputParser, make_parser
from turbojax.serve.parsing.styles import (
    REASONING_STYLES,
    TOOL_STYLES,
    Styles,
    chosen_styles,
    detect_styles,
    generation_overrides,
)

__all__ = [
    "REASONING_STYLES",
    "TOOL_STYLES",
    "Content",
    "Delta",
    "OutputParser",
    "Reasoning",
    "Styles",
    "ToolCallArguments",
    "ToolCallStart",
    "chosen_styles",
    "detect_styles",
    "generation_overrides",
    "make_parser",
]
