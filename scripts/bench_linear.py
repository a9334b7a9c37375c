"""Times the packed linears on this GPU: every kernel of a call, from the profiler, against the floor and XLA's bf16.

    python scripts/bench_linear.py --json benchmarks/results/linear_h200.json

Data is random, weights rotate over more than 200 MB. The floor is the larger of bytes over the read rate and FLOPs
over the dot rate, each the larger of a known rate (4.3 TB/s, 790 TFLOP/s) and the one measured in this run.
"""

from __future__ import annotations

import argparse
import datetime
import glob
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.profiler import ProfileData

from pallas_kernels import backend
from pallas_kernels.affine_linear import PackedAffine, affine_linear, tuning

READ_RATE, DOT_RATE = 4.3e12, 790e12
ROTATED_BYTES = 300e6  # five times an H200's L2
SHAPES = ((4096, 4096), (4096, 6144), (4096, 28672), (14336, 4096), (8192, 8192), (8192, 57344))
FEW_ROWS, MANY_ROWS = (1, 8, 16, 32, 64), (128, 256, 1024, 4096)
MANY_ROWS_SHAPES = SHAPES[0], SHAPES[2], SHAPES[4]
EXTRA = ((576, 576, 32, 4), (576, 49152, 32, 8), (1000, 1234, 32, 4))  # K, N, group size, bits
REPEATS = 3


@dataclass(frozen=True)
class Case:
    """A call to time: `call(i, *args)` for layers i of 0 .. layers - 1, one executable."""

    tag: Any
    call: Callable[..., jax.Array]
    layers: int
    args: tuple[Any, ...]


