"""How large, how deep and how many: the limits of everything that a request can hold, in one place.

They bound what one request costs before the engine has seen it. Each is far above what clients send; what the engine
itself can take (tokens of a prompt, samples, stop tokens) it says with errors of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

from turbojax.engine.plan import MAX_BIASED_TOKENS
from turbojax.errors import InvalidFieldError

MAX_MESSAGES = 4096
MAX_CONTENT_PARTS = 512  # of a message
MAX_TOOLS = 128  # OpenAI's
MAX_TOOL_CALLS = 128  # of a message
MAX_NAME_LEN = 64  # of tools and of participants; OpenAI's
MAX_ID_LEN = 256
MAX_JSON_DEPTH = 64  # of arguments, schemas and whatever else is JSON
MAX_JSON_VALUES = 20_000  # of a schema or of template arguments: numbers, texts, lists and objects, each counts
MAX_TEMPLATE_KWARGS = 32
MAX_STOP_WORDS = 64
MAX_STOP_WORD_LEN = 1024
MAX_LOGIT_BIAS = MAX_BIASED_TOKENS
MAX_PROMPTS = 1024  # of one request
MAX_SAMPLES = 128  # `n`; OpenAI's
MAX_CALL_NAME_LEN = 256  # of a tool that a model calls


def check_count(param: str, items: Sized, limit: int) -> None:
    """
    Raises:
        InvalidFieldError: more than `limit` of them.
    """
    if len(items) > limit:
        raise InvalidFieldError(param, f"{len(items)} are too many; accepted: at most {limit}")


def check_json(param: str, value: Any) -> None:
    """A JSON value is neither too deep nor too large; reads it without recursion.

    Raises:
        InvalidFieldError: it is.
    """
    level, depth, num_values = [value], 0, 0
    while level:
        depth, num_values = depth + 1, num_values + len(level)
        if depth > MAX_JSON_DEPTH:
            raise InvalidFieldError(param, f"JSON that is nested too deep; accepted: at most {MAX_JSON_DEPTH} levels")
        if num_values > MAX_JSON_VALUES:
            raise InvalidFieldError(param, f"JSON with too many values; accepted: at most {MAX_JSON_VALUES}")
        level = [child for one in level for child in _children(one)]


def _children(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list) else []
