"""Times paged attention and the KV write on this GPU: every kernel of a call, from the profiler, against the floor.

    python scripts/bench_attention.py --json benchmarks/results/attention_h200.json
    python scripts/bench_attention.py --sweep --json sweep.json

Pools take at least 60 GB, pages are in random order and each call reads another layer. The floor of reads is bytes over
the larger of 4.3 TB/s and the read rate of this run; that of prefill FLOPs over the larger of 790 TFLOP/s and the dot
rate of this run. Beside them stands `jax.nn.dot_product_attention` in bfloat16 over contiguous keys.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

import jax
import jax.numpy as jnp
from attention_problems import (
    DECODE_CASES,
    LAYERS_TIMED,
    MAIN_SHAPE,
    OTHER_CASES,
    OTHER_SHAPES,
    PAGE_LEN,
    PREFILL_CASES,
    WRITE_CANDIDATES,
    WRITE_CASES,
    Shape,
    decode_candidates,
    decode_case,
    over_layers,
    prefill_args,
    prefill_candidates,
    random_pool,
    write_args,
)
from jax import lax

from pallas_kernels.kv_cache import KVPages, bytes_per_token, write_kv
from pallas_kernels.kv_cache.kernel import WriteConfig, kernel_write
from pallas_kernels.paged_attention import paged_decode_attention, paged_prefill_attention
from pallas_kernels.paged_attention.decode_kernel import DecodeConfig, decode_attention
from pallas_kernels.paged_attention.prefill_kernel import PrefillConfig, prefill_attention
from pallas_kernels.paged_attention.tiles import ScoreFunction
from turbojax.bench.kernels import profiled_planes, stream_events

READ_RATE, DOT_RATE = 4.3e12, 790e12


def kernel_times(compiled: Any, *args: Any, repeats: int = 3) -> dict[str, list[float]]:
    """Microseconds of each kernel that ran, by name."""
    jax.block_until_ready(compiled(*args))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(repeats):
                out = compiled(*args)
            jax.block_until_ready(out)
        times: dict[str, list[float]] = {}
        for event in stream_events(profiled_planes(folder)):
            times.setdefault(event.name, []).append(event.duration_ns / 1e3)
    return times


def call_time(times: dict[str, list[float]], prefix: str) -> tuple[float, float]:
    """Median microseconds of the op's kernels, summed; and of everything else (the loop around it), per call."""
    ours = {name: t for name, t in times.items() if prefix in name}
    calls = max((len(t) for t in ours.values()), default=1)
    rest = sum(sum(t) for name, t in times.items() if name not in ours) / calls
    return sum(statistics.median(t) * round(len(t) / calls) for t in ours.values()), rest


def decode_row(case: str, pages: KVPages, config: DecodeConfig | None, compiled: Any, args: Any, rates: Any) -> dict:
    """One timed row."""
    lengths = DECODE_CASES[case][0]
    heads, head_dim = args[0].shape[1:]
    times = kernel_times(compiled, pages, *args)
    us, rest = call_time(times, "paged_decode")
    kv = int(lengths.sum()) * bytes_per_token(pages.num_kv_heads, head_dim, k_bits=pages.k_bits, v_bits=pages.v_bits)
    floor = kv / rates[0] * 1e6
    row = base_row(case, "decode", pages, heads, us, floor, rest, config)
    kernels = {n: round(statistics.median(t), 2) for n, t in times.items() if "paged_decode" in n}
    return row | {"kernels": kernels}


def compile_decode(config: DecodeConfig | None, pages: KVPages, args: Any) -> Any:
    scale = args[0].shape[-1] ** -0.5

    def attend(q, pages, layer, tables, lengths):
        if config is None:
            return paged_decode_attention(q, pages, layer, tables, lengths, scale=scale)
        return decode_attention(q, pages, layer, tables, lengths, ScoreFunction(scale, None, None), None, config, False)

    return jax.jit(over_layers(attend)).lower(pages, *args).compile()


def measure_rates() -> tuple[float, float, dict[str, float]]:
    """Read rate and dot rate of this run, never below the ones that floors are stated with."""
    x = jnp.ones((4 << 30,), jnp.bfloat16)
    compiled = jax.jit(lambda x: jnp.max(x.reshape(-1, 1 << 16), axis=1)).lower(x).compile()
    read = x.nbytes / (sum(statistics.median(t) for t in kernel_times(compiled, x).values()) * 1e-6)
    del x
    a = jax.random.normal(jax.random.key(0), (8192, 8192), jnp.bfloat16)
    compiled = jax.jit(lambda a: a @ a).lower(a).compile()
    dots = 2 * 8192**3 / (max(statistics.median(t) for t in kernel_times(compiled, a).values()) * 1e-6)
    return max(read, READ_RATE), max(dots, DOT_RATE), {"read_bandwidth": read, "dot_rate": dots}


