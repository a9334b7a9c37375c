"""Checks of the nodes: each by a task of its own, when its health says that one is due."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from turbojax.serve.logs import log_event
from turbojax.serve.proxy.fleet import Fleet
from turbojax.serve.proxy.node import Node
from turbojax.serve.proxy.upstream import NodeFailure, Upstream

log = logging.getLogger(__name__)


class Checks:
    """Knows of a node from `start` to `stop`."""

    def __init__(self, fleet: Fleet, upstream: Upstream) -> None:
        self._fleet, self._upstream = fleet, upstream
        self._tasks: dict[Node, asyncio.Task[None]] = {}

    def start(self, node: Node) -> None:
        """Checks it from now on."""
        if node not in self._tasks:
            self._tasks[node] = asyncio.create_task(self._watch(node), name=f"checks of {node.url}")

    def stop(self, node: Node) -> None:
        """Checks it no more."""
        task = self._tasks.pop(node, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Checks none any more."""
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()

    async def check(self, node: Node) -> None:
        """Asks the node how it is and what it serves."""
        was_up, health = node.health.is_up, node.health
        try:
            node.models = await self._upstream.check(node)
        except NodeFailure as failure:
            health.check_failed(self._fleet.clock(), str(failure))
            # A node that drains ("refused") ends what it has. One that was slow to answer once may do so too, and to
            # move all that waits there would only make others slow.
            if failure.kind != "refused" and not was_up:
                node.give_up_waiting(asyncio.get_running_loop().time())
        else:
            health.check_passed(self._fleet.clock())
        if was_up != health.is_up:
            level = logging.INFO if health.is_up else logging.WARNING
            log_event("node_up" if health.is_up else "node_down", level, node=node.url, reason=health.reason)

    async def _watch(self, node: Node) -> None:
        while True:
            pause_s = node.health.next_check_at - self._fleet.clock()
            if pause_s > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(node.due.wait(), pause_s)
                node.due.clear()
                continue
            try:
                await self.check(node)
            except Exception as error:  # a node whose checks had ended would never come back
                log.exception("a check of %s failed by itself", node.url)
                node.health.check_failed(self._fleet.clock(), type(error).__name__)
