"""What an engine has counted since it started, and how it stands now: plain numbers for whoever exports them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple


@dataclass
class EngineMetrics:
    """Counters that only grow; written by the engine's thread, read by any.

    Attributes:
        num_traces: times that a step was traced.
        num_compilations: programs that were compiled, or read from the compilation cache.
        num_programs_read: those of them that an earlier process had left on disk.
        num_late_compilations: those after the engine had compiled all that it would need. Zero while healthy.
        num_steps: steps that were read back.
        num_failed_steps: steps that raised; each made a fresh pool.
        num_failed_requests: requests that ended with an error of their own.
        num_finished_requests: requests that ended by a stop or their length.
        num_cancelled_requests: requests that were cancelled.
        num_timed_out_requests: requests whose time was over before they were done.
        num_prompt_tokens: of requests that took a slot for the first time.
        num_cached_tokens: those of them that the prefix cache had.
        num_preemptions: times that a request gave up its pages to another and was recomputed later.
    """

    num_traces: int = 0
    num_compilations: int = 0
    num_programs_read: int = 0
    num_late_compilations: int = 0
    num_steps: int = 0
    num_failed_steps: int = 0
    num_failed_requests: int = 0
    num_finished_requests: int = 0
    num_cancelled_requests: int = 0
    num_timed_out_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    def snapshot(self) -> dict[str, int]:
        """The numbers now, by their names."""
        return asdict(self)

    def __add__(self, other: EngineMetrics) -> EngineMetrics:
        """What two engines have counted together, now."""
        mine = self.snapshot()
        return EngineMetrics(**{name: mine[name] + number for name, number in other.snapshot().items()})


class EngineStatus(NamedTuple):
    """How an engine stands at a moment.

    Every page of the pool, the device's sink left out, is held, idle or free.

    Attributes:
        num_running: requests with a slot.
        num_waiting: requests without one, those included that the engine has not taken in yet.
        num_held_pages: pages that running requests hold.
        num_idle_pages: pages that nobody holds, kept for what they contain until somebody needs them.
        num_free_pages: the others.
        stalled_s: for how long there has been work without a step that finished or a program that was compiled; 0 while
            there is no work.
        failure: why the engine takes no further request; None while it does.
    """

    num_running: int
    num_waiting: int
    num_held_pages: int
    num_idle_pages: int
    num_free_pages: int
    stalled_s: float
    failure: str | None

    def beside(self, other: EngineStatus) -> EngineStatus:
        """How two engines stand together: the longest wait counts, and the first failure."""
        return EngineStatus(
            num_running=self.num_running + other.num_running,
            num_waiting=self.num_waiting + other.num_waiting,
            num_held_pages=self.num_held_pages + other.num_held_pages,
            num_idle_pages=self.num_idle_pages + other.num_idle_pages,
            num_free_pages=self.num_free_pages + other.num_free_pages,
            stalled_s=max(self.stalled_s, other.stalled_s),
            failure=self.failure or other.failure,
        )

    @property
    def num_pages(self) -> int:
        return self.num_held_pages + self.num_idle_pages + self.num_free_pages

    @property
    def pool_usage(self) -> float:
        """The share of the pool that running requests hold, 0 .. 1: what is left, a newcomer can have."""
        return self.num_held_pages / self.num_pages
