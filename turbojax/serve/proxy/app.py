"""The proxy's HTTP application: OpenAI's routes that go to a node, and those of the proxy itself."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client.exposition import choose_encoder
from starlette.routing import Route

from turbojax import __version__
from turbojax.serve import auth, limits, logs, openai_errors
from turbojax.serve.openai_errors import ApiError
from turbojax.serve.proxy import admin
from turbojax.serve.proxy.proxy import Proxy, proxy_of
from turbojax.serve.proxy.relay import Relay
from turbojax.serve.proxy.settings import ProxyConfig

# All that a client can reach of a node. Files and batches live on one node, and name no model that leads there.
GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
OTHERS = ("/v1/embeddings", "/tokenize", "/detokenize")

router = APIRouter()
Shared = Annotated[Proxy, Depends(proxy_of)]


def create_app(config: ProxyConfig) -> FastAPI:
    """The application; its proxy runs as long as its lifespan."""
    proxy = Proxy(config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with proxy.running():
            yield

    app = FastAPI(title="turbojax proxy", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.state.proxy = proxy
    for path in GENERATING + OTHERS:
        relay = Relay(path, proxy, generates=path in GENERATING)
        app.router.routes.append(Route(path, relay, methods=["POST"]))
    app.include_router(router)
    app.include_router(admin.router)
    openai_errors.install(app)
    # What is installed later stands further out: what limits and keys refuse is logged too.
    limits.install(app, config.server, proxy.gate)
    auth.install(app, _with_operators(config))
    logs.install(app, proxy.metrics.http)
    return app


def _with_operators(config: ProxyConfig) -> Any:
    """Where clients need keys, operators come in with their own; their routes ask for it once more."""
    keys = config.server.api_keys
    return dataclasses.replace(config.server, api_keys=keys + config.admin_keys if keys else ())


@router.get("/health")
@router.get("/health/ready")
async def ready(proxy: Shared) -> JSONResponse:
    """200 while a node is up and the proxy takes requests."""
    num_up = sum(node.health.is_up and not node.is_removed for node in proxy.fleet)
    status = "draining" if proxy.gate.is_draining else "ok" if num_up else "no_node"
    return JSONResponse({"status": status}, 200 if status == "ok" else 503)


@router.get("/health/live")
async def live() -> dict[str, str]:
    """200 while the proxy answers at all."""
    return {"status": "ok"}


@router.get("/metrics")
async def read_metrics(request: Request, proxy: Shared) -> Response:
    """What the proxy counts, as text or in OpenMetrics' form, whichever the reader accepts."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(proxy.metrics.registry), media_type=content_type)


@router.get("/v1/models")
async def list_models(proxy: Shared) -> dict[str, Any]:
    """The models of all nodes that are up."""
    return {"object": "list", "data": list(proxy.fleet.models().values())}


@router.get("/v1/models/{model:path}")
async def retrieve_model(model: str, proxy: Shared) -> dict[str, Any]:
    """One of them."""
    card = proxy.fleet.models().get(model)
    if card is None:
        raise ApiError(404, f"The model '{model}' does not exist.", param="model", code="model_not_found")
    return card
