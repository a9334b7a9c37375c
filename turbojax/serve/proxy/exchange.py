"""One request and its answer: tried on nodes until one answers, then passed on byte for byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import time
from dataclasses import dataclass

import aiohttp
from starlette.types import Scope, Send

from turbojax.serve.logs import log_event
from turbojax.serve.openai_errors import SERVER, ApiError
from turbojax.serve.proxy import headers
from turbojax.serve.proxy.ask import Ask
from turbojax.serve.proxy.fleet import Lease
from turbojax.serve.proxy.node import Node
from turbojax.serve.proxy.proxy import Proxy
from turbojax.serve.proxy.upstream import NodeFailure

# Answers that another node may give better: too much to do, going away, or a gateway without the server behind it.
# A 500 is the request's own: it would fail everywhere, and take one engine's step after the other with it.
RETRIED_STATUSES = (429, 502, 503, 504)
# A request at which so many nodes broke may be why: it goes to no further one.
MAX_BROKEN = 2
MAX_REFUSAL_BYTES = 1 << 16
_USAGE = re.compile(rb'"completion_tokens"\s*:\s*(\d{1,9})')
_USAGE_BYTES = 1024  # the end of an answer, where its usage stands


class ClientTooSlow(Exception):
    """A client takes nothing of its answer."""


@dataclass(frozen=True)
class Call:
    """A client's request.

    Attributes:
        scope: of ASGI.
        body: as it came.
        ask: what the router reads in it.
        request_id: of the client, or new.
        started_at: by time.monotonic.
    """

    scope: Scope
    body: bytes
    ask: Ask
    request_id: str
    started_at: float


class Exchange:
    """Runs once. The client gets nothing before the first byte of an answer is there, so that another node may give it.

    Attributes:
        status: what the client was told; None before.
        node: the one that answered, or was tried last.
        num_tries: how many were asked.
        outcome: of the last try: "answered", "client_gone", "client_too_slow", or the kind of a `NodeFailure`.
    """

    def __init__(self, proxy: Proxy, call: Call, send: Send) -> None:
        self._proxy, self._call, self._send = proxy, call, send
        self.status: int | None = None
        self.node: Node | None = None
        self.num_tries = 0
        self.outcome: str | None = None
        self._is_event_stream = False
        self._awaits_client = False

    async def run(self) -> None:
        """Gives the client an answer.

        Raises:
            ApiError: nobody gave one; nothing was sent.
        """
        tried: set[Node] = set()
        failure: NodeFailure | None = None
        num_broken = 0
        while len(tried) < self._proxy.config.max_tries:
            lease = self._proxy.fleet.lease(self._call.ask, tried)
            if lease is None:
                break
            self.node = lease.node
            tried.add(lease.node)
            self.num_tries += 1
            failure = await self._attempt(lease)
            if failure is None:
                return
            num_broken += failure.kind == "broken"
            if failure.kind == "timeout" or num_broken == MAX_BROKEN:
                break
        assert failure is not None
        await self._give_up(failure)

    async def _attempt(self, lease: Lease) -> NodeFailure | None:
        """Asks one node; returns what went wrong before the client got anything."""
        self.outcome = "client_gone"
        try:
            await self._relay(lease)
            self.outcome = "answered"
        except ClientTooSlow:
            self.outcome = "client_too_slow"
        except NodeFailure as failure:
            self.outcome = failure.kind
            self._note(lease.node, failure)
            if self.status is None:
                return failure
            await self._break_off(failure)
        finally:
            self._proxy.metrics.tries.labels(lease.node.url, self.outcome).inc()
            lease.end(is_whole=self.outcome == "answered")
        return None

    async def _relay(self, lease: Lease) -> None:
        """Asks the node and passes its answer on; one time limit moves from each thing waited for to the next.

        Raises:
            NodeFailure: the node's; where `status` is set, the client has got a part.
            ClientTooSlow: it takes nothing.
        """
        node, response = lease.node, None
        limit = asyncio.timeout(self._proxy.config.first_byte_timeout_s)
        node.waiting.add(limit)
        try:
            async with limit:
                response = await self._open(node)
                first = await self._proxy.upstream.read(response)
                node.waiting.discard(limit)
                lease.answered()
                await self._start(response, node)
                await self._pass_on(response, first, lease, limit)
        except TimeoutError as error:
            raise self._timed_out(node) from error
        finally:
            node.waiting.discard(limit)
            if response is not None:
                response.close()  # of an answer that was read to its end, the connection is back in the pool already

    async def _open(self, node: Node) -> aiohttp.ClientResponse:
        call, upstream = self._call, self._proxy.upstream
        to_node = headers.to_node(call.scope, call.request_id, node.api_key)
        response = await upstream.post(node, call.scope["path"], call.scope["query_string"], call.body, to_node)
        if response.status not in RETRIED_STATUSES:
            return response
        try:
            passed = headers.to_client(response.raw_headers)
            answer = response.status, passed, await upstream.read_at_most(response, MAX_REFUSAL_BYTES)
        finally:
            response.close()
        raise NodeFailure("refused", f"answers {response.status}", answer)

    async def _start(self, response: aiohttp.ClientResponse, node: Node) -> None:
        if response.status < 500:
            node.health.request_answered()
        self._proxy.metrics.first_byte.labels(node.url).observe(time.monotonic() - self._call.started_at)
        is_plain = response.headers.get("Content-Encoding", "identity") == "identity"
        self._is_event_stream = is_plain and response.content_type == "text/event-stream"
        self.status = response.status
        passed = headers.to_client(response.raw_headers)
        await self._send({"type": "http.response.start", "status": response.status, "headers": passed})

    async def _pass_on(
        self, response: aiohttp.ClientResponse, chunk: bytes, lease: Lease, limit: asyncio.Timeout
    ) -> None:
        loop, idle_s, end = asyncio.get_running_loop(), self._proxy.config.idle_timeout_s, b""
        while chunk:
            # Until the client has taken this piece and the node has sent the next: moving it takes some microseconds.
            self._awaits_client = True
            limit.reschedule(loop.time() + idle_s)
            await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
            self._awaits_client = False
            if self._is_event_stream:
                lease.generated(chunk.count(b"\n\n") + chunk.count(b"\r\n\r\n"))  # about a token an event
            else:
                end = (end + chunk)[-_USAGE_BYTES:]
            chunk = await self._proxy.upstream.read(response)
        if usage := _USAGE.search(end):
            lease.generated(int(usage[1]))
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def _timed_out(self, node: Node) -> NodeFailure | ClientTooSlow:
        if self._awaits_client:
            return ClientTooSlow()
        if self.status is None and not node.health.is_up:
            return NodeFailure("unreachable", "does not answer checks any more")
        config = self._proxy.config
        limit_s = config.first_byte_timeout_s if self.status is None else config.idle_timeout_s
        return NodeFailure("timeout", f"sent nothing for {limit_s:g} s")

    def _note(self, node: Node, failure: NodeFailure) -> None:
        """Tells the node's health, which may want a check at once."""
        now_s = self._proxy.fleet.clock()
        if failure.kind == "unreachable":
            node.health.unreachable(now_s, str(failure))
        elif failure.answer is None or failure.answer[0] != 429:
            node.health.request_failed(now_s, str(failure))
        node.due.set()
        log_event("node_failed", logging.WARNING, node=node.url, kind=failure.kind, reason=str(failure))

    async def _give_up(self, failure: NodeFailure) -> None:
        """No node is left: the client gets the last one's own answer, or is told that there is none."""
        if failure.answer is not None:
            self.status, passed, body = failure.answer
            await self._send({"type": "http.response.start", "status": self.status, "headers": passed})
            await self._send({"type": "http.response.body", "body": body, "more_body": False})
        elif failure.kind == "timeout":
            raise ApiError(504, "The node that was asked has sent nothing in time.", SERVER, code="node_timeout")
        else:
            raise ApiError(502, "The nodes that were asked have not answered.", SERVER, code="node_failed")

    async def _break_off(self, failure: NodeFailure) -> None:
        """The client has a part of the answer: events end with one that says so, other bodies without their end."""
        if not self._is_event_stream:
            return  # the server closes a connection whose answer has no end
        error = ApiError(502, "The node that was answering has failed.", SERVER, code=f"node_{failure.kind}")
        # The blank line in front ends an event that came in part.
        body = b"\n\ndata: " + json.dumps(error.body).encode() + b"\n\n"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._proxy.config.idle_timeout_s):
                await self._send({"type": "http.response.body", "body": body, "more_body": False})
