"""What routing does for latency, in a simulation: nodes that share their speed among the requests they have."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.serve.proxy.test_fleet import Clock, up
from turbojax.serve.proxy.ask import Ask
from turbojax.serve.proxy.fleet import Fleet, Lease
from turbojax.serve.proxy.routing import STRATEGIES

STEP_S = 0.02
MEAN_TOKENS = 200.0
ALONE = 60.0  # tokens a second of a request that has a node for itself: more come together than one after the other


@dataclass
class Running:
    lease: Lease
    begun_s: float
    num_tokens: float
    num_done: float = 0.0


def mean_latency_s(strategy: str, speeds: list[float], share: float, seconds: float = 100.0) -> float:
    """Of requests that come at random, with answers of random length, and ask for `share` of what the nodes can do.

    Args:
        strategy: of the router.
        speeds: tokens a second of each node with many requests.
        share: of their sum.
        seconds: how long they come.
    """
    rng, clock = random.Random(7), Clock()
    fleet = Fleet(STRATEGIES[strategy](), interval_s=5.0, max_connections=10_000, clock=clock)
    urls = {f"http://10.0.0.{i}": speed for i, speed in enumerate(speeds)}
    for url in urls:
        up(fleet, url, "a")
    running: list[Running] = []
    latencies: list[float] = []
    while clock.now_s < seconds or running:
        if clock.now_s < seconds and rng.random() < share * sum(speeds) / MEAN_TOKENS * STEP_S:
            length = rng.expovariate(1 / MEAN_TOKENS) + 1
            lease = fleet.lease(Ask("a", 1.0, fleet.outputs.mean("a")))
            assert lease is not None
            lease.answered()
            running.append(Running(lease, clock.now_s, length))
        clock.now_s += STEP_S
        for one in running:
            node = one.lease.node
            before = int(one.num_done)
            one.num_done += min(ALONE, urls[node.url] / node.load.num_requests) * STEP_S
            one.lease.generated(int(one.num_done) - before)
        for one in [one for one in running if one.num_done >= one.num_tokens]:
            one.lease.end(True)
            latencies.append(clock.now_s - one.begun_s)
            running.remove(one)
    assert len(latencies) > 100
    return sum(latencies) / len(latencies)


def test_unequal_nodes():
    turns, least = (mean_latency_s(name, [1000.0, 250.0], 0.6) for name in ("round_robin", "min_expected_latency"))
    assert least < 0.5 * turns


def test_equal_nodes():
    turns, least = (mean_latency_s(name, [500.0] * 3, 0.8) for name in ("round_robin", "min_expected_latency"))
    assert least < 1.1 * turns
