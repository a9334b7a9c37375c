"""One replica: where it is, what it serves, how it is and what it has to do."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from turbojax.serve.proxy.health import Health
from turbojax.serve.proxy.load import Load


@dataclass(eq=False)
class Node:
    """A replica that the operator named.

    Attributes:
        url: base of its routes, as `node_url` writes it.
        api_key: sent in place of the client's; None passes the client's on.
        max_connections: requests that it is given at once.
        health: whether it may be asked.
        load: what it has to do.
        models: cards of what it serves, by name; None before it was reached.
        is_removed: it is given nothing new and is gone once its last request ends.
        waiting: time limits of requests that have got nothing from it yet.
        due: its next check was moved.
    """

    url: str
    api_key: str | None = field(repr=False)
    max_connections: int
    health: Health
    load: Load = field(default_factory=Load)
    models: dict[str, dict[str, Any]] | None = None
    is_removed: bool = False
    waiting: set[asyncio.Timeout] = field(default_factory=set, repr=False)
    due: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    def serves(self, model: str) -> bool:
        return self.models is not None and model in self.models

    @property
    def is_full(self) -> bool:
        return self.load.num_requests >= self.max_connections

    def give_up_waiting(self, now_s: float) -> None:
        """It does not answer at all: requests that have got nothing yet stop waiting, and go elsewhere."""
        for limit in self.waiting:
            if not limit.expired():
                limit.reschedule(now_s)

    def status(self) -> dict[str, Any]:
        """For people and programs; never its key."""
        speed = self.load.speed
        return {
            "models": sorted(self.models or ()),
            "is_up": self.health.is_up,
            "reason": self.health.reason,
            "is_draining": self.is_removed,
            "unfinished": self.load.num_requests,
            "max_connections": self.max_connections,
            "speed": None if speed is None else round(speed, 1),
            "has_api_key": self.api_key is not None,
        }
