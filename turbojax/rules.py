"""What a field of a config may hold, and the error that names the one which does not."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from turbojax.errors import ConfigError


def is_int(value: Any, low: float = -math.inf, high: float = math.inf) -> bool:
    """An integer of low .. high; bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_real(value: Any, low: float, high: float) -> bool:
    """A finite number of low .. high; bool is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and low <= value <= high


def check(owner: str, config: object, rules: dict[str, tuple[bool, str]]) -> None:
    """Each field's rule holds.

    Raises:
        ConfigError: the first that does not, with what is accepted.
    """
    for field, (holds, accepted) in rules.items():
        if not holds:
            raise ConfigError(owner, field, getattr(config, field), accepted)


def as_tuple(owner: str, field: str, value: Any) -> tuple[Any, ...]:
    """A list or the like as a tuple, None as none; a bare text would fall apart into its letters.

    Raises:
        ConfigError: neither.
    """
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ConfigError(owner, field, value, "a list or tuple")
    return tuple(value)