def print_rows(rows: list[dict], limit: int | None = None) -> None:
    shown: dict[Any, int] = {}
    for r in rows:
        key = (r["case"], r["op"], r.get("k_bits"), r.get("v_bits"), r.get("head_dim"), r.get("heads"))
        shown[key] = shown.get(key, 0) + 1
        if limit is None or shown[key] <= limit:
            cut = " ".join(str(v) for v in (r.get("config") or {}).values())
            print(f"{r['op']:8}{r['case']:8} K{r['k_bits']:<3}V{r['v_bits']:<3}{r['time_us']:10.1f} us"
                  f"{r['floor_us']:9.1f} floor {r['share']:6.3f}  other {r['other_us']:5.1f}"
                  f"  dense {r['xla_bf16_us']}  {cut}", flush=True)  # fmt: skip


def compile_prefill(config: PrefillConfig | None, pages: KVPages, args: Any) -> Any:
    """The public call, or a cut of the kernel alone."""
    scale = args[0].shape[-1] ** -0.5

    def attend(q, pages, layer, tables, starts, history):
        if config is None:
            return paged_prefill_attention(q, pages, layer, tables, starts, history, scale=scale)
        function = ScoreFunction(scale, None, None)
        return prefill_attention(q, pages, layer, tables, starts, history, function, None, config, False)

    return jax.jit(over_layers(attend)).lower(pages, *args).compile()


