"""Reasoning at the beginning of an answer, between tags; the prompt may have opened it."""

from __future__ import annotations

from typing import NamedTuple

from turbojax.serve.parsing.deltas import Reasoning
from turbojax.serve.parsing.source import Reading, Source, text_until


class ReasoningTags(NamedTuple):
    open: str
    close: str


TAGS = {
    # Qwen3, QwQ, DeepSeek-R1 and its distilled models.
    "think": ReasoningTags("<think>", "</think>"),
    # Magistral: special tokens.
    "mistral": ReasoningTags("[THINK]", "[/THINK]"),
}


def is_opened(prompt: str, style: str | None) -> bool | None:
    """Whether the prompt ends within reasoning (True) or right behind it (False); None: it says nothing of it.

    Templates open it for models that always think ("<think>\\n"), and close it where thinking is off.
    """
    if style is None:
        return None
    tags, end = TAGS[style], prompt.rstrip()
    if end.endswith(tags.open):
        return True
    return False if end.endswith(tags.close) else None


def read_reasoning(source: Source, tags: ReasoningTags, *, is_open: bool) -> Reading[None]:
    """Reads the reasoning, if there is any, and white space around it."""
    source.mark()
    yield from source.skip_space()
    # Some models open it once more behind a prompt that did.
    has_tag = yield from source.reads(tags.open)
    if has_tag or is_open:
        source.marked()
        yield from source.skip_space()
        yield from text_until(source, (tags.close,), Reasoning)
        source.marked()
        yield from source.skip_space()
    else:
        source.back()
