"""Routes for the operator: /nodes/status, /nodes/add, /nodes/remove."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field

from turbojax.serve.auth import Keys, key_needed
from turbojax.serve.openai_errors import ApiError
from turbojax.serve.proxy.addresses import node_url
from turbojax.serve.proxy.proxy import Proxy, proxy_of
from turbojax.serve.proxy.settings import is_sendable


def _operator(request: Request) -> Proxy:
    """The proxy, for whoever has an admin key.

    Raises:
        ApiError: 403, the proxy has no admin keys; 401, the request has none of them.
    """
    proxy = proxy_of(request)
    if not proxy.config.admin_keys:
        message = "The proxy was started without admin keys, so its nodes stay as they are."
        raise ApiError(403, message, "permission_error", code="no_admin_keys")
    if not Keys(proxy.config.admin_keys).knows(request.scope):
        raise key_needed()
    return proxy


Operated = Annotated[Proxy, Depends(_operator)]
router = APIRouter(prefix="/nodes", tags=["nodes"])


class NodeRef(BaseModel):
    """A node by its URL."""

    model_config = ConfigDict(extra="forbid")
    url: str = Field(max_length=2048)


class NewNode(NodeRef):
    """A node, the key that it wants, and how many requests it is given at once.

    A key of null passes the client's on; left out, it is that of all nodes.
    """

    api_key: str | None = Field(None, max_length=1024)
    max_connections: int | None = Field(None, ge=1, le=1 << 20)


@router.get("/status")
async def status(proxy: Operated) -> dict[str, dict[str, Any]]:
    """How each node stands."""
    return {node.url: node.status() for node in proxy.fleet}


@router.post("/add")
async def add(body: NewNode, proxy: Operated) -> dict[str, dict[str, Any]]:
    """Adds a node and checks it once; one that is not up yet is kept and checked again."""
    if body.api_key is not None and not is_sendable(body.api_key):
        raise ApiError(400, "api_key: a text of visible ASCII characters is accepted", param="api_key")
    key = body.api_key if "api_key" in body.model_fields_set else proxy.config.node_api_key
    node = proxy.fleet.add(node_url(body.url), key, body.max_connections)
    await proxy.checks.check(node)
    proxy.checks.start(node)
    return {node.url: node.status()}


@router.post("/remove")
async def remove(body: NodeRef, proxy: Operated) -> dict[str, dict[str, Any]]:
    """Gives a node nothing new; it is gone when what it has is ended."""
    node = proxy.fleet.remove(node_url(body.url))
    if node is None:
        raise ApiError(404, f"There is no node {body.url}.", param="url", code="node_not_found")
    return {node.url: node.status()}
