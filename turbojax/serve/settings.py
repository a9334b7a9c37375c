"""What the command line says of the server: ServeConfig."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from turbojax.errors import ConfigError
from turbojax.rules import as_tuple, check, is_int, is_real
from turbojax.serve.parsing import REASONING_STYLES, TOOL_STYLES

DEFAULT_PORT = 23333  # LMDeploy's
LOG_LEVELS = ("debug", "info", "warning", "error")
SECONDS = (1e-3, 1e9)  # least and most of a time limit
# Python's JSON reader gives up below a thousand or so, depending on how deep its caller stands.
MAX_JSON_DEPTH = 500

Rules = dict[str, tuple[bool, str]]
"""By field: whether its value holds, and what is accepted."""


@dataclass(frozen=True)
class ServeConfig:
    """How the server runs. Names follow LMDeploy's `serve api_server`.

    Attributes:
        server_name: the address to listen at; the default is this machine alone.
        server_port: 0 takes a free one.
        model_name: what clients call the model; None is its folder's or repository's name.
        api_keys: a client must present one of these, where there are any.
        allow_origins: pages of these origins may call from a browser; "*" is all.
        ssl_certfile, ssl_keyfile: PEM files, of the certificate and of its key; with them the server speaks TLS.
        max_connections: connections that are open at once; any more are closed with a 503.
        max_concurrent_requests: requests that are worked on at once, those that wait for the engine included; any
            more get a 429.
        max_body_bytes: of a request's body.
        max_upload_bytes: of one to /v1/files, which goes to disk as it comes.
        max_json_depth: of arrays and objects inside one another in a body.
        min_priority: the best `priority` that a client may ask for; lower ones are served first, and 0 is what who
            asks for none has.
        receive_timeout_s: a client has sent its whole request by then; an upload has `request_timeout_s`.
        send_timeout_s: a client whose answer waits to be sent has read on by then.
        request_timeout_s: a request is answered whole by then; None is never.
        drain_s: on a signal to end, requests that run have so long to end by themselves.
        stall_s: an engine that has work, and finishes no step and compiles no program for so long, is not healthy.
        log_level: of the least important lines that are logged.
        log_json: a line is a JSON object, instead of text.
        chat_template: a file with the Jinja template of chats, in place of the model's own; read at the start alone.
        tool_call_parser: the style of the model's tool calls; "auto" is as the chat template shows it, "none" leaves
            them in the text.
        reasoning_parser: likewise of its reasoning.
        batch_dir: a folder that files and batches are kept in; without one they are off.
        max_batch_dir_bytes: of all files in it together; further uploads are refused.
        max_batch_requests: of one batch.
        batch_concurrency: requests of batches that run at once; None is half of the engine's slots.
        batch_priority: of those that say none themselves; `min_priority` at least.

    Raises:
        ConfigError: a field is out of range.
    """

    server_name: str = "127.0.0.1"
    server_port: int = DEFAULT_PORT
    model_name: str | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    allow_origins: tuple[str, ...] = ()
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    max_connections: int = 2048
    max_concurrent_requests: int = 1024
    max_body_bytes: int = 8 << 20
    max_upload_bytes: int = 256 << 20
    max_json_depth: int = 64
    min_priority: int = 0
    receive_timeout_s: float = 60.0
    send_timeout_s: float = 60.0
    request_timeout_s: float | None = 3600.0
    drain_s: float = 30.0
    stall_s: float = 120.0
    log_level: str = "info"
    log_json: bool = False
    chat_template: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    batch_dir: str | None = None
    max_batch_dir_bytes: int = 64 << 30
    max_batch_requests: int = 50_000  # OpenAI's
    batch_concurrency: int | None = None
    batch_priority: int = 1000

    def __post_init__(self) -> None:
        for name in ("api_keys", "allow_origins"):
            object.__setattr__(self, name, as_tuple("ServeConfig", name, getattr(self, name)))
        if not all(map(is_key, self.api_keys)):  # the message must not show them
            accepted = "texts of visible ASCII characters, 8 at least"
            raise ConfigError("ServeConfig", "api_keys", f"{len(self.api_keys)} keys", accepted)
        rules = {
            "server_name": (isinstance(self.server_name, str) and self.server_name != "", "an address or host name"),
            "server_port": (is_int(self.server_port, 0, 65535), "an int of 0 .. 65535 (0 takes a free port)"),
            "model_name": (
                self.model_name is None or (isinstance(self.model_name, str) and self.model_name != ""),
                "None or a text that is not empty",
            ),
        }
        check("ServeConfig", self, rules | self._operation_rules() | self._chat_rules())
        check("ServeConfig", self, self._batch_rules())  # one of which compares with a field above

    def _chat_rules(self) -> Rules:
        """What a server may be told of conversations."""
        tools, reasoning = (("auto", "none", *styles) for styles in (TOOL_STYLES, REASONING_STYLES))
        return {
            "chat_template": (
                self.chat_template is None or (isinstance(self.chat_template, str) and self.chat_template != ""),
                "None or the path of a file",
            ),
            "tool_call_parser": (self.tool_call_parser in tools, f"one of {', '.join(tools)}"),
            "reasoning_parser": (self.reasoning_parser in reasoning, f"one of {', '.join(reasoning)}"),
        }

    def _batch_rules(self) -> Rules:
        """What a server may be told of files and batches."""
        return {
            "batch_dir": (
                self.batch_dir is None or (isinstance(self.batch_dir, str) and self.batch_dir != ""),
                "None or the path of a folder",
            ),
            "max_batch_dir_bytes": (is_int(self.max_batch_dir_bytes, 1), "an int of 1 at least"),
            "max_batch_requests": (is_int(self.max_batch_requests, 1), "an int of 1 at least"),
            "batch_concurrency": (
                self.batch_concurrency is None or is_int(self.batch_concurrency, 1), "None or an int of 1 at least"
            ),
            "batch_priority": (
                is_int(self.batch_priority, self.min_priority, 2**31 - 1), "an int of 32 bits, min_priority at least"
            ),
        }  # fmt: skip

    def _operation_rules(self) -> Rules:
        """What a server in operation may be told."""
        is_pair = (self.ssl_certfile is None) == (self.ssl_keyfile is None)
        limit_s = self.request_timeout_s
        rules: Rules = {
            "allow_origins": (all(map(is_origin, self.allow_origins)), '"*", or origins as https://example.com'),
            "ssl_certfile": (is_pair, "None, or a PEM file beside that of ssl_keyfile"),
            "request_timeout_s": (limit_s is None or is_real(limit_s, *SECONDS), "None or a number of seconds above 0"),
            "log_level": (self.log_level in LOG_LEVELS, f"one of {', '.join(LOG_LEVELS)}"),
        }
        for name in ("max_connections", "max_concurrent_requests", "max_body_bytes", "max_upload_bytes"):
            rules[name] = (is_int(getattr(self, name), 1), "an int of 1 at least")
        rules["max_json_depth"] = (is_int(self.max_json_depth, 1, MAX_JSON_DEPTH), f"an int of 1 .. {MAX_JSON_DEPTH}")
        rules["min_priority"] = (is_int(self.min_priority, -(2**31), 0), "an int of 32 bits, 0 at most")
        for name in ("receive_timeout_s", "send_timeout_s", "stall_s"):
            rules[name] = (is_real(getattr(self, name), *SECONDS), "a number of seconds above 0")
        rules["drain_s"] = (is_real(self.drain_s, 0, SECONDS[1]), "a number of seconds, 0 at least")
        return rules


def is_key(key: object) -> bool:
    """A key that an HTTP header can carry as it is, and that nobody guesses by trying short ones."""
    return isinstance(key, str) and len(key) >= 8 and all("!" <= letter <= "~" for letter in key)


def is_origin(origin: object) -> bool:
    """As browsers send it: scheme, host and maybe a port, with no path."""
    return isinstance(origin, str) and (origin == "*" or re.fullmatch(r"https?://[^/\s]+", origin) is not None)
