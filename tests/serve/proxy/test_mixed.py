"""Many requests at once, nodes that do anything, clients that leave: each ends once, and nothing is left."""

from __future__ import annotations

import asyncio
import random

import httpx

from tests.serve.proxy import fake_node
from tests.serve.proxy.fake_node import echo
from tests.serve.proxy.harness import BODY, CHAT, proxy_over

NUM_REQUESTS, NUM_AT_ONCE = 120, 16


def moody(rng):
    """A node that streams, answers whole, refuses, dies before or in the middle of an answer."""

    async def answer(received, connection):
        mood = rng.random()
        if mood < 0.1:
            connection.abort()
        elif mood < 0.2:
            await connection.whole({"error": {"message": "busy"}}, 503, Retry_After="1")
        elif mood < 0.4:
            await echo(received, connection)
        else:
            await connection.start()
            for i in range(rng.randrange(1, 30)):
                await connection.chunk(b"data: %d\n\n" % i)
                await asyncio.sleep(0)
            if mood < 0.5:
                connection.abort()
            await connection.chunk(b"data: [DONE]\n\n")
            await connection.end()

    return answer


async def ask_all(url, rng):
    """How each request ended."""
    limits = httpx.Limits(max_connections=NUM_AT_ONCE)
    gate = asyncio.Semaphore(NUM_AT_ONCE)

    async def ask(client):
        async with gate, client.stream("POST", CHAT, json=BODY) as got:
            text = b""
            async for piece in got.aiter_raw():
                text += piece
                if rng.random() < 0.02:
                    return "left"
            if got.headers["content-type"] == "application/json":
                return got.status_code
            assert text.startswith(b"data: 0\n\n")
            assert text.endswith(b"\n\n")
            return "whole" if text.endswith(b"data: [DONE]\n\n") else "broken" if b"node_broken" in text else text

    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, verify=False, limits=limits) as client:
        return await asyncio.gather(*(ask(client) for _ in range(NUM_REQUESTS)))


def test_each_request_ends_once():
    rng = random.Random(3)
    with fake_node.nodes(3) as three:
        for node in three:
            node.answer = moody(rng)
        with proxy_over(three, routing_strategy="prefix_affinity", health_interval_s=0.05) as client:
            ends = asyncio.run(ask_all(str(client.base_url), rng))
            client.wait_idle()
            assert all(node.load.outstanding == 0.0 for node in client.proxy.fleet)
    assert len(ends) == NUM_REQUESTS
    assert set(ends) <= {"left", "whole", "broken", 200, 429, 502, 503}
    assert {"left", "whole", "broken", 200} <= set(ends)
