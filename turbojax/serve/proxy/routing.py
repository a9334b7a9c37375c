"""Which of the nodes that could serve a request is asked."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

from turbojax.serve.proxy.ask import Ask
from turbojax.serve.proxy.node import Node
from turbojax.serve.proxy.prefixes import PrefixTable, block_hashes

# A node that has the beginning of a prompt is passed over once it has this much more to do than the one that has least.
AFFINITY_FACTOR, AFFINITY_SLACK = 2, 8


class Strategy(Protocol):
    """Chooses among nodes that are up, serve the model and have room; there is at least one."""

    def choose(self, nodes: Sequence[Node], ask: Ask) -> Node: ...


class Random:
    """Any of them."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def choose(self, nodes: Sequence[Node], ask: Ask) -> Node:
        return self._rng.choice(nodes)


class RoundRobin:
    """The one whose last turn is longest ago, whichever nodes come and go in between."""

    def __init__(self) -> None:
        self._turns = itertools.count(1)
        self._last: WeakKeyDictionary[Node, int] = WeakKeyDictionary()

    def choose(self, nodes: Sequence[Node], ask: Ask) -> Node:
        node = min(nodes, key=lambda node: self._last.get(node, 0))
        self._last[node] = next(self._turns)
        return node


class LeastLatency:
    """The one that should answer first (`Load`). A node that has done nothing yet is taken to be as fast as the
    fastest; among equals it is the one with the fewest requests, and then whose turn it is."""

    def __init__(self) -> None:
        self._turn = RoundRobin()

    def choose(self, nodes: Sequence[Node], ask: Ask) -> Node:
        fastest = max((node.load.speed or 0.0 for node in nodes), default=0.0) or 1.0

        def cost(node: Node) -> tuple[float, int]:
            return node.load.expected_s(ask.work, node.load.speed or fastest), node.load.num_requests

        costs = {node: cost(node) for node in nodes}
        least = min(costs.values())
        return self._turn.choose([node for node in nodes if costs[node] == least], ask)


class PrefixAffinity:
    """The one that has seen most of the beginning of the prompt, whose KV cache should hold it, unless it has much more
    to do than another; without such a node the one that should answer first."""

    def __init__(self, table: PrefixTable | None = None) -> None:
        self._table = PrefixTable() if table is None else table
        self._otherwise = LeastLatency()

    def choose(self, nodes: Sequence[Node], ask: Ask) -> Node:
        hashes = block_hashes(ask.prefix_salt, ask.prefix())
        limit = AFFINITY_FACTOR * min(node.load.num_requests for node in nodes) + AFFINITY_SLACK
        free = {node.url: node for node in nodes if node.load.num_requests <= limit}
        known = next((free[url] for url in self._table.find(hashes) if url in free), None)
        node = known or self._otherwise.choose(nodes, ask)
        self._table.put(hashes, node.url)
        return node


STRATEGIES: dict[str, type[Random | RoundRobin | LeastLatency | PrefixAffinity]] = {
    "min_expected_latency": LeastLatency,
    "prefix_affinity": PrefixAffinity,
    "round_robin": RoundRobin,
    "random": Random,
}
