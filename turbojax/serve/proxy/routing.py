"""Which of the nodes that could serve a request is asked."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

from turbojax.engine.affinity import PrefixTable, block_hashes
from turbojax.serve.proxy.ask import Ask
from turbojax.serve.proxy.node import Node


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
    to do than another (`PrefixTable.find`); without such a node the one that should answer first."""

    def __init__(self) -> None:
        self._table = PrefixTable[str]()
        self._otherwise = LeastLatency()

    def choose(self, nodes: Sequence[Node], ask: Ask) -> Node:
        hashes = block_hashes(ask.prefix_salt, ask.prefix())
        known = self._table.find(hashes, {node.url: node.load.num_requests for node in nodes})
        by_url = {node.url: node for node in nodes}
        node = self._otherwise.choose(nodes, ask) if known is None else by_url[known]
        self._table.put(hashes, node.url)
        return node


STRATEGIES: dict[str, type[Random | RoundRobin | LeastLatency | PrefixAffinity]] = {
    "min_expected_latency": LeastLatency,
    "prefix_affinity": PrefixAffinity,
    "round_robin": RoundRobin,
    "random": Random,
}
