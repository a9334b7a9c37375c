"""Requests to nodes: one connection pool, and everything that can go wrong with a node as one error."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from turbojax.serve.proxy.ask import MAX_MODEL_NAMES, MAX_NAME_LEN
from turbojax.serve.proxy.node import Node
from turbojax.serve.proxy.settings import ProxyConfig

MIB = 1 << 20
# Below the 5 s after which uvicorn closes a connection that nobody uses: a request must not meet the closing.
KEEP_ALIVE_S = 4.0
# aiohttp reads this much ahead of a client that is slow, and then lets the node wait.
READ_AHEAD_BYTES = 1 << 16
# What the library would add of its own; the client's headers are all that a node gets.
_NOT_ADDED = ("Accept", "Accept-Encoding", "User-Agent", "Content-Type")
_MISSING = (404, 405)
# What our /health says of an engine that will not end what it has; one that drains will.
_LOST = (b'"stuck"', b'"failed"')


class NodeFailure(Exception):
    """A node did not answer, or not to the end.

    Attributes:
        kind: "unreachable" (no connection), "broken", "timeout", "refused" (an answer that says: not now, or not here).
        answer: of "refused": status, headers and body, for the client if no other node takes the request.
    """

    def __init__(
        self, kind: str, message: str, answer: tuple[int, list[tuple[bytes, bytes]], bytes] | None = None
    ) -> None:
        super().__init__(message)
        self.kind, self.answer = kind, answer


def _failure(error: Exception) -> NodeFailure:
    is_unreachable = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
    text = " ".join(str(error).split()) or type(error).__name__
    return NodeFailure("unreachable" if is_unreachable else "broken", text)


class Upstream:
    """Usable while `opened`, in that event loop."""

    def __init__(self, config: ProxyConfig) -> None:
        self._config = config
        self._opened: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """The connections, which are closed at the end."""
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            auto_decompress=False,  # bytes go on as they came
            cookie_jar=aiohttp.DummyCookieJar(),  # one client's cookies are not another's
            skip_auto_headers=_NOT_ADDED,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._config.connect_timeout_s),
            read_bufsize=READ_AHEAD_BYTES,
            trust_env=False,  # a node is where the operator says, whatever http_proxy says
        )
        async with session:
            self._opened = session
            try:
                yield
            finally:
                self._opened = None

    @property
    def _session(self) -> aiohttp.ClientSession:
        assert self._opened is not None, "requests come while the proxy runs"
        return self._opened

    async def post(
        self, node: Node, path: str, query: bytes, body: bytes, headers: CIMultiDict[str]
    ) -> aiohttp.ClientResponse:
        """The node's answer once its status and headers are there. Redirects are not followed.

        Raises:
            NodeFailure: "unreachable" or "broken".
        """
        suffix = f"?{query.decode('latin-1')}" if query else ""
        url = URL(f"{node.url}{path}{suffix}", encoded=True)
        try:
            # Of large bytes aiohttp says that writing them in one piece holds up the loop; a file goes in pieces.
            data = body if len(body) < MIB else io.BytesIO(body)
            return await self._session.post(url, data=data, headers=headers, allow_redirects=False)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _failure(error) from error

    async def read(self, response: aiohttp.ClientResponse) -> bytes:
        """What has come since, at least a byte; empty at the end.

        Raises:
            NodeFailure: "broken", the end is missing.
        """
        try:
            return await response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise _failure(error) from error

    async def read_at_most(self, response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
        """All that an answer has still.

        Raises:
            NodeFailure: "broken", the end is missing; "refused", there is more than `max_bytes`.
        """
        parts, size = [], 0
        while part := await self.read(response):
            parts.append(part)
            size += len(part)
            if size > max_bytes:
                raise NodeFailure("refused", f"{response.url.path} answers more than {max_bytes} bytes")
        return b"".join(parts)

    async def check(self, node: Node) -> dict[str, dict[str, Any]]:
        """Cards of what the node serves, by name, where it says that it is well.

        Not every OpenAI endpoint has /health; /v1/models they all have.

        Raises:
            NodeFailure: it does not answer, or is not well.
        """
        status, text = await self._get(node, "/health")
        if status != 200 and status not in _MISSING:
            is_lost = any(word in text for word in _LOST)
            raise NodeFailure("broken" if is_lost else "refused", f"/health answers {status}")
        status, text = await self._get(node, "/v1/models")
        if status != 200:
            raise NodeFailure("refused", f"/v1/models answers {status}")
        return _cards(text)

    async def _get(self, node: Node, path: str) -> tuple[int, bytes]:
        headers = {"Accept": "application/json"}
        if node.api_key is not None:
            headers["Authorization"] = f"Bearer {node.api_key}"
        limit = asyncio.timeout(self._config.health_timeout_s)
        try:
            async with limit, self._session.get(URL(node.url + path), headers=headers, allow_redirects=False) as got:
                return got.status, await self.read_at_most(got, MIB)
        except TimeoutError as error:
            if not limit.expired():
                raise _failure(error) from error
            raise NodeFailure("timeout", f"{path}: no answer in {self._config.health_timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _failure(error) from error


def _cards(text: bytes) -> dict[str, dict[str, Any]]:
    """The models of a /v1/models."""
    try:
        cards = json.loads(text)["data"]
        named = {card["id"]: card for card in cards}
        is_sound = all(isinstance(name, str) and 0 < len(name) <= MAX_NAME_LEN for name in named)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise NodeFailure("refused", "/v1/models answers something else than a list of models") from error
    if not is_sound or len(named) > MAX_MODEL_NAMES:
        raise NodeFailure("refused", f"/v1/models lists more than {MAX_MODEL_NAMES} models, or names that are none")
    return named