def random_weights(K: int, N: int, group_size: int, bits: int, kind: str = "symmetric") -> PackedAffine:
    """Random words and scales, enough layers for `ROTATED_BYTES`."""
    width = 64 if K % (64 * 16 // bits) == 0 and group_size != 32 else 32
    tile, padded = width * 16 // bits, -(-N // 64) * 64
    layers = max(2, math.ceil(ROTATED_BYTES / (K * N * bits / 8)))
    keys = jax.random.split(jax.random.key(0), 3)
    tiles = -(-K // tile)
    groups = (layers, 1 if group_size == -1 else -(-tiles * tile // group_size), padded)
    words = jax.random.bits(keys[0], (layers, tiles, padded, width), jnp.uint16)
    scale = (jax.random.uniform(keys[1], groups) * 0.02 + 0.001).astype(jnp.float16)
    shift = jax.random.randint(keys[2], groups, 0, 2**bits).astype(jnp.uint8) if kind == "zero" else None
    return PackedAffine(words, scale, shift, None, kind, bits, K if group_size == -1 else group_size, K, N)


def _mark(ref, out_ref):
    out_ref[...] = ref[...] + 1


def gpu_events(folder: str) -> list[tuple[float, float, str]]:
    """(start ns, duration ns, name) of what ran on the GPU's streams, in order."""
    (path,) = glob.glob(folder + "/**/*.xplane.pb", recursive=True)
    planes = [plane for plane in ProfileData.from_file(path).planes if "GPU" in plane.name]
    lines = [line for plane in planes for line in plane.lines if "Stream" in line.name]
    return sorted((event.start_ns, event.duration_ns, event.name) for line in lines for event in line.events)


def measure(cases: Sequence[Case]) -> dict[Any, float]:
    """Microseconds of one call of each case: all its kernels, the median of `REPEATS` runs over all layers.

    A case that does not compile or run is left out with a line on stderr (tuning tries some that cannot).
    """
    mark = jax.jit(
        lambda a: pl.pallas_call(_mark, jax.ShapeDtypeStruct((64,), jnp.int32), name="mark")(a)  # between the cases
    )
    one = mark(jnp.zeros((64,), jnp.int32))

    def compile_case(case: Case) -> Any:
        try:
            calls = jax.jit(lambda *args: [case.call(i, *args) for i in range(case.layers)])
            return case, calls.lower(*case.args).compile()
        except Exception as error:
            print(f"{case.tag}: {error!r:.200}", file=sys.stderr)
            return None

    with ThreadPoolExecutor(15) as pool:
        ready = [pair for pair in pool.map(compile_case, cases) if pair]
    for case, run in ready:
        jax.block_until_ready(run(*case.args))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for case, run in ready:
                for _ in range(REPEATS):
                    jax.block_until_ready(mark(one))
                    jax.block_until_ready(run(*case.args))
        totals: list[float] = []
        for _, duration, name in gpu_events(folder):
            if "mark" in name:
                totals.append(0.0)
            else:
                totals[-1] += duration
    assert len(totals) == REPEATS * len(ready), "the profiler lost events"
    runs = [totals[i * REPEATS : (i + 1) * REPEATS] for i in range(len(ready))]
    return {case.tag: statistics.median(t) / case.layers / 1e3 for (case, _), t in zip(ready, runs, strict=True)}


def measured_rates() -> tuple[float, float]:
    """Bytes/s of a large read and FLOP/s of a large bf16 dot, but at least the known rates."""
    big = jax.random.normal(jax.random.key(0), (1 << 30,), jnp.float32)
    square = big[: 1 << 26].reshape(8192, 8192).astype(jnp.bfloat16)
    times = measure([Case("read", lambda i, a: a.sum(), 1, (big,)), Case("dot", lambda i, a: a @ a, 1, (square,))])
    return max(READ_RATE, big.nbytes / times["read"] * 1e6), max(DOT_RATE, 2 * 8192**3 / times["dot"] * 1e6)


def floor_us(M: int, w: PackedAffine, rates: tuple[float, float]) -> float:
    """Microseconds that no kernel can beat: weights and scales read once, x read, y written; or the FLOPs."""
    groups = -(-w.K // w.group_size)
    shift_bytes = 0 if w.shift is None else w.shift.dtype.itemsize
    weights = w.K * w.N * w.bits / 8 + groups * w.N * (w.scale.dtype.itemsize + shift_bytes)
    return max((weights + 2 * M * (w.K + w.N)) / rates[0], 2 * M * w.K * w.N / rates[1]) * 1e6


def bf16_cases(M: int, K: int, N: int) -> list[Case]:
    """XLA's dot with bf16 weights in both layouts."""
    layers = max(2, math.ceil(ROTATED_BYTES / (2 * K * N)))
    x = jax.random.normal(jax.random.key(1), (M, K), jnp.bfloat16)
    kn = jax.random.normal(jax.random.key(2), (layers, K, N), jnp.bfloat16)
    nk = jax.random.normal(jax.random.key(3), (layers, N, K), jnp.bfloat16)
    contract_k = (((1,), (1,)), ((), ()))
    return [
        Case(("bf16", "KN"), lambda i, x, w: x @ w[i], layers, (x, kn)),
        Case(("bf16", "NK"), lambda i, x, w: lax.dot_general(x, w[i], contract_k), layers, (x, nk)),
    ]


def rows_of_shape(
    K: int, N: int, group_size: int, bits: int, rows: Sequence[int], rates: tuple[float, float]
) -> list[dict[str, Any]]:
    """One result row for each M."""
    w = random_weights(K, N, group_size, bits)
    layers = w.words.shape[0]
    cases, found = [], []
    for M in rows:
        x = jax.random.normal(jax.random.key(1), (M, K), jnp.bfloat16)
        cases.append(Case(M, lambda i, x, w: affine_linear(x, w, jnp.int32(i)), layers, (x, w)))
        cases += [Case((*case.tag, M), case.call, case.layers, case.args) for case in bf16_cases(M, K, N)]
    times = measure(cases)
    for M in rows:
        choice = tuning.choose(M, w.layout, w.N, w.words.shape[2])
        found.append(
            {"case": f"W{bits}A16 K{K} N{N} M{M}", "op": "affine_linear", "bits": bits, "group_size": group_size,
             "M": M, "K": K, "N": N, "time_us": times[M], "floor_us": floor_us(M, w, rates),
             "xla_bf16_us": min(times["bf16", layout, M] for layout in ("KN", "NK")),
             "choice": tuning.to_entry(choice)}
        )  # fmt: skip
    return found


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """The table."""
    print(f"{'case':<28}{'us':>9}{'floor':>9}{'floor/t':>9}{'bf16':>9}{'bf16/t':>8}")
    for row in rows:
        time, floor, bf16 = row["time_us"], row["floor_us"], row["xla_bf16_us"]
        print(f"{row['case']:<28}{time:>9.1f}{floor:>9.1f}{floor / time:>9.2f}{bf16:>9.1f}{bf16 / time:>8.2f}")


def print_means(rows: Sequence[dict[str, Any]]) -> None:
    """Geometric means of floor / time and bf16 / time over large and small W4A16 shapes."""
    for name, large in (("K N >= 26 MB", True), ("smaller", False)):
        for group in ((1, 8, 16), (32,), (64,)):
            chosen = [r for r in rows if r["bits"] == 4 and r["M"] in group and r["K"] >= 4096
                      and (r["K"] * r["N"] >= 52e6) == large]  # fmt: skip
            if chosen:
                share = statistics.geometric_mean(r["floor_us"] / r["time_us"] for r in chosen)
                ratio = statistics.geometric_mean(r["xla_bf16_us"] / r["time_us"] for r in chosen)
                print(f"{name}, M in {group}: floor / time {share:.2f}, over bf16 {ratio:.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    rates = measured_rates()
    print(f"read {rates[0] / 1e12:.2f} TB/s, dot {rates[1] / 1e12:.0f} TFLOP/s", flush=True)
    rows: list[dict[str, Any]] = []
    shapes = [(K, N, 128, 4, FEW_ROWS + (MANY_ROWS if (K, N) in MANY_ROWS_SHAPES else ())) for K, N in SHAPES]
    shapes += [(*extra, (1, 16)) for extra in EXTRA]
    for shape in shapes:
        rows += rows_of_shape(*shape, rates)
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(report(rows, rates), indent=1) + "\n")
    print_rows(rows)
    print_means(rows)
    print("fallbacks:", backend.num_fallbacks())


def report(rows: Sequence[dict[str, Any]], rates: tuple[float, float]) -> dict[str, Any]:
    """The results with what they were measured on."""
    return {
        "device": backend.device_kind(),
        "versions": {"jax": jax.__version__, "python": sys.version.split()[0]},
        "date": datetime.date.today().isoformat(),
        "command": "python scripts/bench_linear.py " + " ".join(sys.argv[1:]),
        "read_bandwidth": rates[0],
        "dot_rate": rates[1],
        "rows": list(rows),
    }


if __name__ == "__main__":
    main()
