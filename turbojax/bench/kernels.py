"""Time of each GPU kernel in a run, from the profiler."""

from __future__ import annotations

import glob
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax.profiler import ProfileData

from turbojax.bench.errors import BenchError


@dataclass(frozen=True)
class KernelTimes:
    """Seconds and number of runs by kernel name; an active profiler disables command buffers, so that each shows."""

    seconds: dict[str, float]
    counts: dict[str, int]

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def top(self, count: int) -> list[tuple[str, float, int]]:
        """(name, seconds, runs) of the longest together."""
        names = sorted(self.seconds, key=lambda name: -self.seconds[name])[:count]
        return [(name, self.seconds[name], self.counts[name]) for name in names]


def profile_kernels(run: Callable[[], object]) -> KernelTimes:
    """Runs something, which must have finished when it returns, and sums what ran on the GPU meanwhile.

    Raises:
        BenchError: nothing did.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        times = kernel_times(profiled_planes(folder))
    if not times.seconds:
        raise BenchError("the profiler saw no GPU kernels")
    return times


def profiled_planes(folder: str) -> Iterable[Any]:
    """The planes of the one profile that jax.profiler.trace wrote into a folder."""
    (path,) = glob.glob(folder + "/**/*.xplane.pb", recursive=True)
    return ProfileData.from_file(path).planes


def stream_events(planes: Iterable[Any]) -> Iterator[Any]:
    """What ran on the streams of all GPU planes of a profile; copies are among it."""
    for plane in planes:
        for line in plane.lines if "GPU" in plane.name else ():
            yield from line.events if "Stream" in line.name else ()


def kernel_times(planes: Iterable[Any]) -> KernelTimes:
    """Sums the stream events of a profile by name."""
    nanoseconds: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in stream_events(planes):
        nanoseconds[event.name] += event.duration_ns
        counts[event.name] += 1
    return KernelTimes({name: ns * 1e-9 for name, ns in nanoseconds.items()}, dict(counts))
