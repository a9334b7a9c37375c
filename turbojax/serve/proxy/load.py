"""How much a node has to do, and how fast it has been: what its expected latency is made of."""

from __future__ import annotations

from dataclasses import dataclass

# What was done a minute of work ago counts half: long enough to smooth single requests, short enough to follow a node
# that slows down.
HALF_LIFE_S = 60.0
# A prompt token costs a fraction of a generated one, since a whole chunk of them goes through the weights at once.
PROMPT_TOKENS_PER_UNIT = 16.0


@dataclass
class Load:
    """Work is counted in generated tokens. By Little's law a request that joins waits

        latency = work that is outstanding, its own included / work done a second

    and speed is what was done over the time in which there was something to do, both fading by `HALF_LIFE_S`.

    Attributes:
        num_requests: requests under way.
        outstanding: work that is expected of them still.
    """

    num_requests: int = 0
    outstanding: float = 0.0
    _done: float = 0.0
    _done_since: float = 0.0
    _busy_s: float = 0.0
    _seen_at: float = 0.0

    @property
    def speed(self) -> float | None:
        """Work a second; None before anything was done."""
        return self._done / self._busy_s if self._done > 0 and self._busy_s > 0 else None

    def expected_s(self, work: float, speed: float) -> float:
        """How long a request of this much work takes if it joins now."""
        return (self.outstanding + work) / speed

    def begin(self, now_s: float, work: float) -> None:
        """A request joins."""
        self._advance(now_s)
        self.num_requests += 1
        self.outstanding += work

    def do(self, expected: float, done: float) -> None:
        """Work of a request gets done: `expected` of what it came with, `done` in truth."""
        self.outstanding -= expected
        self._done_since += done

    def end(self, now_s: float, unused: float) -> None:
        """A request is over, `unused` of its expected work was never done."""
        self._advance(now_s)
        self.num_requests -= 1
        self.outstanding = self.outstanding - unused if self.num_requests else 0.0  # no rounding is left behind

    def _advance(self, now_s: float) -> None:
        if self.num_requests:
            past_s = now_s - self._seen_at
            fade = 0.5 ** (past_s / HALF_LIFE_S)
            self._done = self._done * fade + self._done_since
            self._done_since = 0.0
            self._busy_s = self._busy_s * fade + past_s
        self._seen_at = now_s
