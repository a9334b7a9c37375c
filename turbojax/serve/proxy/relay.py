"""Routes that go to a node, and what is logged of each request."""

from __future__ import annotations

import time

from starlette.types import Receive, Scope, Send

from turbojax.serve import logs
from turbojax.serve.openai_errors import ApiError
from turbojax.serve.proxy.ask import read_ask
from turbojax.serve.proxy.exchange import Call, Exchange
from turbojax.serve.proxy.proxy import Proxy


class Relay:
    """An ASGI endpoint, so that no framework stands between a node's bytes and the client's.

    `serve.limits` is in front: it has read the body, and cancels this when the client goes away.

    Attributes:
        path: of the route, here and at the node.
    """

    def __init__(self, path: str, proxy: Proxy, *, generates: bool) -> None:
        """`generates`: the route generates tokens."""
        self.path, self._proxy, self._generates = path, proxy, generates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = self  # its path is the label of what is counted
        started_at, request_id = time.monotonic(), logs.request_id() or ""
        body = await _whole_body(scope, receive)
        ask = read_ask(body, self._proxy.fleet.outputs, generates=self._generates)
        exchange = Exchange(self._proxy, Call(scope, body, ask, request_id, started_at), send)
        try:
            await exchange.run()
        finally:
            url = None if exchange.node is None else exchange.node.url
            logs.log_event("relayed", node=url, num_tries=exchange.num_tries, outcome=exchange.outcome)


async def _whole_body(scope: Scope, receive: Receive) -> bytes:
    """The body, which may have to be sent twice.

    Raises:
        ApiError: 415, it is compressed: nobody could read which model it asks for.
    """
    encodings = [value.lower() for name, value in scope["headers"] if name == b"content-encoding"]
    if any(encoding != b"identity" for encoding in encodings):
        raise ApiError(415, "the body must not be compressed")
    pieces, is_more = [], True
    while is_more:
        message = await receive()
        pieces.append(message.get("body", b""))
        is_more = message.get("more_body", False)
    return b"".join(pieces)
