"""Who waits for a slot, and whose turn is next: first come first served in a priority, and no priority starves."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from turbojax.engine.request import Request

# A priority one level worse gets one admission after this many of better ones, however many of those keep coming.
ADMISSIONS_PER_LEVEL = 32


@dataclass(eq=False)
class _Level:
    """The waiting requests of one priority, in order, and the number of admissions before it was last served."""

    priority: int
    requests: OrderedDict[Request, None] = field(default_factory=OrderedDict)
    served_at: int = 0


class WaitingQueue:
    """Requests without a slot, in order of their turn.

    The turn of a priority is `priority * ADMISSIONS_PER_LEVEL + served_at`, and the least is next. `served_at` counts
    all admissions up to the priority's own last one, or up to when it began to wait: a lower priority goes first, but
    its turn moves back with each admission, and that of the ones that wait stands still. So the first request of a
    priority waits for at most `levels * ADMISSIONS_PER_LEVEL` admissions of those so many levels better, whatever
    arrives meanwhile (beside requests that gave way).

    A request that gave way stands in front of its priority, which gets back the turn that it was admitted with.
    Every operation is O(log priorities) and O(1) in the number of requests.
    """

    def __init__(self, admissions_per_level: int = ADMISSIONS_PER_LEVEL) -> None:
        self._admissions_per_level = admissions_per_level
        self._levels: dict[int, _Level] = {}  # those with requests
        self._turns: list[tuple[int, int, int]] = []  # (turn, served_at, priority) of each of them, sorted
        self._num_admissions, self._num_requests = 0, 0

    def __len__(self) -> int:
        return self._num_requests

    def __contains__(self, request: Request) -> bool:
        level = self._levels.get(request.priority)
        return level is not None and request in level.requests

    def __iter__(self) -> Iterator[Request]:
        """In the order of the turns as they are now."""
        return chain.from_iterable(self._levels[priority].requests for _, _, priority in self._turns)

    def first(self) -> Request | None:
        """Whose turn is next."""
        return next(iter(self), None)

    def append(self, request: Request) -> None:
        """Takes in a newcomer, behind all of its priority."""
        level = self._level_of(request, self._num_admissions)
        level.requests[request] = None
        self._num_requests += 1

    def put_back(self, request: Request) -> None:
        """Takes in a request that was admitted and gave way, in front of all of its priority."""
        level = self._level_of(request, request.served_at)
        if request.served_at < level.served_at:
            self._serve(level, request.served_at)
        level.requests[request] = None
        level.requests.move_to_end(request, last=False)
        self._num_requests += 1

    def admit(self, request: Request) -> None:
        """Lets out a request that takes a slot, and counts its priority as served. Anyone's turn may be taken."""
        level = self._levels[request.priority]
        request.served_at = level.served_at
        self._num_admissions += 1
        self._serve(level, self._num_admissions)
        self.remove(request)

    def remove(self, request: Request) -> None:
        """Lets out a request that ends while it waits."""
        level = self._levels[request.priority]
        del level.requests[request]
        self._num_requests -= 1
        if not level.requests:
            self._leave_order(level)
            del self._levels[level.priority]

    def clear(self) -> None:
        self._levels.clear()
        self._turns.clear()
        self._num_requests = 0

    def check(self) -> None:
        """Turns name every priority that waits, once and in order; nobody waits twice or without being counted."""
        assert self._turns == sorted(self._turn_of(level) for level in self._levels.values())
        assert all(level.requests for level in self._levels.values()), "a priority without requests waits"
        assert all(r.priority == p for p, level in self._levels.items() for r in level.requests)
        assert sum(len(level.requests) for level in self._levels.values()) == self._num_requests

    # -- turns --------------------------------------------------------------------------------------------

    def _level_of(self, request: Request, served_at: int) -> _Level:
        """The level of a request; one that begins to wait now was last served then."""
        level = self._levels.get(request.priority)
        if level is None:
            level = self._levels[request.priority] = _Level(request.priority, served_at=served_at)
            insort(self._turns, self._turn_of(level))
        return level

    def _turn_of(self, level: _Level) -> tuple[int, int, int]:
        """Of equal turns, the priority that has waited for longer goes first."""
        turn = level.priority * self._admissions_per_level + level.served_at
        return turn, level.served_at, level.priority

    def _serve(self, level: _Level, served_at: int) -> None:
        self._leave_order(level)
        level.served_at = served_at
        insort(self._turns, self._turn_of(level))

    def _leave_order(self, level: _Level) -> None:
        del self._turns[bisect_left(self._turns, self._turn_of(level))]
