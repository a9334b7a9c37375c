"""Which headers a proxy passes on, and which it writes itself."""

from __future__ import annotations

from collections.abc import Iterable

from multidict import CIMultiDict
from starlette.types import Scope

RawHeaders = Iterable[tuple[bytes, bytes]]

# Of one connection, not of the message (RFC 9110, 7.6.1).
_HOP_BY_HOP = {
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
    b"transfer-encoding", b"upgrade",
}  # fmt: skip
# The client library writes its own; what a client says of where it comes from is not believed.
_OWN_TO_NODE = {
    b"host", b"content-length", b"expect", b"x-request-id", b"forwarded", b"x-forwarded-for",
    b"x-forwarded-host", b"x-forwarded-proto", b"x-forwarded-port", b"x-real-ip",
}  # fmt: skip
# The server in front writes its own.
_OWN_TO_CLIENT = {b"server", b"date", b"x-request-id"}


def _passed(headers: RawHeaders, own: set[bytes]) -> list[tuple[bytes, bytes]]:
    lowered = [(name.lower(), value) for name, value in headers]
    named = {part.strip().lower() for name, value in lowered if name == b"connection" for part in value.split(b",")}
    return [(name, value) for name, value in lowered if name not in _HOP_BY_HOP | named | own]


def to_node(scope: Scope, request_id: str, api_key: str | None) -> CIMultiDict[str]:
    """Headers of a request as a node gets them.

    Args:
        scope: of the client's request.
        request_id: passed on, so that logs of both can be read together.
        api_key: the node's; None passes on what the client sent.
    """
    own = _OWN_TO_NODE if api_key is None else _OWN_TO_NODE | {b"authorization"}
    passed = _passed(scope["headers"], own)
    headers = CIMultiDict((name.decode("latin-1"), value.decode("latin-1")) for name, value in passed)
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    headers["X-Request-Id"] = request_id
    if scope.get("client"):
        headers["X-Forwarded-For"] = scope["client"][0]
    headers["X-Forwarded-Proto"] = scope["scheme"]
    return headers


def to_client(raw: RawHeaders) -> list[tuple[bytes, bytes]]:
    """Headers of an answer as the client gets them. Which pages may call is the proxy's to say, not each node's."""
    return [pair for pair in _passed(raw, _OWN_TO_CLIENT) if not pair[0].startswith(b"access-control-")]
