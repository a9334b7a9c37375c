"""POST /v1/embeddings: says that there are none.

The models here were trained to go on with texts. The mean of their last hidden states is no embedding that texts could
be compared by: a model that was not trained for it puts nearly all texts close together. A vector that looks like one
would be worse than an error (docs/serving.md).
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends

from turbojax.serve.models import check_model
from turbojax.serve.openai_errors import ApiError
from turbojax.serve.protocol.embeddings import EmbeddingRequest
from turbojax.serve.replies import ERRORS
from turbojax.serve.service import Service, service_of

router = APIRouter(tags=["embeddings"])


@router.post("/v1/embeddings", status_code=400, responses=ERRORS, response_model=None)
async def embeddings(body: EmbeddingRequest, service: Annotated[Service, Depends(service_of)]) -> None:
    """Always an error: the model generates text and was not trained to embed it.

    (Of status 400, since clients try again what fails with 501.)
    """
    check_model(body.model, service)
    message = f"'{body.model}' generates text; it was not trained to embed it, so this server has no embeddings"
    raise ApiError(400, message, param="model", code="no_embeddings")
