"""What goes through the proxy, goes through as it is, at once, and for as long as somebody wants it."""

from __future__ import annotations

import gzip
import json
import socket

import httpx

from tests.serve.proxy.fake_node import Gate, never, wait_until
from tests.serve.proxy.harness import BODY, CHAT, proxy_over

EVENTS = [
    b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n',
    b": a comment\n\n",
    b"data: \xf0\x9f",  # half of a character, half of an event
    b"\x98\x80\r\n\r\ndata: x\n",
    b"\n",
    b"data: [DONE]\n\n",
]


def test_a_whole_answer_is_the_nodes_own(node):
    async def answer(received, connection):
        await connection.whole(
            b'{"exactly": "this" }', 201, X_Of_The_Node="1", Set_Cookie="a=b", Keep_Alive="timeout=5"
        )

    node.answer = answer
    body = b'{"model" :"tiny",  "messages":[], "unknown": 1e400}'
    with proxy_over([node]) as client:
        got = client.post(
            f"{CHAT}?api-version=1%202", content=body, headers={"X-Request-Id": "mine-1", "Accept": "x/y"}
        )
        assert (got.status_code, got.content) == (201, b'{"exactly": "this" }')
        assert got.headers["x-of-the-node"] == "1"
        assert got.headers["x-request-id"] == "mine-1"
        assert got.headers["content-length"] == "20"
        assert "keep-alive" not in got.headers
        httpx.post(f"{client.base_url}{CHAT}", content=body, verify=False, timeout=60)  # somebody else
    first = node.received[0]
    assert (first.method, first.target, first.body) == ("POST", f"{CHAT}?api-version=1%202", body)
    assert first.headers["x-request-id"] == "mine-1"
    assert first.headers["accept"] == "x/y"
    assert first.headers["x-forwarded-for"] == "127.0.0.1"
    assert first.headers["host"] == f"127.0.0.1:{node.port}"
    assert node.received[1].headers["x-request-id"] not in ("", "mine-1")
    assert "cookie" not in node.received[1].headers


def test_routes_that_name_a_model_are_passed_on(node):
    with proxy_over([node]) as client:
        for path in (CHAT, "/v1/completions", "/v1/embeddings", "/v1/responses", "/tokenize", "/detokenize"):
            assert client.post(path, json={"model": "tiny"}).json()["target"] == path


def test_nothing_else_of_a_node_can_be_reached(node):
    others = ["/", "/metrics/x", "/v1/files", "/v1/batches", "/nodes", f"{CHAT}/%2e%2e/%2e%2e/metrics", "//v1/models"]
    with proxy_over([node]) as client:
        for path in others:
            got = client.post(path, json=BODY)
            assert got.status_code in (404, 405), path
            assert got.json()["error"]["type"] == "invalid_request_error"
    assert not node.received


def test_events_come_through_one_by_one_and_byte_for_byte(node):
    gates = [Gate(node.loop) for _ in EVENTS]

    async def answer(received, connection):
        await connection.start()
        for gate, event in zip(gates, EVENTS, strict=True):
            await gate.wait()
            await connection.chunk(event)
        await connection.end()

    node.answer = answer
    with proxy_over([node]) as client:
        gates[0].open()
        with client.stream("POST", CHAT, json=BODY | {"stream": True}) as got:
            assert got.headers["content-type"] == "text/event-stream"
            pieces = got.iter_raw()
            for i, event in enumerate(EVENTS):
                # The node sends an event only when the client has had the one before.
                assert next(pieces) == event
                if i + 1 < len(EVENTS):
                    gates[i + 1].open()
            assert not list(pieces)


def test_compressed_answers_stay_compressed(node):
    packed = gzip.compress(b"data: x\n\n" * 100)

    async def answer(received, connection):
        await connection.start(Content_Encoding="gzip")
        await connection.chunk(packed)
        await connection.end()

    node.answer = answer
    with proxy_over([node]) as client, client.stream("POST", CHAT, json=BODY) as got:
        assert got.headers["content-encoding"] == "gzip"
        assert b"".join(got.iter_raw()) == packed


def test_a_body_of_megabytes_goes_both_ways(node):
    body = json.dumps(BODY | {"pad": "x" * 3_000_000}).encode()
    with proxy_over([node]) as client:
        assert client.post(CHAT, content=body).json()["body"].encode() == body


def test_redirects_are_not_followed(two):
    async def answer(received, connection):
        await connection.whole({}, 307, Location=f"{two[1].url}/elsewhere")

    two[0].answer = answer
    with proxy_over(two[:1]) as client:
        assert client.post(CHAT, json=BODY).status_code == 307
    assert not two[1].received


def test_nodes_are_reached_directly_whatever_the_environment_says(node, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with proxy_over([node]) as client:
        assert client.post(CHAT, json=BODY).status_code == 200


class TestClientsThatLeave:
    def test_before_anything_came(self, node):
        node.answer = never
        with proxy_over([node]) as client:
            self.send_and_leave(client, node)
            wait_until(lambda: node.connections[0].is_closed, "closing the connection to the node")
            client.wait_idle()
            assert client.status_of(node)["is_up"], "that was not the node's fault"

    def test_in_the_middle_of_a_stream(self, node):
        async def answer(received, connection):
            await connection.start()
            while True:
                await connection.chunk(EVENTS[0])

        node.answer = answer
        with proxy_over([node]) as client:
            with client.stream("POST", CHAT, json=BODY) as got:
                next(got.iter_raw())
            wait_until(lambda: node.connections[0].is_closed, "closing the connection to the node")

    @staticmethod
    def send_and_leave(client, node):
        text = json.dumps(BODY).encode()
        address = httpx.URL(client.base_url)
        with socket.create_connection((address.host, address.port)) as raw:
            raw.sendall(
                b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(text)) + text
            )
            wait_until(lambda: node.received)


class TestSlowClients:
    def test_a_slow_reader_slows_the_node_and_gets_everything(self, node):
        piece, num_pieces = b"data: " + b"x" * 65_528 + b"\n\n", 400  # 26 MB

        async def answer(received, connection):
            await connection.start()
            for _ in range(num_pieces):
                await connection.chunk(piece)
            await connection.end()

        node.answer = answer
        with proxy_over([node]) as client, client.stream("POST", CHAT, json=BODY) as got:
            sent = node.connections[0]
            last, calm = -1, 0
            while calm < 20:  # nobody reads: the node comes to a stop
                calm = calm + 1 if sent.num_sent == last else 0
                last = sent.num_sent
                wait_until(lambda: client.get("/health/live").status_code == 200)
            assert sent.num_sent < num_pieces * len(piece) * 0.9, "somebody keeps it all in memory"
            assert sum(map(len, got.iter_raw())) == num_pieces * len(piece)

    def test_a_client_that_takes_nothing_is_given_up(self, node):
        async def answer(received, connection):
            await connection.start()
            while True:
                await connection.chunk(b"data: " + b"x" * 60_000 + b"\n\n")

        node.answer = answer
        with proxy_over([node], idle_timeout_s=0.3) as client, client.stream("POST", CHAT, json=BODY):
            wait_until(lambda: node.connections[0].is_closed, "giving up")
            client.wait_idle()
            assert client.status_of(node)["is_up"], "that was not the node's fault"
            assert "client_too_slow" in client.get("/metrics").text
