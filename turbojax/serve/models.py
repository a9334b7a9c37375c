"""GET /v1/models: the model that is served."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends

from turbojax.serve.openai_errors import ApiError
from turbojax.serve.protocol.models import ModelCard, ModelList
from turbojax.serve.replies import documented
from turbojax.serve.service import Service, service_of

router = APIRouter(tags=["models"])


def card(service: Service) -> ModelCard:
    return ModelCard(id=service.model_name, created=service.created, max_model_len=service.pipe.session_len)


def check_model(name: str, service: Service) -> None:
    """A request names the model that is served.

    Raises:
        ApiError: 404, another one.
    """
    if name != service.model_name:
        message = f"The model '{name}' does not exist; this server has '{service.model_name}'."
        raise ApiError(404, message, param="model", code="model_not_found")


@router.get("/v1/models", responses=documented(ModelList))
async def list_models(service: Annotated[Service, Depends(service_of)]) -> ModelList:
    """The models that requests may name."""
    return ModelList(data=[card(service)])


@router.get("/v1/models/{model:path}", responses=documented(ModelCard))
async def retrieve_model(model: str, service: Annotated[Service, Depends(service_of)]) -> ModelCard:
    """One of them."""
    check_model(model, service)
    return card(service)
