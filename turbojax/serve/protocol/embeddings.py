"""POST /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from turbojax.serve.protocol.base import Strict
from turbojax.serve.protocol.completions import Prompt, TokenIds


class EmbeddingRequest(Strict):
    """OpenAI's fields."""

    model: str
    input: (
        Prompt
        | TokenIds
        | Annotated[list[Prompt], Field(min_length=1, max_length=2048)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=2048)]
    )
    dimensions: Annotated[int, Field(ge=1)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None
