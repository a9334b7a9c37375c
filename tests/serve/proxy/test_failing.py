"""Nodes that fail: what the client has not got yet comes from another one, what it has got ends with an error."""

from __future__ import annotations

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import openai
import pytest

from tests.serve.proxy import fake_node
from tests.serve.proxy.fake_node import Gate, echo, never, wait_until
from tests.serve.proxy.harness import BODY, CHAT, proxy_over

EVENT = b'data: {"id":"1","object":"chat.completion.chunk","created":1,"model":"tiny","choices":[]}\n\n'


def refusing(status, **headers):
    async def answer(received, connection):
        await connection.whole({"error": {"message": f"of the node: {status}"}}, status, **headers)

    return answer


async def dying(received, connection):
    connection.abort()


async def dying_after_headers(received, connection):
    await connection.start()
    connection.abort()


async def talking_nonsense(received, connection):
    await connection.raw(b"this is not HTTP\r\n\r\n")
    connection.abort()


@contextmanager
def full_listener(port):
    """Nobody accepts there, and the queue is full: the system lets whoever connects wait."""
    with ExitStack() as sockets:
        listener = sockets.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(0)
        for _ in range(4):
            one = sockets.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        yield


@pytest.fixture
def aside():
    """Requests that wait, beside those of the test."""
    with ThreadPoolExecutor(4) as pool:
        yield pool


