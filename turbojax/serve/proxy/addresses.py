"""What a node's URL may be, and the one spelling that it is known by."""

from __future__ import annotations

from urllib.parse import urlsplit

from turbojax.errors import ConfigError

ACCEPTED = "http(s)://host[:port][/prefix], without user, query or fragment"
_DEFAULT_PORTS = {"http": 80, "https": 443}


def node_url(text: str) -> str:
    """The base that paths such as /v1/models are put behind.

    Scheme and host in lower case, the scheme's own port left out, no slash at the end; a /v1 at the end, as clients
    write it in their `base_url`, is taken off.

    Raises:
        ConfigError: it is not such a URL.
    """
    refused = ConfigError("node", "url", text, ACCEPTED)
    if not isinstance(text, str) or not text.isascii() or not text.isprintable() or " " in text:
        raise refused
    try:
        parts = urlsplit(text)
        port = parts.port  # raises outside 0 .. 65535
    except ValueError as error:
        raise refused from error
    # urlsplit has dropped an empty query or fragment, which is why the text itself is asked.
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname or "@" in parts.netloc or set(text) & set("?#\\"):
        raise refused
    if port == 0 or ".." in parts.path.split("/"):
        raise refused
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    if port is not None and port != _DEFAULT_PORTS[parts.scheme]:
        host = f"{host}:{port}"
    return f"{parts.scheme}://{host}{parts.path.rstrip('/').removesuffix('/v1').rstrip('/')}"
