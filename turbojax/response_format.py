"""The forms of a response format: LMDeploy's, with choices and grammars beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FORMATS = (
    '{"type": "json_schema", "json_schema": schema or {"schema": schema}}, {"type": "json_object"}, '
    '{"type": "regex_schema", "regex_schema": pattern}, {"type": "choice", "choice": [texts]}, '
    '{"type": "grammar", "grammar": Lark} or {"type": "text"}'
)


def is_format(response_format: Any) -> bool:
    """Whether this has a known form; what it holds is compiled later."""
    if not isinstance(response_format, Mapping):
        return False
    kind = response_format.get("type")
    rest = response_format.get(kind) if isinstance(kind, str) else None
    match kind:
        case "text" | "json_object":
            return len(response_format) == 1
        case "json_schema":
            is_form = isinstance(rest, Mapping | str)
        case "regex_schema" | "grammar":
            is_form = isinstance(rest, str)
        case "choice":
            is_form = isinstance(rest, list | tuple) and bool(rest) and all(isinstance(t, str) and t for t in rest)
        case _:
            return False
    return is_form and len(response_format) == 2
