"""Measures the linears' candidates on this GPU and writes the table that `affine_linear` reads.

    python scripts/tune.py --shapes 4096x4096 4096x28672 --out pallas_kernels/affine_linear/tables/nvidia_h200.json

Entries that the table has for other shapes stay.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from bench_linear import SHAPES, Case, measure, random_weights

from pallas_kernels import backend
from pallas_kernels.affine_linear import PackedAffine, tuning
from pallas_kernels.affine_linear.api import linear_by


def tune_shape(w: PackedAffine, buckets: list[int]) -> dict[str, dict[str, Any]]:
    """The fastest candidate of each bucket, as table entries with the microseconds of all."""
    layers, padded = w.words.shape[0], w.words.shape[2]
    cases = []
    for bucket in buckets:
        x = jax.random.normal(jax.random.key(1), (bucket, w.K), jnp.bfloat16)
        for choice in tuning.candidates(bucket, w.layout, padded):
            call = lambda i, x, w, choice=choice: linear_by(choice, x, w, jnp.int32(i), x.dtype, interpret=False)  # noqa: E731
            cases.append(Case((bucket, choice), call, layers if bucket <= 64 else 2, (x, w)))
    times = measure(cases)
    entries = {}
    for bucket in buckets:
        ranked = sorted((us, repr(choice), choice) for (b, choice), us in times.items() if b == bucket)
        us, _, choice = ranked[0]
        key = tuning.key_of(bucket, w.layout, w.N)
        entries[key] = {**tuning.to_entry(choice), "time_us": round(us, 2)}
        print(key, *(f"\n   {us:8.1f}  {name}" for us, name, _ in ranked[:4]), flush=True)
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=[f"{K}x{N}" for K, N in SHAPES], help="KxN")
    parser.add_argument("--buckets", type=int, nargs="*", default=list(tuning.M_BUCKETS))
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--kind", choices=("symmetric", "zero"), default="symmetric")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no shape after this long")
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
