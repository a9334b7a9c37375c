"""Times the quantised linears on this GPU: every kernel of a call, from the profiler, against the floor and XLA's bf16.

    python scripts/bench_linear.py --json benchmarks/results/linear_h200.json
    python scripts/bench_linear.py --only W8A8 FP8

Data is random, weights rotate over more than 200 MB. The floor is the larger of bytes over the read rate and FLOPs
over the dot rate, each the larger of a known rate (4.3 TB/s, 790 TFLOP/s) and the one measured in this run; 8-bit dots
count at twice that rate.
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
from collections.abc import Callable, Iterator, Sequence
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
from pallas_kernels import eight_bit_linear as eight_bit
from pallas_kernels.affine_linear import PackedAffine, affine_linear, tuning
from pallas_kernels.eight_bit_linear import tuning as eight_bit_tuning

READ_RATE, DOT_RATE = 4.3e12, 790e12
ROTATED_BYTES = 300e6  # five times an H200's L2
SHAPES = ((4096, 4096), (4096, 6144), (4096, 28672), (14336, 4096), (8192, 8192), (8192, 57344))
FEW_ROWS, MANY_ROWS = (1, 8, 16, 32, 64), (128, 256, 1024, 4096)
MANY_ROWS_SHAPES = SHAPES[0], SHAPES[2], SHAPES[4]
EXTRA_ROWS = (1, 16, 64)
EXTRA = (  # K, N, group size, bits
    (576, 576, 32, 4),
    (576, 1536, 32, 4),
    (576, 49152, 32, 8),
    (1000, 1234, 32, 4),
    (4096, 28672, 128, 8),
)
EIGHT_BIT_SHAPES, EIGHT_BIT_ROWS = ((4096, 28672), (14336, 4096)), (16, 64, 256, 1024, 4096)
REPEATS = 3


@dataclass(frozen=True)
class Case:
    """A call to time: `call(i, *args)` for layers i of 0 .. layers - 1, one executable."""

    tag: Any
    call: Callable[..., jax.Array]
    layers: int
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Linear:
    """A linear to time at several numbers of rows.

    Attributes:
        name: of its format, "W4A16".
        op: the public function's name.
        K, N: its shape.
        weights: a stack of layers.
        call: (x, weights, layer) -> y.
        layer_bytes: of one layer.
        dot_speed: of its dots, in bf16 dots.
        choice: rows -> how the op runs them, for the results.
        fields: what else its result rows say.
    """

    name: str
    op: str
    K: int
    N: int
    weights: Any
    call: Callable[[jax.Array, Any, jax.Array], jax.Array]
    layer_bytes: float
    dot_speed: int
    choice: Callable[[int], dict[str, Any]]
    fields: dict[str, Any]


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


def affine(K: int, N: int, group_size: int, bits: int) -> Linear:
    """W4A16 or W8A16."""
    w = random_weights(K, N, group_size, bits)
    layer_bytes = K * N * bits / 8 + -(-w.K // w.group_size) * N * w.scale.dtype.itemsize
    return Linear(
        f"W{bits}A16", "affine_linear", K, N, w, affine_linear, layer_bytes, 1,
        lambda M: tuning.to_entry(tuning.choose(M, w.layout, w.N, w.words.shape[2])),
        {"bits": bits, "group_size": group_size},
    )  # fmt: skip


def eight_bit_linear(K: int, N: int, name: str) -> Linear:
    """W8A8 or FP8 with one scale for all or for each block."""
    layers = max(2, math.ceil(ROTATED_BYTES / (K * N)))
    keys = jax.random.split(jax.random.key(0), 2)
    if name == "W8A8":
        codes = jax.random.randint(keys[0], (layers, N, K), -127, 128, jnp.int8)
    else:
        codes = jnp.clip(100 * jax.random.normal(keys[0], (layers, N, K), jnp.bfloat16), -448, 448)
        codes = codes.astype(jnp.float8_e4m3fn)
    covers = {"W8A8": (N,), "FP8 tensor": (), "FP8 blocks": (-(-N // 128), -(-K // 128))}[name]
    w = eight_bit.eight_bit_weights(codes, jax.random.uniform(keys[1], (layers, *covers)) * 0.001 + 0.0005)
    return Linear(
        name, "eight_bit_linear", K, N, w, eight_bit.eight_bit_linear, K * N + 4 * w.scale[0].size, 2,
        lambda M: eight_bit_tuning.to_entry(eight_bit_tuning.choose(M, w)), {"bits": 8},
    )  # fmt: skip


def floor_us(M: int, linear: Linear, rates: tuple[float, float]) -> float:
    """Microseconds that no kernel can beat: weights and scales read once, x read, y written; or the FLOPs."""
    K, N, (read_rate, dot_rate) = linear.K, linear.N, rates
    return max((linear.layer_bytes + 2 * M * (K + N)) / read_rate, 2 * M * K * N / dot_rate / linear.dot_speed) * 1e6


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


def results_of(linear: Linear, rows: Sequence[int], rates: tuple[float, float]) -> list[dict[str, Any]]:
    """One result row for each M."""
    K, N, cases = linear.K, linear.N, []
    layers = jax.tree.leaves(linear.weights)[0].shape[0]
    for M in rows:
        x = jax.random.normal(jax.random.key(1), (M, K), jnp.bfloat16)
        call = lambda i, x, w: linear.call(x, w, jnp.int32(i))  # noqa: E731
        cases.append(Case(M, call, layers, (x, linear.weights)))
        cases += [Case((*case.tag, M), case.call, case.layers, case.args) for case in bf16_cases(M, K, N)]
    times = measure(cases)
    return [
        {"case": f"{linear.name} K{K} N{N} M{M}", "op": linear.op, **linear.fields, "M": M, "K": K, "N": N,
         "time_us": times[M], "floor_us": floor_us(M, linear, rates),
         "xla_bf16_us": min(times["bf16", layout, M] for layout in ("KN", "NK")), "choice": linear.choice(M)}
        for M in rows
    ]  # fmt: skip


def linears(only: Sequence[str]) -> Iterator[tuple[Linear, Sequence[int]]]:
    """The linears to time with their numbers of rows; weights are made as they are asked for."""

    def wanted(name: str) -> bool:
        return not only or name.startswith(tuple(only))

    if wanted("W4A16"):
        for K, N in SHAPES:
            yield affine(K, N, 128, 4), FEW_ROWS + (MANY_ROWS if (K, N) in MANY_ROWS_SHAPES else ())
    for K, N, group_size, bits in EXTRA:
        if wanted(f"W{bits}A16"):
            yield affine(K, N, group_size, bits), EXTRA_ROWS
    for K, N in EIGHT_BIT_SHAPES:
        for name in filter(wanted, ("W8A8", "FP8 tensor", "FP8 blocks")):
            yield eight_bit_linear(K, N, name), EIGHT_BIT_ROWS


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
    parser.add_argument("--only", nargs="*", default=[], help="formats, by how their names begin: W4A16, FP8, ...")
    args = parser.parse_args()
    rates = measured_rates()
    print(f"read {rates[0] / 1e12:.2f} TB/s, dot {rates[1] / 1e12:.0f} TFLOP/s", flush=True)
    rows: list[dict[str, Any]] = []
    for linear, numbers_of_rows in linears(args.only):
        rows += results_of(linear, numbers_of_rows, rates)
        print_rows(rows[-len(numbers_of_rows) :])
        if args.json:
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