def dense_time(case: str, heads: int, kv_heads: int, head_dim: int) -> tuple[float | None, str]:
    """Microseconds of bfloat16 attention over contiguous keys by jax.nn, with cuDNN where that runs, and which ran."""

    def normal(n: int, *shape: int) -> jax.Array:
        return jax.random.normal(jax.random.key(n), shape, jnp.bfloat16)

    if case in DECODE_CASES:
        lengths = jnp.asarray(DECODE_CASES[case][0], jnp.int32)
        rows, num_keys, extra = 1, -(-int(lengths.max()) // PAGE_LEN) * PAGE_LEN, {"key_value_seq_lengths": lengths}
    else:
        num_rows, history = PREFILL_CASES[case]
        if history:
            return None, ""
        rows, num_keys, lengths, extra = num_rows, num_rows, jnp.zeros(1), {"is_causal": True}
    q = normal(0, len(lengths), rows, heads, head_dim)
    k, v = (normal(n, len(lengths), num_keys, kv_heads, head_dim) for n in (1, 2))
    for implementation in ("cudnn", "xla"):
        try:
            attend = functools.partial(jax.nn.dot_product_attention, implementation=implementation, **extra)
            times = kernel_times(jax.jit(attend).lower(q, k, v).compile(), q, k, v)
            return round(sum(statistics.median(t) * len(t) for t in times.values()) / 3, 2), implementation
        except Exception as error:  # another library's limits, reported and left behind
            print(implementation, case, str(error)[:120], flush=True)
    return None, ""


def base_row(case: str, op: str, pages: KVPages, heads: int, us: float, floor: float, rest: float, config: Any) -> dict:
    return {
        "case": case, "op": op, "k_bits": pages.k_bits, "v_bits": pages.v_bits, "heads": heads,
        "kv_heads": pages.num_kv_heads, "head_dim": pages.head_dim, "time_us": round(us, 2),
        "floor_us": round(floor, 2), "share": round(floor / us, 3), "other_us": round(rest, 2),
        "config": None if config is None else vars(config),
    }  # fmt: skip


def prefill_row(case: str, pages: KVPages, config: PrefillConfig | None, compiled: Any, args: Any, rates: Any) -> dict:
    """Dots over the visible half of the scores, against the dot rate."""
    times = kernel_times(compiled, pages, *args)
    us, rest = call_time(times, "paged_prefill")
    us += rest  # a dequantised copy is part of the call
    rows, heads, head_dim = args[0].shape
    seen = rows * int(args[3][0]) + rows * (rows + 1) / 2
    return base_row(case, "prefill", pages, heads, us, 4 * heads * head_dim * seen / rates[1] * 1e6, rest, config)


def write_row(case: str, pages: KVPages, rows: int, config: WriteConfig | None, rates: Any) -> tuple[dict, KVPages]:
    """`rows` tokens into random pages; the pool is donated and comes back."""
    k, v, ids, offsets = write_args(rows, pages)
    stride = pages.k.shape[0] // LAYERS_TIMED

    def write_layer(i, pages, *args):
        if config is None:
            return write_kv(pages, *args[:2], i * stride, *args[2:])
        return kernel_write(pages, *args[:2], i * stride, *args[2:], config, False)

    def run(pages, *args):
        return lax.fori_loop(0, LAYERS_TIMED, lambda i, p: write_layer(i, p, *args), pages)

    compiled = jax.jit(run, donate_argnums=0).lower(pages, k, v, ids, offsets).compile()
    box = [compiled(pages, k, v, ids, offsets)]

    def step(*args):
        box[0] = compiled(box[0], *args)
        return box[0]

    us, rest = call_time(kernel_times(step, k, v, ids, offsets), "kv_write")
    stored = bytes_per_token(pages.num_kv_heads, pages.head_dim, k_bits=pages.k_bits, v_bits=pages.v_bits)
    floor = (k.nbytes + v.nbytes + rows * stored) / rates[0] * 1e6
    return base_row(case, "write", pages, pages.num_kv_heads, us, floor, rest, config), box[0]


def timed(rows: list[dict], make_row: Any, job: Any) -> None:
    """Adds a row; a configuration that does not compile or run is reported and left out."""
    try:
        rows.append(make_row(job.result()))
    except jax.errors.JaxRuntimeError as error:
        print("failed", str(error)[:150])


def bench(bits: tuple[int, int], cases: list[str], rates: Any, sweep: bool, shape: Shape) -> list[dict]:
    """All cases of one precision and shape; compiled in parallel, timed one after another."""
    num_pages, heads, head_dim = 16640, shape.kv_heads * shape.group, shape.head_dim
    pages = random_pool(*bits, num_pages, kv_heads=shape.kv_heads, head_dim=head_dim)
    rows, jobs = [], []
    with ThreadPoolExecutor(14) as pool:
        for case in cases:
            if case in DECODE_CASES:
                args = decode_case(*DECODE_CASES[case], num_pages, heads, head_dim)
                for c in decode_candidates(case) if sweep else [None]:
                    row = functools.partial(decode_row, case, pages, c, args=args, rates=rates)
                    jobs.append((row, pool.submit(compile_decode, c, pages, args)))
            elif case in PREFILL_CASES:
                num_rows, history = PREFILL_CASES[case]
                args = prefill_args(num_rows, num_pages, heads, head_dim, history)
                for c in prefill_candidates() if sweep else [None]:
                    row = functools.partial(prefill_row, case, pages, c, args=args, rates=rates)
                    jobs.append((row, pool.submit(compile_prefill, c, pages, args)))
        for row, job in jobs:
            timed(rows, row, job)
    for case in cases:
        if case in WRITE_CASES:
            for config in WRITE_CANDIDATES if sweep else [None]:
                row, pages = write_row(case, pages, WRITE_CASES[case], config, rates)
                rows.append(row)
    return sorted(rows, key=lambda r: (r["op"], r["case"], r["time_us"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--sweep", action="store_true", help="time every candidate instead of the chosen configuration")
    parser.add_argument("--cases", nargs="*", default=[*DECODE_CASES, *PREFILL_CASES, *WRITE_CASES])
    parser.add_argument("--bits", nargs="*", default=["4,4", "8,8", "16,16", "8,4"])
    options = parser.parse_args()
    start = time.time()
    *rates, measured = measure_rates()
    rows: list[dict] = []
    print({k: f"{v:.3e}" for k, v in measured.items()}, flush=True)
    jobs = [(MAIN_SHAPE, options.cases, options.bits)]
    if not options.sweep:
        jobs += [(shape, [c for c in OTHER_CASES if c in options.cases], ["8,8", "4,4"]) for shape in OTHER_SHAPES]
    for shape, cases, precisions in jobs:
        dense = {} if options.sweep else {
            c: dense_time(c, shape.kv_heads * shape.group, shape.kv_heads, shape.head_dim)
            for c in cases if c in DECODE_CASES or c in PREFILL_CASES
        }  # fmt: skip
        for bits in precisions:
            k_bits, v_bits = map(int, bits.split(","))
            found = bench((k_bits, v_bits), cases, rates, options.sweep, shape)
            for row in found:
                row["xla_bf16_us"], row["xla_implementation"] = dense.get(row["case"], (None, ""))
            print(f"{time.time() - start:.0f} s {shape}", flush=True)
            print_rows(found, 4)
            rows += found
            write(options.json, rows, measured)


def write(path: Path, rows: list[dict], measured: dict[str, float]) -> None:
    path.write_text(json.dumps({
        "device": jax.devices()[0].device_kind,
        "versions": {"jax": jax.__version__, "python": sys.version.split()[0]},
        "date": datetime.date.today().isoformat(),
        "command": "python scripts/bench_attention.py " + " ".join(sys.argv[1:]),
        **measured, "rows": rows,
    }, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
