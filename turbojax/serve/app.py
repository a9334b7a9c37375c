"""The HTTP application: every part's routes on one service."""

from __future__ import annotations

from fastapi import FastAPI

from turbojax import __version__
from turbojax.serve import (
    auth,
    chat,
    completions,
    embeddings,
    health,
    limits,
    logs,
    metrics,
    models,
    openai_errors,
    tokens,
)
from turbojax.serve.batches import routes as batches
from turbojax.serve.page import router as page
from turbojax.serve.service import Service

ROUTERS = (
    page.router, models.router, chat.router, completions.router, embeddings.router, tokens.router, health.router,
    metrics.router, batches.router,
)  # fmt: skip


def create_app(service: Service) -> FastAPI:
    """Routes, middlewares and error bodies around one service."""
    # A redirect to the path without its last slash would be an empty answer for clients that do not follow it.
    app = FastAPI(title="turbojax", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.service = service
    for router in ROUTERS:
        app.include_router(router)
    openai_errors.install(app)
    # What is installed later stands further out: what limits and keys refuse is logged too.
    limits.install(app, service.config, service.gate)
    auth.install(app, service.config)
    logs.install(app, service.metrics.http)
    return app
