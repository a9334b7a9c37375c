"""What an engine has counted since it started: plain numbers for whoever exports them."""

from __future__ import annotations

from dataclasses import asdict, dataclass


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
