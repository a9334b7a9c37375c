"""Whether a node may be asked: told by checks and by requests, with a pause that grows from one failure to the next."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

# A connection that breaks may be chance; this many in a row, with no answer in between, are not.
MAX_FAILURES = 3
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0


@dataclass
class Health:
    """Up, or down and checked again after a pause.

    A node comes up by a check alone, never by time: `is_up` is False until the first one passes. Each time that it goes
    down it pauses twice as long, until a request (not only a check) has been answered. Pauses are drawn from
    0.5 .. 1 times their length, so that proxies over the same nodes do not check in step.

    Attributes:
        is_up: requests may go there.
        next_check_at: when it should be checked, by the clock that the methods are given.
        reason: why it is down, for people.
        num_failures: requests in a row that it failed.
        num_downs: how often it went down since a request was answered.
    """

    interval_s: float
    is_up: bool = False
    next_check_at: float = 0.0
    reason: str | None = "not reached yet"
    num_failures: int = 0
    num_downs: int = 0
    rng: random.Random = field(default_factory=random.Random, repr=False)

    def check_passed(self, now_s: float) -> None:
        """It says that it is well; a node in its pause is not checked, so that is its way back."""
        self.is_up, self.reason = True, None
        self.next_check_at = now_s + self.interval_s

    def check_failed(self, now_s: float, reason: str) -> None:
        """It is not well, or does not answer."""
        self._go_down(now_s, reason)

    def request_answered(self) -> None:
        """A request was answered, whatever a check may have said before."""
        self.num_failures = self.num_downs = 0

    def request_failed(self, now_s: float, reason: str) -> None:
        """A request broke: the node is checked at once, and is down when this is the third in a row."""
        self.num_failures += 1
        if self.num_failures >= MAX_FAILURES:
            self._go_down(now_s, reason)
        elif self.is_up:
            self.next_check_at = now_s

    def unreachable(self, now_s: float, reason: str) -> None:
        """No connection: there is nothing to wait for."""
        self._go_down(now_s, reason)

    def _go_down(self, now_s: float, reason: str) -> None:
        if not self.is_up and now_s < self.next_check_at:
            return  # several requests met the same failure
        self.num_downs += 1
        pause_s = min(MAX_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self.num_downs - 1, 16))
        self.is_up, self.reason, self.num_failures = False, reason, 0
        self.next_check_at = now_s + pause_s * self.rng.uniform(0.5, 1.0)
