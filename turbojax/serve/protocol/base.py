"""How bodies are read: known fields of the right type alone, and what is known but not offered refused by reason."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, WrapValidator
from pydantic_core import PydanticCustomError

UNSUPPORTED = "unsupported_parameter"


class Strict(BaseModel):
    """A part of a request: an unknown field is an error, and so is a value that would have to be converted."""

    model_config = ConfigDict(extra="forbid", strict=True)


def because(reason: str) -> WrapValidator:
    """Beside the type of what a field accepts: why all else is refused."""

    def validate(value: Any, accept: Any) -> Any:
        try:
            return accept(value)
        except ValidationError as error:
            raise PydanticCustomError(UNSUPPORTED, "{reason}", {"reason": reason}) from error

    return WrapValidator(validate)
