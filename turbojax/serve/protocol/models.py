"""GET /v1/models."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class ModelCard(BaseModel):
    """A model; `max_model_len` is the most tokens of a sequence, prompt and answer."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "turbojax"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
