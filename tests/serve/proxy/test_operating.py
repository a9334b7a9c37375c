"""Nodes that come and go while requests run, by the operator's word alone; and the limits of it all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.serve.proxy.fake_node import Gate, never, wait_until
from tests.serve.proxy.harness import ADMIN, ADMIN_KEY, BODY, CHAT, proxy_over


def held(gate):
    async def answer(received, connection):
        await connection.start()
        await connection.chunk(b"data: 1\n\n")
        await gate.wait()
        await connection.chunk(b"data: [DONE]\n\n")
        await connection.end()

    return answer


class TestNodes:
    def test_come_and_go(self, two):
        with proxy_over(two[:1]) as client:
            got = client.post("/nodes/add", json={"url": two[1].url + "/v1"}, headers=ADMIN)
            assert got.status_code == 200
            assert got.json()[two[1].url]["is_up"], "it was checked before the answer"
            for _ in range(2):
                client.post(CHAT, json=BODY)
            assert (len(two[0].received), len(two[1].received)) == (1, 1)
            status = client.get("/nodes/status", headers=ADMIN).json()
            assert set(status) == {node.url for node in two}
            assert status[two[0].url]["models"] == ["tiny"]
            assert status[two[0].url]["unfinished"] == 0
            assert two[0].url in client.get("/metrics").text
            client.post("/nodes/remove", json={"url": two[0].url}, headers=ADMIN)
            assert two[0].url not in client.get("/metrics").text
            for _ in range(2):
                client.post(CHAT, json=BODY)
            assert (len(two[0].received), len(two[1].received)) == (1, 3)
            got = client.post("/nodes/remove", json={"url": two[0].url}, headers=ADMIN)
            assert (got.status_code, got.json()["error"]["code"]) == (404, "node_not_found")

    def test_one_that_is_removed_ends_its_streams_first(self, two):
        gate = Gate(two[0].loop)
        two[0].answer = held(gate)
        with proxy_over(two) as client, client.stream("POST", CHAT, json=BODY) as got:
            pieces = got.iter_raw()
            assert next(pieces) == b"data: 1\n\n"
            removed = client.post("/nodes/remove", json={"url": two[0].url}, headers=ADMIN).json()[two[0].url]
            assert (removed["is_draining"], removed["unfinished"]) == (True, 1)
            assert [client.post(CHAT, json=BODY).status_code for _ in range(3)] == [200] * 3
            assert client.status_of(two[0])["is_draining"]
            gate.open()
            assert b"".join(pieces) == b"data: [DONE]\n\n"
            wait_until(lambda: not client.status_of(two[0]), "going")
            assert len(two[0].received) == 1

    def test_one_that_cannot_be_reached_is_kept_and_checked_again(self, two):
        two[1].stop()
        with proxy_over(two[:1]) as client:
            added = client.post("/nodes/add", json={"url": two[1].url}, headers=ADMIN).json()[two[1].url]
            assert not added["is_up"]
            assert added["reason"]
            assert client.post(CHAT, json=BODY | {"model": "other"}).status_code == 503, "it may have it"
            two[1].models = ("other",)
            two[1].start()
            client.wait_up(two[1])
            assert client.post(CHAT, json=BODY | {"model": "other"}).status_code == 200

    def test_have_models_by_name(self, two):
        two[1].models = ("other", "shared")
        two[0].models = ("tiny", "shared")
        with proxy_over(two) as client:
            assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["other", "shared", "tiny"]
            assert client.get("/v1/models/other").json()["id"] == "other"
            got = client.get("/v1/models/none")
            assert (got.status_code, got.json()["error"]["code"]) == (404, "model_not_found")
            for _ in range(3):
                client.post(CHAT, json=BODY | {"model": "other"})
            assert (len(two[0].received), len(two[1].received)) == (0, 3)
            for _ in range(4):
                client.post(CHAT, json=BODY | {"model": "shared"})
            assert (len(two[0].received), len(two[1].received)) == (2, 5)
            got = client.post(CHAT, json=BODY | {"model": "none"})
            assert (got.status_code, got.json()["error"]["param"]) == (404, "model")

    def test_are_asked_again_what_they_serve(self, node):
        with proxy_over([node], health_interval_s=0.05) as client:
            node.models = ("renamed",)
            wait_until(lambda: client.status_of(node)["models"] == ["renamed"], "noticing")
            assert client.post(CHAT, json=BODY).status_code == 404

    def test_that_say_nonsense_are_not_up(self, node):
        nonsense = [
            b"{}", b"[]", b'{"data": 5}', b'{"data": [5]}', b'{"data": [{"id": 5}]}', b"{", b"[" * 100_000,
            b"x" * (2 << 20),
        ]  # fmt: skip
        with proxy_over([node]) as client:
            for text in nonsense:

                async def answer(connection, text=text):
                    await connection.whole(text)

                node.answer_models = answer
                added = client.post("/nodes/add", json={"url": node.url}, headers=ADMIN).json()[node.url]
                assert not added["is_up"]
                assert "/v1/models" in added["reason"]

    def test_without_a_health_route_are_checked_by_their_models(self, node):
        node.health = (404, {})
        with proxy_over([node], health_interval_s=0.05) as client:
            num_checks = len(node.checks)
            wait_until(lambda: len(node.checks) > num_checks + 4, "checks")
            assert client.status_of(node)["is_up"]


class TestOperators:
    def test_need_their_key(self, node):
        routes = [("GET", "/nodes/status"), ("POST", "/nodes/add"), ("POST", "/nodes/remove")]
        body = {"url": "http://127.0.0.1:1"}
        with proxy_over([node], server={"api_keys": ["a-clients-key"]}) as client:
            for method, path in routes:
                for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer a-clients-key"}):
                    got = client.request(method, path, json=body, headers=headers)
                    assert (got.status_code, got.json()["error"]["code"]) == (401, "invalid_api_key")
            assert client.get("/nodes/status", headers=ADMIN).json().keys() == {node.url}
        with proxy_over([node], admin_keys=[]) as client:
            for method, path in routes:
                got = client.request(method, path, json=body, headers={"Authorization": "Bearer"})
                assert (got.status_code, got.json()["error"]["code"]) == (403, "no_admin_keys")

    def test_are_told_what_is_wrong(self, node):
        wrong = [
            {}, {"url": 5}, {"url": "file:///etc/passwd"}, {"url": "http://user:pw@host"}, {"url": "x" * 5000},
            [], "http://a", {"url": "http://a", "speed": 1}, {"url": "http://a", "max_connections": 0},
            {"url": "http://a", "api_key": "a b"}, {"url": "http://a", "api_key": "a\r\nX: 1"},
        ]  # fmt: skip
        with proxy_over([node]) as client:
            for body in wrong:
                got = client.post("/nodes/add", json=body, headers=ADMIN)
                assert got.status_code == 400, body
                assert got.json()["error"]["message"]
            assert client.get("/nodes/status", headers=ADMIN).json().keys() == {node.url}

    def test_a_request_cannot_name_a_node(self, two):
        with proxy_over(two[:1]) as client:
            client.post(CHAT, json=BODY | {"url": two[1].url, "node": two[1].url}, headers={"Host": two[1].url[7:]})
            client.post(f"{CHAT}?url={two[1].url}", json=BODY, headers={"X-Forwarded-Host": two[1].url[7:]})
        assert not two[1].received
        assert not two[1].checks


class TestKeys:
    def test_the_clients_own_goes_on_where_the_node_has_none(self, node):
        with proxy_over([node]) as client:
            client.post(CHAT, json=BODY, headers={"Authorization": "Bearer of-the-client"})
        assert node.received[0].headers["authorization"] == "Bearer of-the-client"

    def test_the_nodes_takes_its_place(self, two):
        with proxy_over(two[:1], node_api_key="of-the-first") as client:
            client.post("/nodes/add", json={"url": two[1].url, "api_key": "of-the-second"}, headers=ADMIN)
            for _ in range(2):
                client.post(CHAT, json=BODY, headers={"Authorization": "Bearer of-the-client"})
            shown = client.get("/nodes/status", headers=ADMIN).text
            client.post("/nodes/add", json={"url": two[0].url, "api_key": None}, headers=ADMIN)
            client.post("/nodes/add", json={"url": two[1].url}, headers=ADMIN)
            for _ in range(2):
                client.post(CHAT, json=BODY, headers={"Authorization": "Bearer of-the-client"})
        assert two[0].received[0].headers["authorization"] == "Bearer of-the-first"
        assert two[1].received[0].headers["authorization"] == "Bearer of-the-second"
        assert two[0].received[1].headers["authorization"] == "Bearer of-the-client"
        assert two[1].received[1].headers["authorization"] == "Bearer of-the-first"
        assert two[1].checks[0].headers["authorization"] == "Bearer of-the-second"
        assert "of-the-" not in shown

    def test_clients_need_one_where_there_are_any(self, node):
        with proxy_over([node], server={"api_keys": ["a-clients-key"]}) as client:
            assert client.post(CHAT, json=BODY).status_code == 401
            assert client.get("/v1/models").status_code == 401
            assert client.get("/health").status_code == 200
            for key in ("a-clients-key", ADMIN_KEY):
                got = client.post(CHAT, json=BODY, headers={"Authorization": f"Bearer {key}"})
                assert got.status_code == 200
        assert len(node.received) == 2


class TestLimits:
    def test_of_a_node(self, two):
        gate = Gate(two[0].loop)
        for node in two:
            node.answer = held(gate)
        with proxy_over(two, max_node_connections=1) as client, ThreadPoolExecutor(2) as pool:
            running = [pool.submit(client.post, CHAT, json=BODY) for _ in range(2)]
            wait_until(lambda: two[0].received and two[1].received)
            got = client.post(CHAT, json=BODY)
            assert (got.status_code, got.json()["error"]["code"]) == (429, "nodes_full")
            assert got.headers["retry-after"] == "1"
            client.post("/nodes/add", json={"url": two[0].url, "max_connections": 2}, headers=ADMIN)
            running.append(pool.submit(client.post, CHAT, json=BODY))
            gate.open()
            assert [one.result(20).status_code for one in running] == [200] * 3

    def test_of_the_proxy(self, node):
        gate = Gate(node.loop)
        node.answer = held(gate)
        limits = {"max_concurrent_requests": 1, "max_body_bytes": 1000, "max_json_depth": 5}
        with proxy_over([node], server=limits) as client, ThreadPoolExecutor(1) as pool:
            running = pool.submit(client.post, CHAT, json=BODY)
            wait_until(lambda: node.received)
            got = client.post(CHAT, json=BODY)
            assert (got.status_code, got.json()["error"]["code"]) == (429, "too_many_requests")
            gate.open()
            assert running.result(20).status_code == 200
            client.wait_idle()
            assert client.post(CHAT, json=BODY | {"pad": "x" * 1000}).status_code == 413
            assert client.post(CHAT, content=b"[" * 20).status_code == 400
            assert client.post(CHAT, content=b"{}", headers={"Content-Encoding": "gzip"}).status_code == 415
            assert client.post(CHAT, content=b"{").status_code == 400
            assert client.get(CHAT).status_code == 405

    def test_of_time(self, node):
        node.answer = never
        with proxy_over([node], server={"request_timeout_s": 0.3}) as client:
            got = client.post(CHAT, json=BODY)
            assert (got.status_code, got.json()["error"]["code"]) == (504, "request_timeout")
            wait_until(lambda: node.connections[0].is_closed, "closing the connection to the node")
