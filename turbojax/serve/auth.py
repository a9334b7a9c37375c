"""Who may ask: API keys, and pages of other origins."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from hashlib import sha256

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from turbojax.serve.openai_errors import ApiError
from turbojax.serve.settings import ServeConfig

# Probes have no key; the page asks its reader for one.
OPEN_PATHS = frozenset({"/", "/health", "/health/live", "/health/ready"})
SCHEME = b"bearer "


def install(app: FastAPI, config: ServeConfig) -> None:
    """Asks for keys where there are any; pages of the origins may call, and see what they are refused."""
    if config.api_keys:
        app.add_middleware(ApiKeys, keys=config.api_keys)
    if config.allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allow_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )


class Keys:
    """Tells whether a request presents one of some keys, as `Authorization: Bearer KEY`.

    Neither content nor length of a key shows in the time that a comparison takes: digests of equal length are compared,
    each with each, and never with an early end.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [sha256(key.encode()).digest() for key in keys]

    def knows(self, scope: Scope) -> bool:
        """Whether the request's key is one of them."""
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        key = given[len(SCHEME) :].strip() if given[: len(SCHEME)].lower() == SCHEME else b""
        digest = sha256(key).digest()
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def key_needed() -> ApiError:
    return ApiError(
        401,
        "a valid API key is needed: send it as 'Authorization: Bearer KEY'",
        "authentication_error",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


class ApiKeys:
    """Lets through who presents a key."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app, self._keys = app, Keys(keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._keys.knows(scope):
            return await self._app(scope, receive, send)
        error = key_needed()
        await JSONResponse(error.body, error.status, error.headers)(scope, receive, send)
