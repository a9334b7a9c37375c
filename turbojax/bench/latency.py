"""Latencies of requests from the moments at which their tokens came."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise

import numpy as np


@dataclass
class Trace:
    """What was heard of one request.

    Attributes:
        arrival_s: when it was handed over.
        num_input_tokens: of its prompt.
        events: (when, how many tokens came), in order; a call of several decode steps brings several at once.
    """

    arrival_s: float
    num_input_tokens: int
    events: list[tuple[float, int]] = field(default_factory=list)

    @property
    def num_output_tokens(self) -> int:
        return sum(count for _, count in self.events)

    @property
    def ttft_s(self) -> float:
        """From arrival to the first token."""
        return self.events[0][0] - self.arrival_s

    @property
    def e2e_s(self) -> float:
        """From arrival to the last token."""
        return self.events[-1][0] - self.arrival_s

    @property
    def tpot_s(self) -> list[float]:
        """The mean time of a token after the first, as a list of one; empty where there is no second."""
        num_after = self.num_output_tokens - 1
        return [(self.events[-1][0] - self.events[0][0]) / num_after] if num_after else []

    @property
    def itl_s(self) -> list[float]:
        """The gap before each token after the first; 0 for tokens that came together."""
        times = [at for at, count in self.events for _ in range(count)]
        return [later - earlier for earlier, later in pairwise(times)]


@dataclass(frozen=True)
class Summary:
    """Mean and percentiles."""

    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Summary | None:
        """Of at least one value; percentiles interpolate between neighbours. None of nothing."""
        array = np.asarray(list(values), np.float64)
        if not array.size:
            return None
        p50, p95, p99 = np.percentile(array, (50, 95, 99))
        return cls(float(array.mean()), float(p50), float(p95), float(p99))


def latencies_ms(traces: Sequence[Trace]) -> dict[str, dict[str, float]]:
    """{metric: {mean, p50, p95, p99}} in milliseconds, of those metrics that have values."""
    metrics = {
        "ttft_ms": [trace.ttft_s for trace in traces],
        "tpot_ms": [value for trace in traces for value in trace.tpot_s],
        "itl_ms": [value for trace in traces for value in trace.itl_s],
        "e2e_ms": [trace.e2e_s for trace in traces],
    }
    summaries = {name: Summary.of(1e3 * value for value in values) for name, values in metrics.items()}
    return {name: asdict(summary) for name, summary in summaries.items() if summary is not None}
