"""Fields of `quantization_config`, held against what can be honoured before any tensor is looked at."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkpoints.errors import ConfigError, UnsupportedFormatError


def expect(path: Path, field: str, value: Any, accepted: Sequence[Any]) -> None:
    """Holds a field against the values that are supported.

    Raises:
        UnsupportedFormatError: naming the field, what came and what is accepted.
    """
    if value not in accepted:
        reason = f"quantization_config: {field} is {value!r}"
        hint = f"supported: {', '.join(map(repr, accepted))}"
        raise UnsupportedFormatError(path / "config.json", reason, hint=hint)


def group_size_setting(path: Path, settings: dict[str, Any], *names: str) -> int | None:
    """Rows of K under one scale, under the first of `names` that the settings hold; -1 is all, None is not said.

    Raises:
        ConfigError: it is no size.
    """
    for name in names:
        value = settings.get(name)
        if value is None:
            continue
        if type(value) is not int or (value < 1 and value != -1):
            reason = f"quantization_config: {name} is {value!r}"
            raise ConfigError(path / "config.json", reason, hint="a positive integer or -1 is expected")
        return value
    return None
