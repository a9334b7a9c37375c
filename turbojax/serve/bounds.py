"""How large, how deep and how many: the limits of everything that a request can hold, in one place.

They bound what one request costs before the engine has seen it. Each is far above what clients send; what the engine
itself can take (tokens of a prompt, samples, stop tokens) it says with errors of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sized
from decimal import Decimal
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
MAX_JSON_VALUES = 20_000  # of arguments: numbers, texts, lists and objects, each counts
# What a schema may cost to compile, which is about a second at most. The time grows with the square of an object's
# properties (9,000: two minutes), and with the number whose multiples are wanted (9 digits: no end).
MAX_SCHEMA_VALUES = 5000
MAX_SCHEMA_PROPERTIES = 512  # of one object
MAX_MULTIPLE = 10_000  # the least common multiple of every multipleOf, zeros at its end left out
MAX_TEMPLATE_KWARGS = 32
MAX_STOP_WORDS = 64
MAX_STOP_WORD_LEN = 1024
MAX_LOGIT_BIAS = MAX_BIASED_TOKENS
MAX_PROMPTS = 1024  # of one request
MAX_PATTERN_LEN = 1 << 14  # of a regular expression or a grammar
MAX_SAMPLES = 128  # `n`; OpenAI's
MAX_CHOICES = 1024  # prompts times samples
MAX_CALL_NAME_LEN = 256  # of a tool that a model calls


def check_count(param: str, items: Sized, limit: int) -> None:
    """
    Raises:
        InvalidFieldError: more than `limit` of them.
    """
    if len(items) > limit:
        raise InvalidFieldError(param, f"{len(items)} are too many; accepted: at most {limit}")


def check_json(param: str, value: Any, max_values: int = MAX_JSON_VALUES) -> list[Any]:
    """A JSON value is neither too deep nor too large; reads it without recursion, and gives all values in it.

    Raises:
        InvalidFieldError: it is.
    """
    found: list[Any] = []
    level, depth, num_values = [value], 0, 0
    while level:
        depth, num_values = depth + 1, num_values + len(level)
        if depth > MAX_JSON_DEPTH:
            raise InvalidFieldError(param, f"JSON that is nested too deep; accepted: at most {MAX_JSON_DEPTH} levels")
        if num_values > max_values:
            raise InvalidFieldError(param, f"JSON with too many values; accepted: at most {max_values}")
        found += level
        level = [child for one in level for child in _children(one)]
    return found


def check_schema(param: str, schema: Any) -> None:
    """A JSON schema can be compiled in a bounded time.

    Raises:
        InvalidFieldError: it is too large, or has numbers that make it so.
    """
    multiple = 1
    for value in check_json(param, schema, MAX_SCHEMA_VALUES):
        if not isinstance(value, Mapping):
            continue
        if len(value) > MAX_SCHEMA_PROPERTIES:
            accepted = f"at most {MAX_SCHEMA_PROPERTIES}"
            raise InvalidFieldError(param, f"an object with {len(value)} properties; accepted: {accepted}")
        multiple = math.lcm(multiple, _significant(value.get("multipleOf")))
        if multiple > MAX_MULTIPLE:
            accepted = f"numbers whose least common multiple is at most {MAX_MULTIPLE}, zeros at its end left out"
            raise InvalidFieldError(param, f"multipleOf with too many digits; accepted: {accepted}")


def _significant(number: Any) -> int:
    """A number's digits without zeros around them: 5 of 0.05 and of 500; 1 of what is no number."""
    if isinstance(number, bool) or not isinstance(number, int | float) or number != number or number in _NO_DIGITS:
        return 1
    digits = "".join(map(str, Decimal(repr(number)).as_tuple().digits)).rstrip("0")
    return MAX_MULTIPLE + 1 if len(digits) > len(str(MAX_MULTIPLE)) else int(digits)


_NO_DIGITS = (0, math.inf, -math.inf)


def _children(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list) else []
