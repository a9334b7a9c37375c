"""The body of every error."""

from __future__ import annotations

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """What is wrong: in words, its kind, the field at fault, and a word for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    error: ErrorDetail