class TestBeforeTheFirstByte:
    @pytest.mark.parametrize(
        "answer",
        [dying, dying_after_headers, talking_nonsense, *map(refusing, (429, 502, 503, 504))],
        ids=["dying", "dying after headers", "nonsense", "429", "502", "503", "504"],
    )
    def test_another_node_answers(self, two, answer):
        two[0].answer = answer
        with proxy_over(two) as client:
            for _ in range(2):  # whoever's turn it is
                got = client.post(CHAT, json=BODY)
                assert got.status_code == 200
            assert json.loads(got.json()["body"]) == BODY
        assert len(two[1].received) == 2
        assert two[0].received[0].body == two[1].received[0].body

    def test_a_node_that_is_gone_is_passed_over_and_asked_again_when_it_is_back(self, two):
        with proxy_over(two) as client:
            two[0].stop()
            assert [client.post(CHAT, json=BODY).status_code for _ in range(4)] == [200] * 4
            assert not client.status_of(two[0])["is_up"]
            assert str(two[0].port) in client.status_of(two[0])["reason"]
            assert len(two[1].received) == 4
            two[0].start()
            client.wait_up(two[0])
            for _ in range(2):
                client.post(CHAT, json=BODY)
            assert two[0].received

    def test_a_node_that_takes_no_connections_is_passed_over(self, two):
        with proxy_over(two, connect_timeout_s=0.2) as client:
            two[0].stop()
            with full_listener(two[0].port):
                assert [client.post(CHAT, json=BODY).status_code for _ in range(3)] == [200] * 3
                assert not client.status_of(two[0])["is_up"]
                assert "timeout" in client.status_of(two[0])["reason"].lower()
            assert len(two[1].received) == 3
            two[0].start()

    @pytest.mark.parametrize("status", [400, 401, 404, 422, 500])
    def test_what_would_be_the_same_elsewhere_is_the_answer(self, two, status):
        for node in two:
            node.answer = refusing(status)
        with proxy_over(two) as client:
            for i in range(1, 5):
                got = client.post(CHAT, json=BODY)
                assert (got.status_code, got.json()["error"]["message"]) == (status, f"of the node: {status}")
                assert len(two[0].received) + len(two[1].received) == i
            assert all(client.status_of(node)["is_up"] for node in two)

    def test_when_all_refuse_the_client_gets_what_the_last_one_said(self, two):
        for node in two:
            node.answer = refusing(429, Retry_After="7")
        with proxy_over(two) as client:
            got = client.post(CHAT, json=BODY)
            assert (got.status_code, got.headers["retry-after"]) == (429, "7")
            assert got.json()["error"]["message"] == "of the node: 429"
            assert all(client.status_of(node)["is_up"] for node in two), "busy is not ill"
        assert len(two[0].received) == len(two[1].received) == 1

    def test_when_all_die_the_client_is_told_and_then_that_none_is_up(self, two):
        with proxy_over(two) as client:
            for node in two:
                node.stop()
            got = client.post(CHAT, json=BODY)
            assert (got.status_code, got.json()["error"]["code"]) == (502, "node_failed")
            assert got.headers["x-request-id"]
            got = client.post(CHAT, json=BODY)
            assert (got.status_code, got.json()["error"]["code"]) == (503, "no_node")
            assert int(got.headers["retry-after"]) >= 1
            assert client.get("/health").status_code == client.get("/health/ready").status_code == 503
            assert client.get("/health/live").status_code == 200
            assert client.get("/v1/models").json()["data"] == []
            for node in two:
                node.start()

    def test_a_request_is_given_to_so_many_nodes_only(self, two):
        for node in two:
            node.answer = dying
        with proxy_over(two, max_tries=1) as client:
            assert client.post(CHAT, json=BODY).status_code == 502
        assert len(two[0].received) + len(two[1].received) == 1

    def test_a_request_at_which_two_nodes_broke_goes_to_no_third(self):
        with fake_node.nodes(4) as four:
            for node in four:
                node.answer = dying
            with proxy_over(four, max_tries=4) as client:
                assert client.post(CHAT, json=BODY).status_code == 502
                assert all(client.status_of(node)["is_up"] for node in four)
            assert sum(len(node.received) for node in four) == 2

    def test_a_node_that_breaks_every_request_goes_down_though_its_checks_pass(self, node):
        node.answer = dying
        with proxy_over([node]) as client:
            assert [client.post(CHAT, json=BODY).status_code for _ in range(4)] == [502, 502, 502, 503]
            node.answer = echo
            client.wait_up(node)
            assert client.post(CHAT, json=BODY).status_code == 200

    def test_no_answer_in_time_is_504_and_not_tried_again(self, two):
        for node in two:
            node.answer = never
        with proxy_over(two, first_byte_timeout_s=0.2) as client:
            got = client.post(CHAT, json=BODY)
            assert (got.status_code, got.json()["error"]["code"]) == (504, "node_timeout")
        assert len(two[0].received) + len(two[1].received) == 1

    @pytest.mark.parametrize("health", [None, (503, {"status": "stuck"}), (503, {"status": "failed"})])
    def test_requests_that_wait_at_a_node_that_is_lost_go_to_another(self, two, health, aside):
        two[0].answer = never
        with proxy_over(two, health_interval_s=0.05, health_timeout_s=0.3) as client:
            waiting = aside.submit(client.post, CHAT, json=BODY)
            wait_until(lambda: two[0].received)
            two[0].health = health
            assert waiting.result(20).status_code == 200
        assert len(two[1].received) == 1

    def test_a_node_that_drains_ends_what_it_has(self, two, aside):
        gate = Gate(two[0].loop)

        async def answer(received, connection):
            await gate.wait()
            await connection.whole({"late": True})

        two[0].answer = answer
        with proxy_over(two, health_interval_s=0.05) as client:
            waiting = aside.submit(client.post, CHAT, json=BODY)
            wait_until(lambda: two[0].received)
            two[0].health = (503, {"status": "draining"})
            wait_until(lambda: not client.status_of(two[0])["is_up"], "going down")
            assert [client.post(CHAT, json=BODY).status_code for _ in range(2)] == [200] * 2
            gate.open()
            assert waiting.result(20).json() == {"late": True}
        assert (len(two[0].received), len(two[1].received)) == (1, 2)


