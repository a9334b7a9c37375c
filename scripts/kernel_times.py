"""Microseconds of calls on this GPU: every kernel that a call launches, from the profiler."""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from turbojax.bench.kernels import profiled_planes, stream_events

REPEATS = 3
MIN_CALLS, MAX_CALLS = 8, 48  # of a case in each repeat
COMPILING_THREADS = 15
Maker = Callable[[], Any]  # makes arrays on the device; traced, so its shapes are known before they exist


@dataclass(frozen=True)
class Case:
    """A call to time on one layer after another.

    Attributes:
        tag: its name.
        call: the function, not yet jitted.
        num_layers: together larger than the caches.
        makers: of the arrays that the calls take.
        arguments: (layer, *arrays) -> arguments of one call.
    """

    tag: Hashable
    call: Callable[..., jax.Array]
    num_layers: int
    makers: tuple[Maker, ...]
    arguments: Callable[..., tuple[Any, ...]]


class Compiled:
    """The executables of cases and of their makers, compiled side by side before the first is timed.

    A case that does not compile is left out with a line on stderr.
    """

    def __init__(self, cases: Iterable[Case]) -> None:
        cases = list(cases)
        makers = list(dict.fromkeys(maker for case in cases for maker in case.makers))
        with ThreadPoolExecutor(COMPILING_THREADS) as pool:
            made = pool.map(lambda maker: jax.jit(maker).lower().compile(), makers)
            runs = pool.map(_compile_case, cases)
            self.makers = dict(zip(makers, made, strict=True))
            self.runs: dict[Hashable, Any] = {}
            for number, (case, run) in enumerate(zip(cases, runs, strict=True)):
                if run:
                    self.runs[case.tag] = run
                if number % 20 == 0:
                    print(f"{number} of {len(cases)} compiled", file=sys.stderr, flush=True)

    def times(self, cases: Sequence[Case]) -> dict[Hashable, float]:
        """Microseconds of one call of each case, all its kernels: the median of `REPEATS` means over calls."""
        ready = [case for case in cases if case.tag in self.runs]
        arrays = {maker: self.makers[maker]() for case in ready for maker in case.makers}
        mark = jax.jit(lambda a: pl.pallas_call(_mark, jax.ShapeDtypeStruct((64,), jnp.int32), name="mark")(a))
        one = mark(jnp.zeros((64,), jnp.int32))
        calls = []
        for case in ready:
            of_layer = [case.arguments(i, *map(arrays.get, case.makers)) for i in range(case.num_layers)]
            jax.block_until_ready(self.runs[case.tag](*of_layer[-1]))
            calls.append((self.runs[case.tag], itertools.cycle(of_layer), _num_calls(case)))
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                for run, of_layers, num_calls in calls:
                    for _ in range(REPEATS):
                        jax.block_until_ready(mark(one))
                        for args in itertools.islice(of_layers, num_calls):
                            out = run(*args)
                        jax.block_until_ready(out)
            totals = _between_marks(gpu_events(folder))
        assert len(totals) == REPEATS * len(ready), "the profiler lost events"
        return {
            case.tag: statistics.median(totals[i * REPEATS : (i + 1) * REPEATS]) / _num_calls(case) / 1e3
            for i, case in enumerate(ready)
        }


def gpu_events(folder: str) -> list[tuple[float, float, str]]:
    """(start ns, duration ns, name) of what ran on the GPU's streams, in order."""
    return sorted((event.start_ns, event.duration_ns, event.name) for event in stream_events(profiled_planes(folder)))


def _mark(ref, out_ref):
    out_ref[...] = ref[...] + 1


def _num_calls(case: Case) -> int:
    return max(MIN_CALLS, min(case.num_layers, MAX_CALLS))


def _compile_case(case: Case) -> Any:
    try:
        return jax.jit(case.call).lower(*case.arguments(0, *map(jax.eval_shape, case.makers))).compile()
    except Exception as error:
        print(f"{case.tag}: {error!r:.200}", file=sys.stderr)
        return None


def _between_marks(events: Iterable[tuple[float, float, str]]) -> list[float]:
    """Nanoseconds of the kernels after each mark."""
    totals: list[float] = []
    for _, duration, name in events:
        if "mark" in name:
            totals.append(0.0)
        else:
            totals[-1] += duration
    return totals
