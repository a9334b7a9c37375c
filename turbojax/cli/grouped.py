"""Options that several commands share, in one parameter of each: a dataclass whose fields are the options."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the fields of such dataclasses as options of its own, behind the others, in place of them."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}

    @functools.wraps(command)
    def run(**given: Any) -> None:
        made = {
            name: kind(**{field.name: given.pop(field.name) for field in dataclasses.fields(kind)})  # type: ignore[operator]
            for name, kind in groups.items()
        }
        command(**given, **made)

    parameters = [
        parameter(name, hints[name], p.default)
        for name, p in inspect.signature(command).parameters.items()
        if name not in groups
    ]
    for kind in groups.values():
        of = get_type_hints(kind, include_extras=True)
        parameters += [parameter(field.name, of[field.name], field.default) for field in dataclasses.fields(kind)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def parameter(name: str, hint: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