class TestInTheMiddle:
    """The client has a part, so that nobody else can go on."""

    def test_events_end_with_an_error_and_others_go_on(self, two):
        die, go_on = Gate(two[0].loop), Gate(two[1].loop)

        async def answer(received, connection):
            await connection.start()
            await connection.chunk(EVENT)
            await die.wait()
            connection.abort()

        async def answer_on(received, connection):
            await connection.start()
            await connection.chunk(EVENT)
            await go_on.wait()
            await connection.chunk(b"data: [DONE]\n\n")
            await connection.end()

        two[0].answer, two[1].answer = answer, answer_on
        with (
            proxy_over(two) as client,
            client.stream("POST", CHAT, json=BODY) as lost,
            client.stream("POST", CHAT, json=BODY) as kept,
        ):
            lost_pieces, kept_pieces = lost.iter_raw(), kept.iter_raw()
            assert next(lost_pieces) == next(kept_pieces) == EVENT
            die.open()
            rest = b"".join(lost_pieces)
            error = json.loads(rest.strip().removeprefix(b"data: "))["error"]
            assert (error["type"], error["code"]) == ("server_error", "node_broken")
            go_on.open()
            assert b"".join(kept_pieces) == b"data: [DONE]\n\n"

    def test_openais_client_raises(self, node):
        async def answer(received, connection):
            await connection.start()
            await connection.chunk(EVENT)
            await connection.chunk(EVENT)
            connection.abort()

        node.answer = answer
        with proxy_over([node]) as client:
            own = openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0)
            with own, own.chat.completions.create(**BODY, stream=True) as stream:
                assert next(stream).id == "1"
                assert next(stream).id == "1"
                with pytest.raises(openai.APIError, match="node that was answering has failed"):
                    next(stream)

    def test_an_event_in_part_is_ended_before_the_error(self, node):
        async def answer(received, connection):
            await connection.start()
            await connection.chunk(EVENT[:20])
            connection.abort()

        node.answer = answer
        with proxy_over([node]) as client:
            text = client.post(CHAT, json=BODY).content
        first, second = text.split(b"\n\n")[:2]
        assert first == EVENT[:20]
        assert json.loads(second.removeprefix(b"data: "))["error"]["code"] == "node_broken"

    def test_a_node_that_falls_silent_is_given_up(self, node):
        async def answer(received, connection):
            await connection.start()
            await connection.chunk(EVENT)
            await never(received, connection)

        node.answer = answer
        with proxy_over([node], idle_timeout_s=0.2) as client:
            text = client.post(CHAT, json=BODY).text
            assert "node_timeout" in text
            wait_until(lambda: node.connections[0].is_closed, "closing the connection to the node")

    def test_other_bodies_are_left_without_their_end(self, node):
        """What is not text cannot end with a text."""
        kinds = ["Content-Type: application/json", "Content-Type: text/event-stream\r\nContent-Encoding: gzip"]
        with proxy_over([node]) as client:
            for kind in kinds:

                async def answer(received, connection, kind=kind):
                    await connection.raw(f"HTTP/1.1 200 X\r\n{kind}\r\nContent-Length: 100\r\n\r\n{{".encode())
                    connection.abort()

                node.answer = answer
                with client.stream("POST", CHAT, json=BODY) as got, pytest.raises(httpx.RemoteProtocolError):
                    b"".join(got.iter_raw())


def test_connections_to_a_node_are_used_again(node):
    with proxy_over([node]) as client:
        client.post(CHAT, json=BODY)
        num_open = len(node._writers)
        for _ in range(5):
            client.post(CHAT, json=BODY)
        assert len(node._writers) == num_open


def test_a_failure_of_a_node_is_counted_and_logged(two, caplog):
    two[0].answer = dying
    with caplog.at_level("INFO", "turbojax"), proxy_over(two) as client:
        client.post(CHAT, json=BODY, headers={"X-Request-Id": "of-this-test"})
        text = client.get("/metrics").text
        assert f'turbojax_proxy_tries_total{{node="{two[0].url}",outcome="broken"}} 1.0' in text
        assert f'turbojax_proxy_tries_total{{node="{two[1].url}",outcome="answered"}} 1.0' in text
        assert f'turbojax_proxy_node_up{{node="{two[1].url}"}} 1.0' in text
        assert f'turbojax_http_responses_total{{method="POST",route="{CHAT}",status="200"}} 1.0' in text
    fields = {record.message: record.fields for record in caplog.records if hasattr(record, "fields")}
    assert fields["node_failed"]["node"] == two[0].url
    assert fields["relayed"] == {"node": two[1].url, "num_tries": 2, "outcome": "answered"}
