"""Routing over HTTP: what the answers that go by tell the router, and what it makes of that."""

from __future__ import annotations

from tests.serve.proxy.harness import BODY, CHAT, proxy_over
from turbojax.serve.proxy.ask import FIRST_MEAN_OUTPUT


def with_usage(num_tokens):
    async def answer(received, connection):
        await connection.whole(
            {"choices": ["x" * 5000], "usage": {"prompt_tokens": 3, "completion_tokens": num_tokens}}
        )

    return answer


async def five_events(received, connection):
    await connection.start()
    for end in (b"\n\n", b"\r\n\r\n"):
        await connection.chunk((b"data: x" + end) * 2)
    await connection.chunk(b"data: [DONE]\n\n")
    await connection.end()


def test_whole_answers_are_as_long_as_their_usage_says(node):
    node.answer = with_usage(6)
    with proxy_over([node]) as client:
        client.post(CHAT, json=BODY)
        client.wait_idle()  # an answer is counted just after its end was sent
        expected = FIRST_MEAN_OUTPUT + 0.05 * (6 - FIRST_MEAN_OUTPUT)
        assert abs(client.proxy.fleet.outputs.mean("tiny") - expected) < 1e-9
        client.post(CHAT, json=BODY | {"n": 2})
        client.wait_idle()
        assert abs(client.proxy.fleet.outputs.mean("tiny") - (expected + 0.05 * (3 - expected))) < 1e-9


def test_streams_are_as_long_as_their_events_are_many(node):
    node.answer = five_events
    with proxy_over([node]) as client:
        client.post(CHAT, json=BODY)
        client.wait_idle()  # an answer is counted just after its end was sent
        expected = FIRST_MEAN_OUTPUT + 0.05 * (5 - FIRST_MEAN_OUTPUT)
        assert abs(client.proxy.fleet.outputs.mean("tiny") - expected) < 1e-9
        assert client.status_of(node)["speed"] > 0
        assert f'turbojax_proxy_node_outstanding_tokens{{node="{node.url}"}} 0.0' in client.get("/metrics").text


def test_equal_nodes_are_asked_alike(two):
    for node in two:
        node.answer = with_usage(6)
    with proxy_over(two, routing_strategy="min_expected_latency") as client:
        two[1].answer = five_events
        for _ in range(2):  # nothing is known of either yet
            client.post(CHAT, json=BODY)
            client.wait_idle()
        assert (len(two[0].received), len(two[1].received)) == (1, 1)


def test_a_conversation_stays_and_others_go_round(two):
    system = {"role": "system", "content": "You are a helpful assistant. " * 20}
    with proxy_over(two, routing_strategy="prefix_affinity") as client:
        for number in range(2):
            messages = [{"role": "user", "content": f"{number} " * 200}]
            for _ in range(3):
                client.post(CHAT, json={"model": "tiny", "messages": messages})
                client.wait_idle()
                messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "and"}]
        hosts = [{received.body[:60] for received in node.received} for node in two]
        assert [len(node.received) for node in two] == [3, 3]
        assert not hosts[0] & hosts[1]
        for node in two:
            node.received.clear()
        for number in range(6):
            client.post(CHAT, json={"model": "tiny", "messages": [system, {"role": "user", "content": f"{number}"}]})
            client.wait_idle()
        assert sorted(len(node.received) for node in two) == [0, 6]
