"""The nodes: coming and going, and lent to one request after the other."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

from turbojax.serve.openai_errors import OVERLOADED, ApiError
from turbojax.serve.proxy.ask import Ask, OutputLengths
from turbojax.serve.proxy.health import Health
from turbojax.serve.proxy.node import Node
from turbojax.serve.proxy.routing import Strategy

Clock = Callable[[], float]


class Fleet:
    """Nodes by URL. What it lends is up, serves the model, has room, is not being removed and was not tried before;
    when there is such a node, a request gets one.

    Attributes:
        outputs: how long answers are.
        on_gone: told of a node that was removed and has ended what it had.
    """

    def __init__(
        self, strategy: Strategy, *, interval_s: float, max_connections: int, clock: Clock = time.monotonic
    ) -> None:
        """Args:
        strategy: chooses among the nodes that could serve a request.
        interval_s: between two checks of a node that is up.
        max_connections: requests that a node is given at once, where it says nothing else.
        clock: in seconds.
        """
        self.outputs = OutputLengths()
        self.on_gone: Callable[[Node], None] = lambda node: None
        self.clock = clock
        self._strategy, self._interval_s, self._max_connections = strategy, interval_s, max_connections
        self._nodes: dict[str, Node] = {}

    def __iter__(self) -> Iterator[Node]:
        return iter(tuple(self._nodes.values()))

    def get(self, url: str) -> Node | None:
        return self._nodes.get(url)

    def add(self, url: str, api_key: str | None = None, max_connections: int | None = None) -> Node:
        """A node that is asked once its first check has passed. One of this URL that is there already gets the new key
        and limit, and stays if it was being removed."""
        node = self._nodes.get(url)
        if node is None:
            health = Health(self._interval_s, next_check_at=self.clock())
            node = self._nodes[url] = Node(url, api_key, self._max_connections, health)
        node.is_removed = False
        node.api_key = api_key
        node.max_connections = max_connections or self._max_connections
        return node

    def remove(self, url: str) -> Node | None:
        """It gets nothing new and is forgotten when its last request has ended; None where there is no such node."""
        node = self._nodes.get(url)
        if node is not None:
            node.is_removed = True
            self._forget_if_done(node)
        return node

    def models(self) -> dict[str, dict[str, Any]]:
        """Cards of what requests can name now, by name."""
        up = [node for node in self._nodes.values() if node.health.is_up and not node.is_removed]
        cards = {name: card for node in up for name, card in (node.models or {}).items()}
        return dict(sorted(cards.items()))

    def lease(self, ask: Ask, tried: Collection[Node] = ()) -> Lease | None:
        """A node for this request; None where all that could serve it were tried.

        Raises:
            ApiError: 404, no node has such a model; 503, none that has it is up; 429, those that are up have no room.
        """
        model = self._only_model() if ask.model is None else ask.model
        present = [node for node in self._nodes.values() if not node.is_removed]
        up = [node for node in present if node.serves(model) and node.health.is_up]
        open_ones = [node for node in up if node not in tried and not node.is_full]
        if open_ones:
            return Lease(self, self._strategy.choose(open_ones, ask), ask)
        if tried:
            return None
        if up:
            message = f"All nodes that serve '{model}' have as many requests as they may."
            raise ApiError(429, message, OVERLOADED, code="nodes_full", headers={"Retry-After": "1"})
        raise self._not_up(model, present)

    def ended(self, node: Node) -> None:
        """A lease is over."""
        self._forget_if_done(node)

    def _forget_if_done(self, node: Node) -> None:
        if node.is_removed and not node.load.num_requests and self._nodes.get(node.url) is node:
            del self._nodes[node.url]
            self.on_gone(node)

    def _only_model(self) -> str:
        names = sorted({name for node in self._nodes.values() if not node.is_removed for name in node.models or ()})
        if len(names) != 1:
            raise ApiError(400, f"model is missing; there are: {', '.join(names) or 'none yet'}.", param="model")
        return names[0]

    def _not_up(self, model: str, present: list[Node]) -> ApiError:
        """Unknown is a model only where every node has said what it serves; until then it may still turn up."""
        unseen = [node for node in present if node.models is None]
        awaited = [node for node in present if node.serves(model)] or unseen
        if present and not awaited:
            names = ", ".join(sorted({name for node in present for name in node.models or ()})) or "none"
            message = f"The model '{model}' does not exist; there are: {names}."
            return ApiError(404, message, param="model", code="model_not_found")
        checks = [node.health.next_check_at - self.clock() for node in awaited]
        seconds = max(1, math.ceil(min(checks, default=1.0)))
        message = f"No node that serves '{model}' is up."
        return ApiError(503, message, OVERLOADED, code="no_node", headers={"Retry-After": str(seconds)})


class Lease:
    """A node lent to one request; its load knows of the work until `end`, which comes exactly once."""

    def __init__(self, fleet: Fleet, node: Node, ask: Ask) -> None:
        self.node = node
        self._fleet, self._ask, self._left = fleet, ask, ask.work
        self._num_tokens = 0
        node.load.begin(fleet.clock(), ask.work)

    def answered(self) -> None:
        """Its first byte is there: the prompt is done."""
        self._do(self._ask.prompt_work, self._ask.prompt_work)

    def generated(self, num_tokens: int) -> None:
        """Tokens have come."""
        self._num_tokens += num_tokens
        self._do(min(self._left, num_tokens), num_tokens)

    def end(self, is_whole: bool) -> None:
        """The request is over; `is_whole`: with its whole answer, which tells how long answers are."""
        if is_whole and self._num_tokens:
            self._fleet.outputs.count(self._ask.model, self._num_tokens / self._ask.num_samples)
        self.node.load.end(self._fleet.clock(), self._left)
        self._fleet.ended(self.node)

    def _do(self, expected: float, done: float) -> None:
        self._left -= expected
        self.node.load.do(expected, done)
