"""Measures the linears' candidates on this GPU and writes the table that `affine_linear` reads.

    python scripts/tune.py --shapes 4096x4096 4096x28672 --out pallas_kernels/affine_linear/tables/nvidia_h200.json

Entries that the table has for other shapes stay.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from kernel_times import gpu_events
from linear_problems import SHAPES, random_weights

from pallas_kernels import backend
from pallas_kernels.affine_linear import PackedAffine, tuning
from pallas_kernels.affine_linear.api import linear_by
from pallas_kernels.linears import to_entry

MIN_CALLS = 8  # of each candidate, every one on another layer than the last
Trial = tuple[int, tuning.Choice]  # bucket of rows, choice


def compile_trial(trial: Trial, w: PackedAffine) -> Any:
    """The executable of (layer [1], x, w), or None for a choice that the compiler refuses."""
    bucket, choice = trial
    x = jax.ShapeDtypeStruct((bucket, w.K), jnp.bfloat16)
    call = jax.jit(lambda layer, x, w: linear_by(choice, x, w, layer[0], x.dtype, interpret=False))
    try:
        return call.lower(jax.ShapeDtypeStruct((1,), jnp.int32), x, w).compile()
    except Exception as error:
        print(f"{trial}: {error!r:.200}", file=sys.stderr)
        return None


def times_of(trials: list[Trial], w: PackedAffine) -> dict[Trial, float]:
    """Microseconds of each trial: the sum over its kernels of their medians over all layers."""
    with ThreadPoolExecutor(15) as pool:
        compiled = list(pool.map(lambda trial: compile_trial(trial, w), trials))
    ready = [(trial, run) for trial, run in zip(trials, compiled, strict=True) if run]
    num_layers = w.words.shape[0]
    layers = [jnp.full((1,), layer, jnp.int32) for layer in range(num_layers)]
    xs = {bucket: jax.random.normal(jax.random.key(1), (bucket, w.K), jnp.bfloat16) for bucket, _ in trials}
    times: dict[Trial, float] = {}
    for (bucket, _), run in ready:
        jax.block_until_ready(run(layers[0], xs[bucket], w))
    for start in range(0, len(ready), 24):  # a trace of few trials stays small
        part = ready[start : start + 24]
        num_calls = max(MIN_CALLS, min(num_layers, 12))
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                for (bucket, _), run in part:
                    for call in range(num_calls):
                        y = run(layers[call % num_layers], xs[bucket], w)
                    jax.block_until_ready(y)
            events = gpu_events(folder)
        times |= split_events(events, [trial for trial, _ in part], num_calls)
    return times


def split_events(events: list[tuple[float, float, str]], trials: list[Trial], num_calls: int) -> dict[Trial, float]:
    """Events in order of their trials: a trial's kernels repeat `num_calls` times, and its first is ours."""
    ours = [i for i, (_, _, name) in enumerate(events) if "affine" in name]
    assert len(ours) == num_calls * len(trials), "the profiler lost events"
    times = {}
    for position, trial in enumerate(trials):
        first = ours[position * num_calls]
        last = ours[(position + 1) * num_calls] if position + 1 < len(trials) else len(events)
        run = [duration for _, duration, _ in events[first:last]]
        kernels, rest = divmod(len(run), num_calls)
        steady = sum(statistics.median(run[k::kernels]) for k in range(kernels))
        times[trial] = (sum(run) / num_calls if rest else steady) / 1e3
    return times


def tune_shape(w: PackedAffine, buckets: list[int]) -> dict[str, dict[str, Any]]:
    """The fastest candidate of each bucket, as table entries with its microseconds."""
    trials = [(b, choice) for b in buckets for choice in tuning.candidates(b, w.layout, w.words.shape[2])]
    times = times_of(trials, w)
    entries = {}
    for bucket in buckets:
        ranked = sorted((us, repr(choice), choice) for (b, choice), us in times.items() if b == bucket)
        us, _, choice = ranked[0]
        key = tuning.key_of(bucket, w.layout, w.N)
        entries[key] = {**to_entry(choice, tuning.PATHS), "time_us": round(us, 2)}
        print(key, *(f"\n   {us:8.1f}  {name}" for us, name, _ in ranked[:4]), flush=True)
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=[f"{K}x{N}" for K, N in SHAPES], help="KxN")
    parser.add_argument("--buckets", type=int, nargs="*", default=list(tuning.M_BUCKETS))
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--kind", choices=("symmetric", "zero"), default="symmetric")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no shape after this long")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    start = time.monotonic()
    entries: dict[str, Any] = json.loads(args.out.read_text())["entries"] if args.out.is_file() else {}
    for shape in args.shapes:
        if time.monotonic() - start > args.seconds:
            print(f"{shape}: no time left")
            continue
        K, N = map(int, shape.split("x"))
        entries |= tune_shape(random_weights(K, N, args.group_size, args.bits, args.kind), args.buckets)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        table = {"device": backend.device_kind(), "jax": jax.__version__, "entries": dict(sorted(entries.items()))}
        args.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
