"""Times the quantised linears on this GPU: every kernel of a call, from the profiler, against the floor and XLA's bf16.

    python scripts/bench_linear.py --json benchmarks/results/linear_h200.json
    python scripts/bench_linear.py --only W8A8 FP8
    python scripts/bench_linear.py --only W4A16 --rows 16 32

Data is random, weights rotate over more than 200 MB. The floor is the larger of bytes over the read rate and FLOPs
over the dot rate, each the larger of a known rate (4.3 TB/s, 790 TFLOP/s) and the one measured in this run; 8-bit dots
count at twice that rate. Most of a run is XLA trying kernels for its bf16 dots; the environment variable
JAX_COMPILATION_CACHE_DIR spares the next run that. Results are written linear by linear.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from kernel_times import Case, Compiled
from linear_problems import Linear, bf16_cases, linears

from pallas_kernels import backend

READ_RATE, DOT_RATE = 4.3e12, 790e12
READ_BYTES, DOT_SIZE = 4 << 30, 8192


def rate_cases() -> list[Case]:
    """A large read and a large bf16 dot."""
    read = lambda: jax.random.normal(jax.random.key(0), (READ_BYTES // 4,))  # noqa: E731
    square = lambda: jax.random.normal(jax.random.key(0), (DOT_SIZE, DOT_SIZE), jnp.bfloat16)  # noqa: E731
    just_it = lambda _, a: (a,)  # noqa: E731
    return [Case("read", jnp.sum, 1, (read,), just_it), Case("dot", lambda a: a @ a, 1, (square,), just_it)]


def measured_rates(cases: Sequence[Case]) -> tuple[float, float]:
    """Bytes/s of a large read and FLOP/s of a large bf16 dot, but at least the known rates."""
    times = Compiled(cases).times(cases)
    return max(READ_RATE, READ_BYTES / times["read"] * 1e6), max(DOT_RATE, 2 * DOT_SIZE**3 / times["dot"] * 1e6)


def result_row(linear: Linear, M: int, rates: tuple[float, float], times: dict[Hashable, float]) -> dict[str, Any]:
    bf16_us = min(times[case.tag] for case in bf16_cases(M, linear.K, linear.N))
    return {
        "case": linear.tag(M), "op": linear.op, **linear.fields, "M": M, "K": linear.K, "N": linear.N,
        "time_us": times[linear.tag(M)], "floor_us": linear.floor_us(M, *rates), "xla_bf16_us": bf16_us,
        "choice": linear.choice(M),
    }  # fmt: skip


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
    parser.add_argument("--rows", nargs="*", type=int, default=[], help="numbers of rows; all by default")
    args = parser.parse_args()
    rates = measured_rates(rate_cases())
    print(f"read {rates[0] / 1e12:.2f} TB/s, dot {rates[1] / 1e12:.0f} TFLOP/s", flush=True)
    rows: list[dict[str, Any]] = []
    times: dict[Hashable, float] = {}
    for linear in linears(args.only, args.rows):
        bf16 = [case for M in linear.rows for case in bf16_cases(M, linear.K, linear.N)]
        cases = linear.cases() + [case for case in bf16 if case.tag not in times]
        times |= Compiled(cases).times(cases)
        rows += [result_row(linear, M, rates, times) for M in linear.rows if linear.tag(M) in times]
        print_rows(rows[-len(linear.rows) :])
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
